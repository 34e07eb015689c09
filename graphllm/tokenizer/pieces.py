"""Pieces of a vocabulary in one buffer, so that 262,144 of them need no Python object each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from ..weights.gguf import StringArray

_MARGIN = 8  # bytes before and behind the texts, so that a word can be read anywhere in them
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASKS = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # of a word's first n bytes


def words(buffer: np.ndarray, kind: str = "<u8") -> np.ndarray:
    """View uint8 [bytes] as the overlapping words that begin at each of its bytes."""
    size = np.dtype(kind).itemsize
    return np.ndarray(max(len(buffer) - size + 1, 0), kind, buffer.data, strides=(1,))


class Pieces(Sequence[bytes]):
    """The texts of the tokens, in the order of their ids.

    Attributes:
        text: uint8, the buffer that holds all pieces, with 8 bytes before and behind them.
        starts: int64 [pieces], offset of each piece in ``text``.
        sizes: int64 [pieces], bytes of each piece.
    """

    def __init__(self, text: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> None:
        self.text = np.pad(text, _MARGIN)
        self.starts, self.sizes = starts + _MARGIN, sizes

    @classmethod
    def of(cls, pieces: StringArray | list[bytes]) -> Pieces:
        """Copy the pieces of an array of a GGUF file, or of a list."""
        if isinstance(pieces, StringArray):
            return cls(*pieces.spans())
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return cls(np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(sizes) - sizes, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        start = self.starts[index]
        return self.text[start : start + self.sizes[index]].tobytes()

    def take(self, tokens: np.ndarray) -> list[bytes]:
        """Return the pieces of some ids."""
        starts = self.starts[tokens]
        text, ends = self.text.data, (starts + self.sizes[tokens]).tolist()
        return [bytes(text[a:b]) for a, b in zip(starts.tolist(), ends)]

    def tolist(self) -> list[bytes]:
        """Return all pieces."""
        text, ends = self.text.tobytes(), (self.starts + self.sizes).tolist()
        return [text[a:b] for a, b in zip(self.starts.tolist(), ends)]

    @cached_property
    def _hashes(self) -> np.ndarray:
        """A hash of each piece: of its size and up to 24 of its bytes. uint64 [pieces]"""
        found, sizes = words(self.text), self.sizes
        mixed = sizes.astype(np.uint64)
        for longer, at in ((0, 0), (8, sizes - 8), (16, sizes // 2 - 4)):
            rows = np.flatnonzero(sizes > longer)
            own = found[(self.starts + at)[rows]] & _MASKS[np.minimum(sizes[rows], 8)]
            mixed[rows] = (mixed[rows] ^ own) * _FACTOR
            mixed ^= mixed >> np.uint64(32)
        return mixed

    def _with_hashes(self, hashes: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
        """Return the ids of the pieces that have one of the ``hashes``, and these pieces."""
        ordered, tokens = np.sort(hashes), np.zeros(0, np.int64)
        if len(hashes):
            nearest = np.searchsorted(ordered[:-1], self._hashes)
            tokens = np.flatnonzero(ordered[nearest] == self._hashes)
        return tokens, self.take(tokens)

    def find(self, texts: Collection[bytes]) -> dict[bytes, int]:
        """Return the ids of those ``texts`` that are pieces; of equal pieces the last one's."""
        wanted = set(texts)
        tokens, pieces = self._with_hashes(Pieces.of([*wanted])._hashes)
        return {p: token for token, p in zip(tokens.tolist(), pieces) if p in wanted}

    def hidden(self) -> list[int]:
        """Return the ids of pieces that are empty, or equal to a later piece."""
        ordered = np.sort(self._hashes)
        tokens, pieces = self._with_hashes(ordered[1:][ordered[1:] == ordered[:-1]])
        last = dict(zip(pieces, tokens.tolist()))
        equal = (token for token, p in zip(tokens.tolist(), pieces) if last[p] != token)
        return sorted({*equal, *np.flatnonzero(self.sizes == 0).tolist()})
