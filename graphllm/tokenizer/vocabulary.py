"""Base class of tokenizers that hold their pieces, in the form of GGUF's vocabularies.

Source: llama.cpp, `src/llama-vocab.cpp`, for the keys and their defaults, the parsing of special
tokens, and the tokens that end a generation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ModelFileError, quote
from ..weights.gguf import StringArray
from ..weights.gguf_format import T, typed_value
from .decoding import BaseTokenizer, is_special_name, overlaps_span, replace_surrogates
from .pieces import Pieces

SPACE = "▁"  # SentencePiece's symbol for a space

# Token types of `tokenizer.ggml.token_type` and of SentencePiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Tokens that end a generation, whatever their type.
_END_NAMES = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_END_KEYS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Fill-in-the-middle tokens: keys and names. Without any of the keys, tokens with these names are
# control tokens, whatever their type. The last three groups also end a generation.
FIM_NAMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("fim_pre", "prefix"), (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    )),
    (("fim_suf", "suffix"), (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    )),
    (("fim_mid", "middle"), (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    )),
    (("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    (("fim_rep",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    (("fim_sep",), ("<|file_sep|>",)),
)  # fmt: skip
# gpt-oss structures its text with these tokens, so they are always parsed and shown.
_SHOWN_NAMES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# DeepSeek's calls of functions: control tokens in GGUF files, which answers show nevertheless.
_CALL_NAMES = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
# If all of the first tokens exist, the second does not end a generation and has the given type:
# o200k_harmony and solar-open, Gemma 4.
_NOT_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>", USER_DEFINED),
    ({"<|return|>", "<|calls|>"}, "<|end|>", USER_DEFINED),
    ({"<|call|>", "<|flush|>"}, "<|end|>", USER_DEFINED),
    ({"<|calls|>", "<|flush|>"}, "<|end|>", USER_DEFINED),
    ({"<|tool_response>"}, "</s>", NORMAL),
)

_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_SPACES = " \t\n\v\f\r"
_HIDDEN = "\udfff"  # a lone surrogate, which encoded texts never contain
_HIDDEN_PATTERN = re.compile(_HIDDEN)


def known_eog_ids(named: Mapping[str, int]) -> set[int]:
    """Return the ids of special tokens that are known to end a generation."""
    ends = {name for name in _END_NAMES if name in named}
    for present, name, _ in _NOT_ENDS:
        if present <= named.keys():
            ends.discard(name)
    return {named[name] for name in ends}


class SpecialTokens:
    """Splits special tokens off a text before the rest is tokenized, the longest token first.

    With ``strip`` the spaces after a token are dropped, except after those of `_KEEP_SPACES`.
    """

    def __init__(self, pieces: Iterable[tuple[str, int]], strip: bool = False) -> None:
        self._strip = strip
        self._ids = {text: token for text, token in pieces if text}
        # Most texts contain none of the thousands of tokens; two characters exclude most of them.
        self._by_head: dict[str, list[str]] = {}
        for text in self._ids:
            self._by_head.setdefault(text[:2], []).append(text)

    def _present(self, text: str) -> list[str]:
        """Return the tokens that occur in ``text``."""
        heads = [head for head in self._by_head if head in text]
        return [piece for head in heads for piece in self._by_head[head] if piece in text]

    def hide(self, text: str, literal: Sequence[tuple[int, int]]) -> tuple[str, Iterator[str]]:
        """Mask the tokens that overlap a ``literal`` span.

        Returns:
            ``text`` with `_HIDDEN` as the first character of each such token, and the original
            characters.
        """
        hidden = set()
        for piece in self._present(text):
            at = text.find(piece)
            while at >= 0:
                if overlaps_span(literal, at, at + len(piece)):
                    hidden.add(at)
                at = text.find(piece, at + 1)
        characters = list(text)
        for at in hidden:
            characters[at] = _HIDDEN
        return "".join(characters), iter([text[at] for at in sorted(hidden)])

    def split(self, text: str) -> list[str | int]:
        """Split ``text`` into token ids and the non-empty texts between them."""
        found = self._present(text)
        found.sort(key=lambda piece: (-len(piece.encode()), self._ids[piece]))
        parts: list[str | int] = [text] if text else []
        for piece in found:
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int) or piece not in part:
                    cut.append(part)
                    continue
                strip = self._strip and piece not in _KEEP_SPACES
                for index, rest in enumerate(part.split(piece)):
                    if index:
                        cut.append(self._ids[piece])
                        rest = rest.lstrip(_SPACES) if strip else rest
                    if rest:
                        cut.append(rest)
            parts = cut
        return parts


class VocabularySource(Protocol):
    """A vocabulary in the form of GGUF's keys: a GGUF file or an equivalent."""

    @property
    def path(self) -> Path: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Vocabulary(BaseTokenizer):
    """Base class of tokenizers that hold their pieces. `Tokenizer` documents the methods.

    The key ``tokenizer.ggml.tokens`` of a source may also be a list of bytes.
    """

    # Defaults of files: ids of bos, eos and unknown; whether bos, eos and a space are added.
    default_ids: tuple[int | None, int | None, int | None] = (None, None, None)
    default_adds = (False, False, False)
    prefix_after_special = True  # whether a space is also put after a special token
    key_format = "key 'tokenizer.ggml.{}'"  # name of a key in error messages

    def __init__(self, file: VocabularySource) -> None:
        self._file = file
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, (StringArray, list)) or not len(tokens):
            raise self._error("tokens", "missing, empty, or not an array of strings")
        self._pieces = Pieces.of(tokens)
        self.vocab_size = len(self._pieces)
        kinds = self._numbers("token_type", "iu")
        if kinds is None:
            kinds = np.full(self.vocab_size, NORMAL)
        known = (kinds >= NORMAL) & (kinds <= BYTE)
        self._kinds = np.where(known, kinds, UNUSED).astype(np.uint8)
        self.bos_id, self.eos_id, self._unknown_id = (
            self._token(key, default if default in range(self.vocab_size) else None)
            for key, default in zip(("bos", "eos", "unknown"), self.default_ids, strict=True)
        )
        keys = ("add_bos_token", "add_eos_token", "add_space_prefix")
        self.add_bos, self.add_eos, self.space_prefix = (
            self._flag(key, default) for key, default in zip(keys, self.default_adds, strict=True)
        )
        self.eog_ids = self._find_ends()
        if self.add_bos and self.bos_id is None:
            raise self._error("add_bos_token", "true, but there is no begin token")
        if self.add_eos and self.eos_id is None:
            raise self._error("add_eos_token", "true, but there is no end token")
        self._strip = self._strips_spaces()

    @cached_property
    def _plain(self) -> list[tuple[str, int]]:
        """Text and id of the tokens that are always split off a text."""
        return self._with_text(self._kinds == USER_DEFINED)

    @cached_property
    def _hidden(self) -> list[tuple[str, int]]:
        """Text and id of the control tokens."""
        return self._with_text((self._kinds == CONTROL) | (self._kinds == UNKNOWN))

    @cached_property
    def _plain_specials(self) -> SpecialTokens:
        return SpecialTokens(self._plain, self._strip)

    @cached_property
    def _all_specials(self) -> SpecialTokens:
        return SpecialTokens(self._plain + self._hidden, self._strip)

    @cached_property
    def _controls(self) -> SpecialTokens:
        """Those that a literal text must not contain."""
        named = [(text, token) for text, token in self._plain if is_special_name(text)]
        return SpecialTokens(self._hidden + named)

    def _key_error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: key {key!r}: {text}")

    def _error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: {self.key_format.format(key)}: {text}")

    def _value(self, key: str, kind: type[T]) -> T | None:
        """Return the value of a key as ``kind``; see `typed_value`."""

        def error(_: str, text: str) -> ModelFileError:
            return self._error(key, text)

        return typed_value(self._file.metadata, f"tokenizer.ggml.{key}", kind, error)

    def _numbers(self, key: str, kinds: str) -> np.ndarray | None:
        """Return an array with one number per piece, of NumPy's ``kinds``; None if missing."""
        value: Any = self._file.metadata.get("tokenizer.ggml." + key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self._error(key, "not an array of the right type")
        if len(value) != self.vocab_size:
            raise self._error(key, f"{len(value)} values for {self.vocab_size} tokens")
        return value

    def _token(self, key: str, default: int | None = None) -> int | None:
        key += "_token_id"
        value = self._value(key, int)
        value = default if value is None else value
        if value is None:
            return None
        if not 0 <= value < self.vocab_size:
            raise self._error(key, f"{value} is not one of the {self.vocab_size} tokens")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._value(key, bool)
        return default if value is None else value

    def _named(self, names: Sequence[str]) -> dict[str, int]:
        """Return the ids of those names that are pieces."""
        found = self._pieces.find([name.encode() for name in names])
        return {name: found[name.encode()] for name in names if name.encode() in found}

    def _find_ends(self) -> frozenset[int]:
        """Return the tokens that end a generation, by key and by name.

        Tokens known by name become control tokens.
        """
        fim = (name for _, names in FIM_NAMES for name in names)
        known = self._named([*_END_NAMES, *fim, *_SHOWN_NAMES])

        def among(names: Iterable[str]) -> dict[str, int]:
            return {name: known[name] for name in names if name in known}

        named = among(_END_NAMES)
        for keys, names in FIM_NAMES:
            if any(self._token(key) is not None for key in keys):
                continue
            if keys[0] in _END_KEYS:
                named |= among(names)
            else:
                self._kinds[list(among(names).values())] = CONTROL
        self._kinds[list(named.values())] = CONTROL
        self._kinds[list(among(_SHOWN_NAMES).values())] = USER_DEFINED
        ends = {self.eos_id, *named.values(), *map(self._token, _END_KEYS)}
        for present, name, kind in _NOT_ENDS:
            if name in named and present <= named.keys():
                self._kinds[named[name]] = kind
                ends.discard(named[name])
        return frozenset(token for token in ends if token is not None)

    def _strips_spaces(self) -> bool:
        """Return whether spaces after special tokens are dropped, as llama.cpp does for Phi-3."""
        name = typed_value(self._file.metadata, "general.name", str, self._key_error)
        return name is not None and any(part in name.lower() for part in ("phi-3", "phi3"))

    def _find_bytes(self) -> dict[int, bytes]:
        """Return id -> byte of the byte tokens, which have names like ``<0x0A>``."""
        found = {}
        names = {b"<0x%02X>" % value: bytes([value]) for value in range(256)}
        for token in np.flatnonzero(self._kinds == BYTE).tolist():
            name = self._pieces[token]
            if name not in names:
                raise self._error(
                    "tokens", f"{token} is a byte token, but its name is {quote(name)}"
                )
            found[token] = names[name]
        return found

    def _with_text(self, mask: np.ndarray) -> list[tuple[str, int]]:
        """Return text and id of the pieces in ``mask``, except those that are not UTF-8."""
        pairs, tokens = [], np.flatnonzero(mask)
        for token, piece in zip(tokens.tolist(), self._pieces.take(tokens)):
            text = piece.decode("utf-8", "ignore")
            if text.encode() == piece:
                pairs.append((text, token))
        return pairs

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        """Encode text without special tokens.

        ``starts``: whether a space may be put before it, at the beginning or after a special token.
        """
        raise NotImplementedError

    def _is_control(self, token: int) -> bool:
        return token not in self._calls and bool(self._kinds[token] in (CONTROL, UNKNOWN))

    @cached_property
    def _calls(self) -> frozenset[int]:
        return frozenset(self._named(_CALL_NAMES).values())

    def _affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that ``add_special`` puts before and after a text."""
        begin = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return begin, [self.eos_id] if self.add_eos and self.eos_id is not None else []

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """See `Tokenizer.encode`."""
        text = replace_surrogates(text)
        before, after = self._affixes() if add_special else ([], [])
        ids, starts = before, True
        text, hidden = self._controls.hide(text, literal) if literal else (text, iter(()))
        for part in (self._all_specials if parse_special else self._plain_specials).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                if literal:
                    part = _HIDDEN_PATTERN.sub(lambda _: next(hidden), part)
                ids += self._encode_text(part, starts)
            starts = isinstance(part, int) and self.prefix_after_special
        return ids + after
