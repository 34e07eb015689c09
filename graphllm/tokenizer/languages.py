"""Language codes of multilingual translation models: NLLB, M2M-100, mBART and Marian.

Source: transformers 5, `tokenization_nllb.py`, `tokenization_m2m_100.py`, `tokenization_mbart.py`,
`tokenization_mbart50.py` and `tokenization_marian.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import RequestError, quote
from .tokenizer_config import TokenizerDirectory

if TYPE_CHECKING:
    from . import Tokenizer

# Places of the code of a language.
BEFORE, AFTER = "before", "after"  # the source's, before the text, or after the end token
TARGET = "target"  # the target's, before the text of the source


@dataclass(frozen=True)
class _Kind:
    """Codes of a tokenizer class: the form of their tokens, their place, the default source."""

    token: str
    place: str
    default: str = ""


_KINDS = {
    "NllbTokenizer": _Kind(r"([a-z]{3}_[A-Z][a-z]{3})", BEFORE, "eng_Latn"),
    "M2M100Tokenizer": _Kind(r"__([a-z]+)__", BEFORE, "en"),
    "MBartTokenizer": _Kind(r"([a-z]{2}_[A-Z]{2})", AFTER, "en_XX"),
    "MBart50Tokenizer": _Kind(r"([a-z]{2}_[A-Z]{2})", BEFORE, "en_XX"),
    "MarianTokenizer": _Kind(r">>(.+)<<", TARGET),
}


@dataclass(frozen=True)
class Languages:
    """Encodes sources, with the codes of languages where the tokenizer has them.

    Attributes:
        tokenizer: the tokenizer.
        codes: token id of each code.
        place: where a source has the code.
        default: code of the source if none is stated.
    """

    tokenizer: Tokenizer
    codes: Mapping[str, int] = field(default_factory=dict)
    place: str = ""
    default: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, directory: TokenizerDirectory) -> Languages:
        """Return the languages of a directory's tokenizer."""
        name = directory.class_name(byte_level=False)
        kind = _KINDS.get(name)
        if kind is None:
            return cls(tokenizer)
        ids = range(tokenizer.vocab_size)
        texts = ((tokenizer.piece(i).decode("utf-8", "replace"), i) for i in ids)
        found = ((re.fullmatch(kind.token, text), i) for text, i in texts)
        codes = {match[1]: i for match, i in found if match is not None}
        legacy = name == "NllbTokenizer" and directory.flag("legacy_behaviour", False)
        stated = directory.settings.get("src_lang")
        default = stated if isinstance(stated, str) else kind.default
        return cls(tokenizer, codes, AFTER if legacy else kind.place, default)

    def encode(self, text: str, source: str | None, target: str | None) -> list[int]:
        """Return the ids of a source. RequestError: a code is unknown, or has no use."""
        if source is not None and (self.place == TARGET or not self.codes):
            raise RequestError(
                f"source_lang = {quote(source)} has no use: sources of the model have no language "
                "code",
                "source_lang",
            )
        if not self.codes:
            return self.tokenizer.encode(text, add_special=True)
        if self.place == TARGET:
            code = [] if target is None else [self._id("target_lang", target)]
            return [*code, *self.tokenizer.encode(text, add_special=True)]
        code = [self._id("source_lang", self.default if source is None else source)]
        ids, end = self.tokenizer.encode(text), self.tokenizer.eos_id
        ends = [] if end is None else [end]
        return [*ids, *ends, *code] if self.place == AFTER else [*code, *ids, *ends]

    def first_token(self, target: str | None) -> int | None:
        """Return the token that a target in this language begins with; None if it has none.

        RequestError: the code is unknown, or has no use.
        """
        if target is None:
            return None
        if not self.codes:
            raise RequestError(
                f"target_lang = {quote(target)} has no use: the model has no language codes",
                "target_lang",
            )
        token = self._id("target_lang", target)
        return None if self.place == TARGET else token

    def _id(self, name: str, code: str) -> int:
        if code not in self.codes:
            near = difflib.get_close_matches(code, self.codes, 3, 0.5) or sorted(self.codes)[:3]
            raise RequestError(
                f"{name} = {quote(code)} is not one of the model's {len(self.codes)} languages, "
                f"such as {', '.join(near)}",
                name,
            )
        return self.codes[code]
