"""The tokenizer of a Hugging Face directory as metadata of a GGUF file.

Source: llama.cpp's converter (`conversion/base.py`) for which keys are written, the types of added
tokens, and the padding of vocabularies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError
from ..tokenizer import Tokenizer
from ..tokenizer.bpe import splitter
from ..tokenizer.decoding import is_special_name
from ..tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ..tokenizer.sentencepiece_proto import read_model
from ..tokenizer.tokenizer_config import AddedToken, TokenizerDirectory
from ..tokenizer.tokenizer_json import HfTokenizer
from ..tokenizer.untrusted_files import read_text
from ..tokenizer.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    known_eog_ids,
)

_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0
# Texts that llama.cpp's pre-tokenizers split differently: contractions, case, digits, newlines,
# punctuation, marks, and scripts without spaces.
_PROBE = (
    "I've, we'LL; 'Tis 1 22 333 4444 55555 3.14 x=y+z HelloWorld camelCase don't  two   three\n\n"
    " a\n\t b\r\n (done)... ``q'' -->> #tag @me $5 50% é naïve Straße ЯзыкЪ 中文字符和English "
    "日本語 カタカナ 한국어 हिन्दी ไทย 🙂🙂 a_b foo/bar\n/x ½ ٣٤٥ !!\n\n\n   \n end  "
)


@dataclass
class _Vocabulary:
    """Pieces, types and scores by id; ``metadata``: further keys, without their prefix."""

    pieces: list[bytes]
    kinds: list[int]
    scores: list[float] | None
    metadata: dict[str, Any] = field(default_factory=dict)

    def resize(self, rows: int) -> None:
        """Pad the vocabulary to the rows of the embedding."""
        for number in range(len(self.pieces), rows):
            self.pieces.append(f"[PAD{number}]".encode())
            self.kinds.append(UNUSED)
            if self.scores is not None:
                self.scores.append(_PADDING_SCORE)

    def add(self, number: int, token: AddedToken) -> None:
        """Place an added token; one that the vocabulary has keeps a type of its own."""
        special = token.special or is_special_name(token.content)
        text = token.content if special else token.content.replace(SPACE, " ")
        self.resize(number + 1)
        self.pieces[number] = text.encode("utf-8", "replace")
        if self.kinds[number] not in (UNKNOWN, BYTE):
            self.kinds[number] = CONTROL if special else USER_DEFINED
        if self.scores is not None:
            self.scores[number] = _ADDED_SCORE


def vocabulary_metadata(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, rows: int
) -> dict[str, Any]:
    """Return the keys of a directory's tokenizer, ``tokenizer.ggml.*``.

    Args:
        folder: The directory.
        config: The content of its config.json.
        tokenizer: Its tokenizer.
        rows: Rows of the embedding, to which the vocabulary is padded.

    Raises:
        ModelFileError: GGUF has no form for the tokenizer.
    """
    directory = TokenizerDirectory(folder, config)
    if (folder / "tokenizer.model").is_file() and not _is_byte_level(folder):
        found = _sentencepiece(folder / "tokenizer.model", directory)
    elif (folder / "tokenizer.json").is_file() and isinstance(tokenizer, HfTokenizer):
        found = _byte_level(folder / "tokenizer.json", tokenizer, rows)
    else:
        raise ModelFileError(
            f"{folder}: a tokenizer.model, or a tokenizer.json with byte-level BPE, is required"
        )
    last = max(directory.added, default=-1)
    _check_size(folder, max(len(found.pieces), last + 1), rows)
    for number, token in directory.added.items():
        found.add(number, token)
    found.resize(rows)
    ids: dict[str, int | None] = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }
    if tokenizer.bos_id is None and isinstance(stated := config.get("bos_token_id"), int):
        ids["bos_token_id"] = stated if stated < rows else None
    numbers = {piece: number for number, piece in enumerate(found.pieces)}
    # llama.cpp knows most end-of-generation tokens by their names; GGUF has a key for another one.
    known = known_eog_ids({piece.decode("utf-8", "replace"): n for piece, n in numbers.items()})
    others = sorted(tokenizer.eog_ids - known - {tokenizer.eos_id})
    ids["eot_token_id"] = others[0] if others else None
    probe = tokenizer.encode("a", add_special=True)
    keys: dict[str, Any] = {
        **found.metadata,
        "tokens": found.pieces,
        "token_type": np.array(found.kinds, np.int32),
        **({} if found.scores is None else {"scores": np.array(found.scores, np.float32)}),
        **{key: token for key, token in ids.items() if token is not None},
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.eos_id is not None and probe[-1:] == [tokenizer.eos_id],
    }
    named = directory.named({})
    for key, name in (("padding_token_id", "pad_token"), ("unknown_token_id", "unk_token")):
        if name in named and (place := numbers.get(named[name].content.encode())) is not None:
            keys[key] = place
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _check_size(source: Path, tokens: int, rows: int) -> None:
    """ModelFileError if there are more tokens than rows. Ids come from files, so memory is only
    allocated for those that passed."""
    if tokens > rows:
        raise ModelFileError(
            f"{source}: the tokenizer has {tokens} tokens, the embedding {rows} rows"
        )


def _is_byte_level(folder: Path) -> bool:
    """Whether there is a tokenizer.json with byte-level BPE, which then is the tokenizer."""
    path = folder / "tokenizer.json"
    return path.is_file() and '"ByteLevel"' in read_text(path)


def _sentencepiece(path: Path, directory: TokenizerDirectory) -> _Vocabulary:
    model = read_model(path)
    if not model.is_bpe:
        raise ModelFileError(f"{path}: only SentencePiece's BPE can be written as GGUF")
    prefix = directory.flag("add_prefix_space", model.prefix)
    keys = {"model": "llama", "pre": "default", "add_space_prefix": prefix and model.prefix}
    kinds = [int(kind) for kind in model.kinds]
    return _Vocabulary([*model.pieces], kinds, [float(s) for s in model.scores], keys)


def _byte_level(path: Path, tokenizer: HfTokenizer, rows: int) -> _Vocabulary:
    content = json.loads(read_text(path))  # the tokenizer has checked it
    model = content["model"]
    merges, engine = model.get("merges"), tokenizer.engine
    if model.get("type", "BPE") != "BPE" or merges is None or engine.pre_tokenizer is None:
        raise ModelFileError(f"{path}: only byte-level BPE can be written as GGUF")
    name = _pre_tokenizer(engine, bool(model.get("ignore_merges")))
    if name is None:
        raise ModelFileError(f"{path}: llama.cpp has no pre-tokenizer that splits as this one")
    pairs = [text if isinstance(text, str) else " ".join(text) for text in merges]
    ids: dict[str, int] = model["vocab"]
    found = _Vocabulary([], [], None, {"model": "gpt2", "pre": name, "merges": pairs})
    added = engine.get_added_tokens_decoder()
    last = max(max(ids.values(), default=-1), max(added, default=-1))
    _check_size(path.parent, last + 1, rows)
    found.resize(last + 1)
    for text, number in ids.items():
        found.pieces[number], found.kinds[number] = text.encode("utf-8", "replace"), NORMAL
    for number, token in added.items():
        found.add(number, AddedToken(token.content, token.special))
    return found


def _pre_tokenizer(engine: Any, ignore_merges: bool) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer that splits a text as ``engine`` does."""
    want: Sequence[Any] = engine.pre_tokenizer.pre_tokenize_str(_PROBE)
    named = [name for name, pre in PRE_TOKENIZERS.items() if not pre.raw]
    for same in (True, False):  # the flag has an effect on few words
        for name in named:
            pre = PRE_TOKENIZERS[name]
            if (pre.ignore_merges == ignore_merges) is same:
                found = splitter(pre).pre_tokenize_str(_PROBE)
                if found == want:
                    return name
    return None
