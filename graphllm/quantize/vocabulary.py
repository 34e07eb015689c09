"""The tokenizer of a Hugging Face directory as metadata of a GGUF file.

Source: llama.cpp's converter (`conversion/base.py`) for which keys are written, the types of added
tokens, and the padding of vocabularies.
"""

from __future__ import annotations

import json
from base64 import b64decode
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
from ..tokenizer.sentencepiece import UnigramTokenizer
from ..tokenizer.sentencepiece_model import VocabularyData
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
from ..tokenizer.wordpiece import WordPieceTokenizer

_CHECKED = {"bert": WordPieceTokenizer, "t5": UnigramTokenizer}  # kinds that are read back
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
    if tokenizer.vocab_size > rows:  # ids come from files, and memory is allocated for them
        raise ModelFileError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {rows} rows"
        )
    directory = TokenizerDirectory(folder, config)
    found = _read(folder, directory, tokenizer)
    added: dict[int, AddedToken] = dict(directory.added)
    if isinstance(tokenizer, HfTokenizer):
        for number, own in tokenizer.engine.get_added_tokens_decoder().items():
            added.setdefault(number, AddedToken(own.content, own.special))
    for number, token in added.items():
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
    if found.metadata["model"] == "bert":
        ids |= {"bos_token_id": probe[0], "cls_token_id": probe[0], "seperator_token_id": probe[-1]}
    keys: dict[str, Any] = {
        **found.metadata,
        "tokens": found.pieces,
        "token_type": np.array(found.kinds, np.int32),
        **({} if found.scores is None else {"scores": np.array(found.scores, np.float32)}),
        **{key: token for key, token in ids.items() if token is not None},
        "add_bos_token": tokenizer.add_bos or "cls_token_id" in ids,
        "add_eos_token": tokenizer.eos_id is not None and probe[-1:] == [tokenizer.eos_id],
    }
    named = directory.named({})
    for key, name in (
        ("padding_token_id", "pad_token"), ("unknown_token_id", "unk_token"),
        ("mask_token_id", "mask_token"),
    ):  # fmt: skip
        if name in named and (place := numbers.get(named[name].content.encode())) is not None:
            keys[key] = place
    if UNKNOWN in found.kinds:
        keys["unknown_token_id"] = found.kinds.index(UNKNOWN)
    values = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if (kind := _CHECKED.get(found.metadata["model"])) is not None:
        _check_same(kind(VocabularyData(folder, values)), tokenizer, folder)
    return values


def _read(folder: Path, directory: TokenizerDirectory, tokenizer: Tokenizer) -> _Vocabulary:
    """Read the vocabulary of the file that the directory's tokenizer is read from."""
    path, models = folder / "tokenizer.json", ("tokenizer.model", "spiece.model")
    kind = json.loads(read_text(path))["model"].get("type", "BPE") if path.is_file() else ""
    pieces = next((folder / name for name in models if (folder / name).is_file()), None)
    if kind == "WordPiece":
        return _wordpiece(path)
    if kind == "Unigram":
        return _unigram(path)
    if pieces is not None and not _is_byte_level(folder):
        return _sentencepiece(pieces, directory)
    if kind and isinstance(tokenizer, HfTokenizer):
        return _byte_level(path, tokenizer)
    raise ModelFileError(
        f"{folder}: a tokenizer.json with byte-level BPE, WordPiece or Unigram, or a "
        "tokenizer.model, is required"
    )


def _check_same(made: Tokenizer, tokenizer: Tokenizer, folder: Path) -> None:
    """ModelFileError unless the file's tokenizer has the ids of the directory's."""
    for text in ("a", _PROBE):
        if made.encode(text, add_special=True) != tokenizer.encode(text, add_special=True):
            raise ModelFileError(
                f"{folder}: GGUF cannot state how the tokenizer normalises and splits texts"
            )


def _is_byte_level(folder: Path) -> bool:
    """Whether there is a tokenizer.json with byte-level BPE, which then is the tokenizer."""
    path = folder / "tokenizer.json"
    return path.is_file() and '"ByteLevel"' in read_text(path)


def _sentencepiece(path: Path, directory: TokenizerDirectory) -> _Vocabulary:
    model = read_model(path)
    kinds = [int(kind) for kind in model.kinds]
    if not model.is_bpe:
        rules = _unigram_keys(model.charsmap, model.prefix, model.merges_spaces)
        return _Vocabulary([*model.pieces], kinds, [float(s) for s in model.scores], rules)
    prefix = directory.flag("add_prefix_space", model.prefix)
    keys = {"model": "llama", "pre": "default", "add_space_prefix": prefix and model.prefix}
    return _Vocabulary([*model.pieces], kinds, [float(s) for s in model.scores], keys)


def _wordpiece(path: Path) -> _Vocabulary:
    content = json.loads(read_text(path))  # the tokenizer has checked it
    model, normalizer = content["model"], content.get("normalizer") or {}
    lowercase = bool(normalizer.get("lowercase", False))
    accents = normalizer.get("strip_accents")
    found = _Vocabulary([], [], None, {
        "model": "bert", "pre": "default", "normalizer.lowercase": lowercase,
        "normalizer.strip_accents": lowercase if accents is None else bool(accents),
    })  # fmt: skip
    prefix = model["continuing_subword_prefix"]
    found.resize(max(model["vocab"].values(), default=-1) + 1)
    for text, number in model["vocab"].items():
        inner = text.startswith(prefix)
        piece = text.removeprefix(prefix) if inner else SPACE + text
        found.pieces[number], found.kinds[number] = piece.encode("utf-8", "replace"), NORMAL
    unknown = model["vocab"].get(model["unk_token"])
    if unknown is not None:
        found.pieces[unknown], found.kinds[unknown] = model["unk_token"].encode(), UNKNOWN
    return found


def _unigram(path: Path) -> _Vocabulary:
    content = json.loads(read_text(path))  # the tokenizer has checked it
    model = content["model"]
    charsmap = b64decode(_charsmap(content.get("normalizer")))
    pieces = [text.encode("utf-8", "replace") for text, _ in model["vocab"]]
    scores = [float(score) for _, score in model["vocab"]]
    kinds = [NORMAL] * len(pieces)
    if model.get("unk_id") is not None:
        kinds[model["unk_id"]] = UNKNOWN
    return _Vocabulary(pieces, kinds, scores, _unigram_keys(charsmap, True, True))


def _unigram_keys(charsmap: bytes, prefix: bool, merge_spaces: bool) -> dict[str, Any]:
    rules = {"precompiled_charsmap": np.frombuffer(charsmap, np.uint8)} if charsmap else {}
    flags = {"add_space_prefix": prefix, "remove_extra_whitespaces": merge_spaces}
    return {"model": "t5", "pre": "default", **flags, **rules}


def _charsmap(normalizer: Any) -> str:
    """Return the precompiled rules of a normaliser of tokenizer.json; empty without any."""
    if not isinstance(normalizer, dict):
        return ""
    if normalizer.get("type") == "Precompiled":
        return str(normalizer["precompiled_charsmap"])
    return next(filter(None, map(_charsmap, normalizer.get("normalizers", []))), "")


def _byte_level(path: Path, tokenizer: HfTokenizer) -> _Vocabulary:
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
    found.resize(max(ids.values(), default=-1) + 1)
    for text, number in ids.items():
        found.pieces[number], found.kinds[number] = text.encode("utf-8", "replace"), NORMAL
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
