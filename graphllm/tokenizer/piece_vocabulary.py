"""Tokenizers that cut texts with a SentencePiece model, but number the pieces by a vocab.json.

Marian has a model for sources and one for targets; only the first is needed, since pieces are
decoded as they are. Source: transformers 5, `tokenization_marian.py`, `tokenization_m2m_100.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, quote
from .decoding import BaseTokenizer, replace_surrogates
from .sentencepiece_proto import load_processor, read_model
from .tokenizer_config import TokenizerDirectory
from .untrusted_files import LARGEST_ID, read_bytes, read_json
from .vocabulary import SPACE

_M2M_LANGUAGES = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu "
    "ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms "
    "my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur "
    "uz vi wo xh yi yo zh zu"
)
_WMT21_LANGUAGES = "en ha is ja cs ru zh de"
_LANGUAGES = {"m2m100": _M2M_LANGUAGES.split(), "wmt21": _WMT21_LANGUAGES.split(" ")}


class PieceVocabulary(BaseTokenizer):
    """Base class; `Tokenizer` documents the methods.

    Args:
        directory: settings of the directory.
        model: name of the SentencePiece model.
        extras: tokens that follow those of vocab.json.
    """

    space_prefix = True
    bos_id: int | None = None
    eos_id: int | None
    add_bos = False

    def __init__(
        self, directory: TokenizerDirectory, model: str, extras: Sequence[str] = ()
    ) -> None:
        path = directory.folder / "vocab.json"
        self._ids = _read_vocabulary(path)
        after = max(self._ids.values(), default=-1) + 1
        self._extras = {text: after + i for i, text in enumerate(extras)}
        self._texts = {token: text for text, token in {**self._ids, **self._extras}.items()}
        self.vocab_size = max(max(self._texts, default=-1) + 1, directory.rows)
        for name in ("<unk>", "</s>"):
            if name not in self._ids:
                raise ModelFileError(f"{path}: there is no token {quote(name)}")
        self._unknown, self._end = self._ids["<unk>"], self._ids["</s>"]
        self.eos_id = self._end
        self.eog_ids = directory.eos_ids(self.vocab_size) | {self._end}
        special = ("<unk>", "</s>", "<pad>", "<s>")
        self._controls = {
            *self._extras.values(),
            *(self._ids[t] for t in special if t in self._ids),
        }
        self._processor = _load_processor(directory.folder / model)

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """See `Tokenizer.encode`. Control tokens are never parsed."""
        pieces = self._processor.EncodeAsPieces(replace_surrogates(text))
        ids = [self._ids.get(piece, self._unknown) for piece in pieces]
        return [*ids, self._end] if add_special else ids

    def _bytes_of(self, token: int) -> bytes:
        return self._texts.get(token, "").replace(SPACE, " ").encode()

    def _is_control(self, token: int) -> bool:
        return token in self._controls


class M2M100Tokenizer(PieceVocabulary):
    """M2M-100's, whose languages follow the pieces."""

    def __init__(self, directory: TokenizerDirectory) -> None:
        kind = directory.settings.get("language_codes", "m2m100")
        if not isinstance(kind, str) or kind not in _LANGUAGES:
            raise ModelFileError(
                f"{directory.folder / 'tokenizer_config.json'}: language_codes = {quote(kind)} is "
                f"not supported, only {', '.join(_LANGUAGES)}"
            )
        languages = [f"__{code}__" for code in _LANGUAGES[kind]]
        super().__init__(directory, "sentencepiece.bpe.model", languages)


class MarianTokenizer(PieceVocabulary):
    """Marian's. A text may begin with the code of the target language, such as ``>>fra<<``."""

    _CODE = re.compile(r">>.*?<<")

    def __init__(self, directory: TokenizerDirectory) -> None:
        super().__init__(directory, "source.spm")

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """See `Tokenizer.encode`."""
        code = self._CODE.match(text)
        before = [self._ids.get(code[0], self._unknown)] if code else []
        return before + super().encode(text[code.end() if code else 0 :], add_special)


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Return the ids of a vocab.json. ModelFileError: an id is malformed, or stated twice."""
    vocabulary = read_json(path)
    for text, token in vocabulary.items():
        if type(token) is not int or not 0 <= token < LARGEST_ID:
            raise ModelFileError(f"{path}: the id of {quote(text)} is {quote(token)}")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ModelFileError(f"{path}: two tokens have the same id")
    return vocabulary


def _load_processor(path: Path) -> Any:
    """Load a SentencePiece model. ModelFileError: the file is missing or malformed."""
    read_model(path)
    try:
        return load_processor(read_bytes(path))
    except ValueError as error:
        raise ModelFileError(f"{path}: not a usable model: {error}") from None
