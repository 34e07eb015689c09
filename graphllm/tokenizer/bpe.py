"""BPE vocabularies of GGUF files (`tokenizer.ggml.model` = gpt2 or gemma4).

The tokenizers package splits and merges.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

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
    """Return GPT-2's characters for bytes: printable Latin-1 unchanged, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [value for value in range(256) if value not in plain]
    pairs = [*zip(plain, plain), *zip(range(0x100, 0x200), rest)]
    return {chr(code): value for code, value in pairs}


BYTES = {char: bytes([value]) for char, value in _alphabet().items()}
_BYTE_NAMES = [f"<0x{value:02X}>" for value in range(256)]


class BpeTokenizer(Vocabulary):
    """BPE tokenizer of a GGUF file: GPT-2, Llama 3, Qwen, DeepSeek, Gemma 4, ...

    Special tokens are split off before BPE, and no text becomes a control token by merging. As in
    llama.cpp, the pre-tokenizer is `default` if `tokenizer.ggml.pre` is missing, merges that are
    not pairs have no effect, and merges of pieces that are not in the vocabulary are applied; each
    of these adds a note.
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
        self._newlines: dict[str, int] = {}  # pieces that consist of newlines
        self._placeholders: dict[int, list[int]] = {}  # ids that only the engine has -> token ids
        self._engine = self._build()

    def _find_pre(self, name: str | None) -> PreTokenizer:
        if name is None:
            name = DEFAULT
            text = f"key 'tokenizer.ggml.pre' is missing: the pre-tokenizer {name!r} is used"
            self.notes.append(f"{text}, which may differ from the training of the model")
        if name not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise self._error("pre", f"{quote(name)} is not supported; known: {known}")
        return PRE_TOKENIZERS[name]

    def _flag(self, key: str, default: bool) -> bool:
        value = super()._flag(key, default)
        if key == "add_bos_token" and self._pre.raw:
            return True  # some files of Gemma 4 wrongly say false (llama.cpp, PR 21500)
        return value and key != "add_space_prefix"  # which has no meaning for BPE

    def _vocabulary(self) -> dict[str, int]:
        """Return text -> id of the tokens that merging may produce: all but control tokens."""
        hidden = ((self._kinds == CONTROL) | (self._kinds == UNKNOWN)).tolist()
        rows = enumerate(zip(_texts(self._pieces.tolist()), hidden, strict=True))
        return {text: token for token, (text, skip) in rows if text and not skip}

    def _merges(self) -> list[tuple[str, str]]:
        """Return the pairs of `tokenizer.ggml.merges`, by rank.

        Entries that are not pairs, or not UTF-8, are left out: llama.cpp never applies them.
        """
        merges = self._file.metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, StringArray):
            raise self._error("merges", "missing, or not an array of strings")
        stored = merges.to_bytes()
        pairs: dict[tuple[str, str], None] = {}  # the first of equal pairs counts
        idle = []
        for number, text in enumerate(_texts(stored)):
            left, _, right = text.partition(" ")
            if left and right and " " not in right:
                pairs[left, right] = None
            else:
                idle.append(number)
        if idle:
            text = f"{len(idle)} of {len(stored)} merges are not pairs of pieces and have no effect"
            self.notes.append(f"{text}, as {quote(stored[idle[0]])} (entry {idle[0]})")
        return list(pairs)

    def _add_placeholders(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        """Add pieces that the package requires and the file lacks: operands of merges, and bytes.

        They get ids above all others, so that merges can use them, as in llama.cpp. One that
        remains in the result is replaced by the tokens of its bytes, as far as they exist.
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
            self._placeholders[token] = [vocabulary[name] for name in names if name in vocabulary]
        vocabulary.update(zip(lacking, self._placeholders, strict=True))

    def _note_unknown(self, lacking: Collection[str], merges: list[tuple[str, str]]) -> None:
        """Add a note about merges with operands or results that are not in the file."""
        known = self._pieces.find([text.encode() for text in lacking])
        unknown = {text for text in lacking if text.encode() not in known}
        pairs = [p for p in merges if p[0] + p[1] in unknown or not unknown.isdisjoint(p)]
        if pairs:
            first = quote(" ".join(pairs[0]))
            text = f"{len(pairs)} of {len(merges)} merges have pieces that are not tokens"
            self.notes.append(f"{text}, such as {first}; the tokens of their bytes are used")

    def _build(self) -> Tokenizer:
        """Build the package's tokenizer."""
        from tokenizers import Tokenizer, models  # slow to import

        pre, merges = self._pre, self._merges()
        vocabulary = self._vocabulary()
        self._newlines = {text: vocabulary[text] for text in vocabulary if not text.strip("\n")}
        self._add_placeholders(vocabulary, merges)
        model = models.BPE(
            vocabulary, merges, ignore_merges=pre.ignore_merges, byte_fallback=pre.raw
        )
        engine = Tokenizer(model)
        if not pre.raw:
            engine.pre_tokenizer = splitter(pre)
        return engine

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        ids: list[int] = []
        if self._pre.raw:
            for line in _LINES.findall(text.replace(" ", SPACE)):
                whole = self._newlines.get(line)
                ids += self._encode_plain(line) if whole is None else [whole]
        else:
            ids = self._encode_plain(text)
        if self._placeholders and max(ids, default=0) >= self.vocab_size:
            ids = [known for token in ids for known in self._placeholders.get(token, (token,))]
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        from .package_encoding import encode_text  # not needed for SentencePiece

        ids: list[int] = encode_text(self._engine, text).ids
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


def splitter(pre: PreTokenizer) -> Any:
    """Return a pre-tokenizer of byte-level BPE as an object of the tokenizers package."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(expand(p)), "isolated") for p in pre.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, alphabet])


def _texts(items: list[bytes]) -> list[str]:
    """Decode the items; one that is not UTF-8, which no text contains, becomes empty."""
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError:
        texts = [item.decode("utf-8", "ignore") for item in items]
        return [t if t.encode() == i else "" for t, i in zip(texts, items, strict=True)]
