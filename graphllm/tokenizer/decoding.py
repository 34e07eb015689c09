"""Ids to text, for every kind of vocabulary; at once, and one by one."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ..errors import RequestError


class BaseTokenizer:
    """The base of the tokenizers: `Tokenizer.decode` and the like, from the bytes of each token."""

    vocab_size: int
    space_prefix: bool  # whether a text's first space is none of its own
    notes: Sequence[str] = ()  # see `Tokenizer`

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that decoding shows for an id in range."""
        raise NotImplementedError

    def _is_control(self, token: int) -> bool:
        """Whether ``skip_special`` leaves the token out."""
        raise NotImplementedError

    def strip_prefix(self, data: bytes) -> bytes:
        """The first bytes of a text, without the space that `space_prefix` speaks of."""
        return data.removeprefix(b" ")

    def piece(self, token: int) -> bytes:
        """See `Tokenizer.piece`."""
        return self.token_bytes(token, skip_special=False)

    def token_bytes(self, token: int, skip_special: bool) -> bytes:
        """The bytes that decoding shows for a token. RequestError for an id out of range."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token id {token} is not one of the {self.vocab_size} tokens")
        if skip_special and self._is_control(token):
            return b""
        return self._bytes_of(token)

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False
    ) -> str:
        """See `Tokenizer.decode`."""
        stream = self.stream(skip_special, continuation)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, skip_special: bool = True, continuation: bool = False) -> TextStream:
        """See `Tokenizer.stream`."""
        return TextStream(self, skip_special, continuation)


class TextStream:
    """Decodes ids one by one: the texts joined equal `Tokenizer.decode` of all ids.

    A character whose UTF-8 bytes are spread over tokens appears with its last token.
    """

    def __init__(self, vocabulary: BaseTokenizer, skip_special: bool, continuation: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._strip = vocabulary.space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token; often empty."""
        data = self._vocabulary.token_bytes(token, self._skip_special)
        if self._strip and data:
            self._strip = False
            data = self._vocabulary.strip_prefix(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete, else nothing."""
        return self._decoder.decode(b"", True)


def replace_surrogates(text: str) -> str:
    """The text as tokenizers read it: a lone surrogate, as from bad bytes, counts as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def overlaps_span(spans: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Whether [start, end) shares a character with one of the spans, which ascend."""
    at = bisect_right(spans, (end - 1, float("inf"))) - 1
    return at >= 0 and spans[at][1] > start


def is_special_name(text: str) -> bool:
    """Whether a piece is named as control pieces are, whatever a file says: as llama.cpp's
    converter tells them."""
    ends = (("<|", "|>"), ("<｜", "｜>"))
    return len(text) > 4 and any(text.startswith(a) and text.endswith(b) for a, b in ends)
