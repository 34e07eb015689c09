"""Tokenizers of tokenizer.json, or vocab.json and merges.txt, with the tokenizers package."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError, RequestError, quote
from .decoding import BaseTokenizer, is_special_name, overlaps_span, replace_surrogates
from .hf_classes import TOKENIZER_CLASSES, TokenizerClass
from .package_encoding import copy_engine, encode_text
from .tokenizer_config import AddedToken, TokenizerDirectory
from .tokenizer_json_decoder import read_decoder
from .untrusted_files import LARGEST_ID, hold_stderr, read_json, read_text, wrap_errors
from .vocabulary import known_eog_ids

if TYPE_CHECKING:
    import tokenizers

# A private-use character of the last plane, which no vocabulary has, so that it never merges.
_SEPARATOR = "\U0010fffd"
# Encoded once on load to provoke panics: letters, digits, spaces, characters of 2 to 4 bytes.
_TRIAL = "Of any text\n\tthat may be: 1234 caf\u00e9 \u65e5\u672c \U0001f600"
_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


class HfTokenizer(BaseTokenizer):
    """A tokenizer of the tokenizers package, with the ids and texts of transformers.

    Added tokens that are not special are always parsed, like GGUF's user-defined tokens. Ids
    without a token, such as the padding of a vocabulary, decode to nothing.
    `clean_up_tokenization_spaces` is ignored, as transformers does for BPE, since it removes spaces
    that texts had.
    """

    def __init__(
        self,
        engine: tokenizers.Tokenizer,
        path: Path,
        directory: TokenizerDirectory,
        kind: TokenizerClass,
    ) -> None:
        self._engine, self._path = engine, path
        ids = engine.get_vocab(with_added_tokens=True)
        self._texts = self._by_id(ids)
        self.vocab_size = max(max(self._texts) + 1, directory.rows)
        self._decoder = read_decoder(engine.decoder, path)
        self.space_prefix = self._decoder.strips
        added = engine.get_added_tokens_decoder()
        # An added token that is searched for in the normalised text decodes to its normalised form.
        self._added_texts = {token: engine.id_to_token(token) or "" for token in added}
        self._controls = {token for token, text in added.items() if text.special}
        named = {name: token.content for name, token in directory.named(kind.tokens).items()}
        self.bos_id, self.eos_id, self.mask_id = (
            ids.get(named.get(f"{key}_token", "")) for key in ("bos", "eos", "mask")
        )
        ends = {self.eos_id} if self.eos_id is not None else set()
        ends |= known_eog_ids({self._texts[token]: token for token in self._controls})
        self.eog_ids = directory.eos_ids(self.vocab_size) | ends
        # Tokens that text must not become unless special tokens are parsed. The unknown token is
        # harmless, and an end-of-generation token that is not an added token is ordinary text.
        unknown = {named.get("unk_token", ""), getattr(engine.model, "unk_token", None) or ""}
        guarded = self._controls | (self.eog_ids & added.keys())
        self._guarded = guarded - {ids.get(text) for text in unknown}
        special = {token for token in added if is_special_name(self._texts[token])}
        self._literal_guarded = self._guarded | special
        self._mark_special([added[token] for token in self._guarded & added.keys()])
        self._text_engine = copy_engine(engine)
        self._text_engine.encode_special_tokens = True  # special tokens in texts stay text
        first = self._run("", add_special=True, parse_special=False).ids[:1]
        self.add_bos = self.bos_id is not None and first == [self.bos_id]

    @property
    def engine(self) -> tokenizers.Tokenizer:
        """The tokenizer of the tokenizers package."""
        return self._engine

    def _by_id(self, ids: dict[str, int]) -> dict[int, str]:
        """Return texts by id. ModelFileError for duplicate or too large ids."""
        if not ids:
            raise ModelFileError(f"{self._path}: the vocabulary is empty")
        texts: dict[int, str] = {}
        for text, token in ids.items():
            if token >= LARGEST_ID:
                raise ModelFileError(f"{self._path}: id {token} of {quote(text)} is too large")
            if token in texts:
                both = f"{quote(texts[token])} and {quote(text)}"
                raise ModelFileError(f"{self._path}: {both} have the same id {token}")
            texts[token] = text
        for token in range(max(texts)):  # get_vocab has one id of a duplicate piece
            if token not in texts and (again := self._engine.id_to_token(token)) is not None:
                texts[token] = again
        return texts

    def _mark_special(self, added: list[Any]) -> None:
        """Make these added tokens special in the engine, whatever the file states."""
        from tokenizers import AddedToken

        for token in added:
            flags = ("lstrip", "rstrip", "single_word", "normalized")
            same = {flag: getattr(token, flag) for flag in flags}
            if not token.special:
                self._engine.add_tokens([AddedToken(token.content, special=True, **same)])

    def _run(self, text: str, add_special: bool, parse_special: bool) -> Any:
        """Return the package's encoding of ``text``."""
        engine = self._engine if parse_special else self._text_engine
        with wrap_errors(self._path):
            return encode_text(engine, text, add_special)

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """See `Tokenizer.encode`."""
        text = replace_surrogates(text)
        if literal:
            return self._encode_literal(text, add_special, literal)
        found = self._run(text, add_special, parse_special)
        ids: list[int] = found.ids
        if parse_special or self._guarded.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for token, text, is_template in zip(
            ids, found.tokens, found.special_tokens_mask, strict=True
        ):
            guarded = not is_template and token in self._guarded and text == self._texts[token]
            spelled += self._spell(token) if guarded else [token]
        return spelled

    def _encode_literal(
        self, text: str, add_special: bool, literal: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Encode with control tokens parsed only outside the ``literal`` spans.

        The package cannot restrict parsing to spans. Where it finds a control token that overlaps
        one, a separator is inserted after the first character of its text, and the separators' ids
        are removed from the result.
        """
        separators: list[int] = []  # positions in `text`, ascending
        while True:
            pieces = [text[a:b] for a, b in pairwise([0, *separators, len(text)])]
            found = self._run(_SEPARATOR.join(pieces), add_special, parse_special=True)
            ids: list[int] = found.ids
            offsets: list[tuple[int, int]] = found.offsets
            added = [place + index for index, place in enumerate(separators)]
            new = set()
            for index, (token, piece) in enumerate(zip(ids, found.tokens, strict=True)):
                # The piece of an unknown character is its text, but its id may be guarded.
                guarded = token in self._literal_guarded and self._texts[token] in piece
                if guarded and offsets[index][1]:
                    start, end = (place - bisect_left(added, place) for place in offsets[index])
                    if overlaps_span(literal, start, end):
                        new.add(start + 1 + _leading_spaces(text[start:end]))
            new -= {*separators, len(text)}
            if not new:
                break
            separators = sorted({*separators, *new})
        unknown = self._run(_SEPARATOR, add_special=False, parse_special=False).ids
        kept = []
        for token, (start, end) in zip(ids, offsets, strict=True):
            inserted = bisect_left(added, end) - bisect_left(added, start)
            if inserted and inserted < end - start and token not in unknown:
                raise RequestError(
                    f"{self._path}: a control token's text cannot be encoded as text"
                )
            if not inserted or inserted < end - start:
                kept.append(token)
        return kept

    def _spell(self, token: int) -> list[int]:
        """Return ids that spell a control token's text with ordinary tokens.

        A model may produce a control token from text; to a unigram model it is a piece like others.
        A text that has no other spelling, such as a padding token "!", remains the token.
        """
        text = self._texts[token]
        for cut in range(1, len(text)):
            with wrap_errors(self._path):
                halves = [self._engine.model.tokenize(half) for half in (text[:cut], text[cut:])]
            ids = [each.id for half in halves for each in half]
            if self._guarded.isdisjoint(ids):
                return ids
        return [token]

    def _is_control(self, token: int) -> bool:
        return token in self._controls

    def _bytes_of(self, token: int) -> bytes:
        text = self._added_texts.get(token, self._texts.get(token))
        return b"" if text is None else self._decoder.to_bytes(text)

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`. For a control token, this is its text."""
        return self._texts[token].encode() if token in self._controls else super().piece(token)

    def strip_prefix(self, data: bytes) -> bytes:
        """See `BaseTokenizer.strip_prefix`."""
        return data.replace(b" ", b"") if self._decoder.all_spaces else data.removeprefix(b" ")


def from_json(directory: TokenizerDirectory) -> HfTokenizer:
    """Return the tokenizer of a directory's tokenizer.json. ModelFileError."""
    from tokenizers import Tokenizer

    path = directory.folder / "tokenizer.json"
    content = read_text(path)
    kind = TOKENIZER_CLASSES.get(directory.class_name('"ByteLevel"' in content), TokenizerClass())
    with wrap_errors(path), hold_stderr():
        engine = Tokenizer.from_str(content)
        if kind.model not in (None, type(engine.model).__name__):
            kind = TokenizerClass()
        engine.no_truncation()
        engine.no_padding()
        if getattr(engine.model, "dropout", None) is not None:
            engine.model.dropout = None  # BPE dropout is for training and random
        listed = _ADDED.search(content)
        tokens = json.JSONDecoder().raw_decode(content, listed.end())[0] if listed else []
        for token in tokens:  # the package assigns ids itself
            _check_id(engine, path, token["content"], token["id"])
        if kind.build is not None:
            kind.build(engine, directory, content)
        return _finish(engine, path, directory, kind, kind.template)


def from_merges(directory: TokenizerDirectory) -> HfTokenizer:
    """Return the tokenizer of a directory's vocab.json and merges.txt. ModelFileError."""
    from tokenizers import Tokenizer, models

    path = directory.folder / "vocab.json"
    vocabulary = read_json(path)
    for text, token in vocabulary.items():
        if type(token) is not int or not 0 <= token < LARGEST_ID:
            raise ModelFileError(f"{path}: the id of {quote(text)} is {quote(token)}")
    kind = TOKENIZER_CLASSES.get(directory.class_name(False), TOKENIZER_CLASSES["GPT2Tokenizer"])
    with wrap_errors(directory.folder / "merges.txt"), hold_stderr():
        merges = _read_merges(directory.folder / "merges.txt")
        engine = Tokenizer(models.BPE(vocabulary, merges))
    template = [
        *(["bos_token"] if directory.flag("add_bos_token", False) else []),
        "A",
        *(["eos_token"] if directory.flag("add_eos_token", False) else []),
    ]
    with wrap_errors(path), hold_stderr():
        if kind.build is not None:
            kind.build(engine, directory, "")
        return _finish(engine, path, directory, kind, template)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt, by rank."""
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip() and not line.startswith("#version"):
            left, space, right = line.rstrip("\r").partition(" ")
            if not (left and space and right) or " " in right:
                raise ModelFileError(f"{path}: line {number} is not a pair: {quote(line)}")
            merges.append((left, right))
    return merges


def _finish(
    engine: tokenizers.Tokenizer,
    path: Path,
    directory: TokenizerDirectory,
    kind: TokenizerClass,
    template: Sequence[str] | None,
) -> HfTokenizer:
    """Add the directory's special tokens to the engine and set its template.

    ``template``: names of the special tokens around a text, which is "A"; None keeps the engine's.
    """
    _add_tokens(engine, directory, kind)
    if template is not None:
        pair = kind.pair if template == kind.template else None
        _set_template(engine, directory.named(kind.tokens), template, pair)
    with suppress(Exception):  # for texts without tokens; a panic is not an Exception
        engine.encode(_TRIAL)
    return HfTokenizer(engine, path, directory, kind)


def _add_tokens(
    engine: tokenizers.Tokenizer, directory: TokenizerDirectory, kind: TokenizerClass
) -> None:
    """Add the directory's tokens that the engine lacks, in the order of transformers."""
    from tokenizers import AddedToken as Added

    def converted(token: AddedToken) -> Any:
        flags = {} if token.normalized is None else {"normalized": token.normalized}
        strips = {"lstrip": token.lstrip, "rstrip": token.rstrip}
        words = {"single_word": token.single_word, "special": token.special}
        return Added(token.content, **strips, **words, **flags)

    known: list[Any] = list(engine.get_added_tokens_decoder().values())
    same = {repr(token) for token in known}
    named = directory.named(kind.tokens)
    texts = {token.content for token in named.values()}
    listed = [token for _, token in sorted(directory.added.items())]
    wanted = [token for token in listed if repr(converted(token)) not in same]
    wanted = [replace(t, special=True) if t.content in texts else t for t in wanted]
    seen = {token.content for token in wanted} | {token.content for token in known}
    for token in (*named.values(), *directory.extras(), *kind.extra_tokens()):
        if token.content not in seen:
            wanted.append(token)
            seen.add(token.content)
    engine.add_tokens([converted(token) for token in wanted])
    for number, token in directory.added.items():
        _check_id(engine, directory.folder / "tokenizer_config.json", token.content, number)


def _check_id(engine: tokenizers.Tokenizer, path: Path, text: str, number: int) -> None:
    found = engine.token_to_id(text)
    if found != number:
        raise ModelFileError(
            f"{path}: added token {quote(text)} has the id {number}, but the engine assigns {found}"
        )


def _set_template(
    engine: tokenizers.Tokenizer, named: Mapping[str, AddedToken], template: Sequence[str],
    pair: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Set the templates of one text and of two; tokens that the directory lacks are left out.

    For the arguments see `TokenizerClass`.
    """
    from tokenizers import processors

    ids: dict[str, int | None] = {}

    def parts(names: Sequence[str]) -> list[str]:
        found = []
        for each in names:
            name, colon, kind = each.partition(":")
            if name in ("A", "B"):
                found.append(f"${name}{colon}{kind}")
            elif name in named:
                content = named[name].content
                ids[content] = engine.token_to_id(content)
                found.append(f"{content}{colon}{kind}")
        return found

    single, double = parts(template), parts(pair or [*template, "B"])
    engine.post_processor = processors.TemplateProcessing(
        single=single, pair=double, special_tokens=[*ids.items()]
    )


def _leading_spaces(text: str) -> int:
    """Return the number of leading spaces, which the package counts to a token with lstrip."""
    return len(text) - len(text.lstrip())
