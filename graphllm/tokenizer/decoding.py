"""Decoding of token ids to text, all at once or incrementally."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ..errors import RequestError


class BaseTokenizer:
    """Base class of tokenizers: decoding, given the bytes of each token."""

    vocab_size: int
    space_prefix: bool  # whether encoding puts a space before a text
    notes: Sequence[str] = ()  # see `Tokenizer`

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; the id is in range."""
        raise NotImplementedError

    def _is_control(self, token: int) -> bool:
        """Return whether ``skip_special`` leaves the token out."""
        raise NotImplementedError

    def strip_prefix(self, data: bytes) -> bytes:
        """Remove the space of `space_prefix` from the first bytes of a text."""
        return data.removeprefix(b" ")

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`."""
        return self.token_bytes(token, skip_special=False)

    def token_bytes(self, token: int, skip_special: bool) -> bytes:
        """Return the bytes of a token in decoded text. RequestError for an id out of range."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is not one of the {self.vocab_size} tokens")
        if skip_special and self._is_control(token):
            return b""
        return self._bytes_of(token)

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False
    ) -> str:
        """See `Tokenizer.decode`."""
        own = [*ids]
        known = {token: self.token_bytes(token, skip_special) for token in dict.fromkeys(own)}
        pieces = [known[token] for token in own]
        if self.space_prefix and not continuation:
            first = next((index for index, piece in enumerate(pieces) if piece), None)
            if first is not None:
                pieces[first] = self.strip_prefix(pieces[first])
        return b"".join(pieces).decode("utf-8", "replace")

    def stream(self, skip_special: bool = True, continuation: bool = False) -> TextStream:
        """See `Tokenizer.stream`."""
        return TextStream(self, skip_special, continuation)


class TextStream:
    """Incremental decoder. The concatenated texts equal `Tokenizer.decode` of all ids.

    A character whose UTF-8 bytes span several tokens appears with the last of them.
    """

    def __init__(self, vocabulary: BaseTokenizer, skip_special: bool, continuation: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._strip = vocabulary.space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes; often empty."""
        data = self._vocabulary.token_bytes(token, self._skip_special)
        if self._strip and data:
            self._strip = False
            data = self._vocabulary.strip_prefix(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", True)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def overlaps_span(spans: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether [start, end) overlaps one of the ``spans``, which are in ascending order."""
    at = bisect_right(spans, (end - 1, float("inf"))) - 1
    return at >= 0 and spans[at][1] > start


def is_special_name(text: str) -> bool:
    """Return whether a piece is named like a control token, as llama.cpp's converter decides it."""
    ends = (("<|", "|>"), ("<｜", "｜>"))
    return len(text) > 4 and any(text.startswith(a) and text.endswith(b) for a, b in ends)
