"""How words of fewer than 8 bits fill the bytes of vectors.

A word is 4 bytes that hold one number each, and a vector has 8 bits for each of these bytes. Words
of 3, 5 and 6 bits leave bits of their vectors unused, which store further words in parts. Parts are
joined with XOR: each vector of such a word is shifted, and one mask takes the word out of their
XOR. So packing stores each part XOR what the other words leave in its place, and unpacking needs
one mask for a word instead of one for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

from ..simd.emitter import Emitter, Value


class Part(NamedTuple):
    """Where some bits of a word are stored: bit i of the word in bit i + shift of a vector."""

    vector: int
    shift: int
    bits: int  # of each byte of the word


class BitLayout(NamedTuple):
    """Places of all words of ``bits`` bits, and the order in which few vectors are live at once."""

    bits: int
    words: tuple[tuple[Part, ...], ...]
    order: tuple[int, ...]

    @property
    def vectors(self) -> int:
        return self.bits * len(self.words) // 8

    def pack(self, e: Emitter, words: Sequence[Value]) -> list[Any]:
        """Return the vectors of words whose bytes are below 2 ** bits."""
        found: list[Value | None] = [None] * self.vectors
        for parts, word in sorted(zip(self.words, words), key=lambda each: len(each[0])):
            for vector, shift, _ in parts:
                if (stored := found[vector]) is not None:
                    word = e.b.xor(word, e.shr(stored, shift))
            for vector, shift, bits in parts:
                part, stored = e.shl(e.mask(word, _in_each_byte(bits)), shift), found[vector]
                found[vector] = part if stored is None else e.b.or_(stored, part)
        return found

    def unpack(self, e: Emitter, load: Callable[[int], Value]) -> Iterator[tuple[int, Value]]:
        """Yield (j, word j); ``load(i)`` loads vector i."""
        load = cache(load)
        for j in self.order:
            moved = [e.shr(load(vector), shift) for vector, shift, _ in self.words[j]]
            yield j, e.mask(reduce(e.b.xor, moved), _in_each_byte((1 << self.bits) - 1))


def _in_each_byte(bits: int) -> int:
    return bits * 0x01010101


def byte_bits(e: Emitter, x: Value, shift: int, bits: int, to: int = 0) -> Value:
    """``bits`` bits of each byte of x, from bit ``shift`` on, moved to bit ``to``."""
    return e.shl(e.mask(e.shr(x, shift), _in_each_byte((1 << bits) - 1)), to)


def _whole(vector: int, bits: int, shift: int = 0) -> tuple[Part, ...]:
    return (Part(vector, shift, (1 << bits) - 1),)


def stacked(vectors: int, bits: int) -> BitLayout:
    """Words above one another in each vector: word j in vector j % vectors."""
    each = range(8 // bits)
    words = tuple(_whole(i, bits, bits * place) for place in each for i in range(vectors))
    order = tuple(place * vectors + i for i in range(vectors) for place in each)
    return BitLayout(bits, words, order)


TWO_BITS, FOUR_BITS, EIGHT_BITS = stacked(1, 2), stacked(4, 4), stacked(8, 8)
THREE_BITS = BitLayout(
    3,
    (
        *(_whole(i, 3) for i in range(3)), (Part(0, 6, 3), Part(1, 4, 4)),
        *(_whole(i, 3, 3) for i in range(3)), (Part(2, 6, 3), Part(1, 5, 4)),
    ),
    (0, 4, 1, 3, 5, 2, 6, 7),
)  # fmt: skip
FIVE_BITS = BitLayout(
    5,
    (
        *(_whole(i, 5) for i in range(5)),
        (Part(0, 5, 7), Part(1, 2, 24)),
        (Part(2, 5, 7), Part(3, 2, 24)),
        (Part(4, 5, 7), Part(1, 4, 8), Part(3, 3, 16)),
    ),
    (0, 5, 1, 2, 6, 3, 7, 4),
)
SIX_BITS = BitLayout(
    6,
    (*(_whole(i, 6) for i in range(3)), (Part(0, 6, 3), Part(1, 4, 12), Part(2, 2, 48))),
    (0, 1, 2, 3),
)
