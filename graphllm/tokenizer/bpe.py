"""BPE vocabularies (`tokenizer.ggml.model` = gpt2 or gemma4), by the tokenizers package."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..errors import quote
from ..weights.gguf import StringArray
from .pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer, expand
from .vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    VocabularySource,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GEMMA4 = "gemma4"
_LINES = re.compile(r"\n+|[^\n]+")


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in plain]
    pairs = [*zip(plain, plain), *zip(range(0x100, 0x200), rest)]
    return {chr(code): value for code, value in pairs}


BYTES = {char: bytes([value]) for char, value in _alphabet().items()}
_BYTE_NAMES = [f"<0x{value:02X}>" for value in range(256)]


class BpeTokenizer(Vocabulary):
    """Merges by rank in words that patterns cut out: GPT-2, Llama 3, Qwen, DeepSeek, Gemma 4, ...

    Cutting and merging are the package's. Special pieces are handled before them, and no text turns
    into a control piece by merging. As in llama.cpp, without `tokenizer.ggml.pre` the pre-tokenizer
    is `default`, merges that are no pairs have no effect, and merges of pieces that the vocabulary
    lacks are applied; all of that is noted.
    """

    def __init__(self, file: VocabularySource) -> None:
        self._file = file
        self.notes: list[str] = []
        gemma4 = self._value("model", str) == _GEMMA4
        self._pre = self._find_pre(_GEMMA4 if gemma4 else self._value("pre", str))
        self.default_ids = (None, None, None) if gemma4 else (11, 11, None)
        self.default_adds = (self._pre.add_bos, False, False)
        super().__init__(file)
        self._byte_tokens = self._find_bytes()
        self._newlines: dict[str, int] = {}  # pieces of nothing else
        self._spares: dict[int, list[int]] = {}  # ids of the engine alone -> what stands for them
        self._engine = self._build()

    def _find_pre(self, name: str | None) -> PreTokenizer:
        if name is None:
            name = DEFAULT
            text = f"key 'tokenizer.ggml.pre' is missing: texts are cut as {name!r} says"
            self.notes.append(f"{text}, which may not be how the model was trained")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise self._error("pre", f"{quote(name)} is not supported; known: {known}")
        return PRE_TOKENIZERS[name]

    def _flag(self, key: str, default: bool) -> bool:
        value = super()._flag(key, default)
        if key == "add_bos_token" and self._pre.raw:
            return True  # files of Gemma 4 were made that say otherwise (llama.cpp, PR 21500)
        return value and key != "add_space_prefix"  # which means nothing here

    def _vocabulary(self) -> dict[str, int]:
        """Text -> id of what merging may end in: all but control pieces."""
        hidden = ((self._kinds == CONTROL) | (self._kinds == UNKNOWN)).tolist()
        rows = enumerate(zip(_texts(self._pieces), hidden, strict=True))
        return {text: token for token, (text, skip) in rows if text and not skip}

    def _merges(self) -> list[tuple[str, str]]:
        """The pairs of `tokenizer.ggml.merges`, by rank. No text has the pieces of an entry that is
        no pair, or not UTF-8: llama.cpp never applies it."""
        merges = self._file.metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, StringArray):
            raise self._error("merges", "missing, or not an array of strings")
        stored = merges.to_bytes()
        pairs: dict[tuple[str, str], None] = {}  # a pair that comes twice has the first place
        idle = []
        for number, text in enumerate(_texts(stored)):
            left, _, right = text.partition(" ")
            if left and right and " " not in right:
                pairs[left, right] = None
            else:
                idle.append(number)
        if idle:
            text = f"{len(idle)} of {len(stored)} merges are no pairs of pieces and have no effect"
            self.notes.append(f"{text}, as {quote(stored[idle[0]])} (entry {idle[0]})")
        return list(pairs)

    def _add_spares(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        """Add what the package wants and the file lacks: parts and results of merges, and bytes.

        They get ids past the others: merges go on through them, as in llama.cpp, and where one is
        left over in the end, the tokens of its bytes stand for it, if there are such.
        """
        raw = self._pre.raw
        needed = {*map("".join, merges), *itertools.chain.from_iterable(merges)}
        needed.update(_BYTE_NAMES if raw else BYTES)
        lacking = sorted(needed - vocabulary.keys())
        self._note_unknown(lacking, merges)
        for token, text in enumerate(lacking, self.vocab_size):
            names = [char for char in text if char.isascii()]
            if raw:
                names = [] if text in _BYTE_NAMES else [_BYTE_NAMES[b] for b in text.encode()]
            self._spares[token] = [vocabulary[name] for name in names if name in vocabulary]
        vocabulary.update(zip(lacking, self._spares, strict=True))

    def _note_unknown(self, lacking: Collection[str], merges: list[tuple[str, str]]) -> None:
        """Note the merges of pieces that the file does not have, or that make one."""
        unknown = {text for text in lacking if text.encode() not in self._index}
        pairs = [p for p in merges if p[0] + p[1] in unknown or not unknown.isdisjoint(p)]
        if pairs:
            first = quote(" ".join(pairs[0]))
            text = (
                f"{len(pairs)} of {len(merges)} merges have pieces that are no tokens, as {first}"
            )
            self.notes.append(f"{text}; their bytes' tokens stand for these")

    def _build(self) -> Tokenizer:
        """The package's tokenizer."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # slow: when needed only

        pre, merges = self._pre, self._merges()
        vocabulary = self._vocabulary()
        self._newlines = {text: vocabulary[text] for text in vocabulary if not text.strip("\n")}
        self._add_spares(vocabulary, merges)
        model = models.BPE(
            vocabulary, merges, ignore_merges=pre.ignore_merges, byte_fallback=pre.raw
        )
        engine = Tokenizer(model)
        if not pre.raw:
            splits = [pre_tokenizers.Split(Regex(expand(p)), "isolated") for p in pre.patterns]
            alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
        return engine

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        ids: list[int] = []
        if self._pre.raw:
            for line in _LINES.findall(text.replace(" ", SPACE)):
                whole = self._newlines.get(line)
                ids += self._encode_plain(line) if whole is None else [whole]
        else:
            ids = self._encode_plain(text)
        if self._spares and max(ids, default=0) >= self.vocab_size:
            ids = [known for token in ids for known in self._spares.get(token, (token,))]
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def _bytes_of(self, token: int) -> bytes:
        kind, piece = self._kinds[token], self._pieces[token]
        if kind == BYTE:
            return self._byte_tokens[token]
        if kind != NORMAL:
            return piece if kind in (CONTROL, UNKNOWN, USER_DEFINED) else b""
        if self._pre.raw:
            return piece.replace(SPACE.encode(), b" ")
        text = piece.decode("utf-8", "replace")
        return b"".join([BYTES.get(char) or char.encode() for char in text])


def _texts(items: list[bytes]) -> list[str]:
    """The items as str; empty where one is not UTF-8, since no text has such bytes."""
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError:
        texts = [item.decode("utf-8", "ignore") for item in items]
        return [t if t.encode() == i else "" for t, i in zip(texts, items, strict=True)]
