"""Stored blocks of 16 rows as vectors with a lane per row, which is the order of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.lazy_numba import ir
from .emitter import I16, I32, I64, LANES, Emitter, Value
from .vectors import vector

_QUAD = 16  # bytes of the four words that are loaded at once


class StoredRows:
    """One stored block of each of 16 rows.

    Args:
        e: emitter.
        source: address of the block of the first row.
        stride: bytes from a row to the next.
        rows: number of rows, 1 to 16. The last one is read again in place of missing rows.
    """

    def __init__(self, e: Emitter, source: Value, stride: Value, rows: Value) -> None:
        self.e = e
        self._numbers: dict[tuple[int, str], Value] = {}
        last = e.b.sub(rows, e.count(1))
        self._rows = []
        for lane in range(LANES):
            within = e.b.icmp_signed("<", e.count(lane), last)
            row = e.b.select(within, e.count(lane), last)
            self._rows.append(e.at(source, e.b.mul(row, stride)))

    def numbers(self, offset: int, kind: Any) -> Value:
        """The number of type ``kind`` at ``offset`` of each block."""
        key = offset, str(kind)
        if key not in self._numbers:
            found = ir.Constant(vector(kind), ir.Undefined)
            for lane, row in enumerate(self._rows):
                number = self.e.load(row, kind, offset)
                found = self.e.b.insert_element(found, number, ir.Constant(I32, lane))
            self._numbers[key] = found
        return self._numbers[key]

    def words(self, span: tuple[int, int]) -> list[Value]:
        """The bytes of a field, (offset, bytes), as vectors of int32: word j of each row."""
        offset, nbytes = span
        found: list[Value] = []
        for at in range(0, nbytes, _QUAD):
            lacking = max(0, at + _QUAD - nbytes)
            if offset + at < lacking:  # no four words end with the field
                ends = range(at, nbytes, 4)
                found += [self.numbers(offset + end, I32) for end in ends]
            else:
                found += self._four_words(offset + at - lacking)[lacking // 4 :]
        return found

    def _four_words(self, offset: int) -> list[Value]:
        """Four consecutive words of each row, transposed in registers."""
        quads = [self.e.load(row, vector(I32, 4), offset) for row in self._rows]
        halves = [self._transposed(quads[first : first + 8]) for first in (0, 8)]
        return [self._shuffled(first, last, range(LANES)) for first, last in zip(*halves)]

    def _transposed(self, quads: Sequence[Value]) -> list[Value]:
        """Word j of eight rows, for four words. Nothing crosses the 16-byte parts of a register
        but the first step, in which a row and the fourth row after it share a register."""
        pairs = [self._shuffled(quads[i], quads[i + 4], range(8)) for i in range(4)]
        low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
        found = []
        for places in (low, high):
            first, last = (self._shuffled(pairs[i], pairs[i + 1], places) for i in (0, 2))
            found.append(self._shuffled(first, last, (0, 1, 8, 9, 4, 5, 12, 13)))
            found.append(self._shuffled(first, last, (2, 3, 10, 11, 6, 7, 14, 15)))
        return found

    def _shuffled(self, x: Value, y: Value, places: Sequence[int]) -> Value:
        return self.e.b.shuffle_vector(x, y, ir.Constant(vector(I32, len(places)), [*places]))

    def with_all_bits(self, spans: Sequence[tuple[int, int]], masks: dict[int, int]) -> Value:
        """Rows of which a number has all bits of a mask, as bits of an int64.

        Args:
            spans: (offset, bytes) of the numbers.
            masks: mask by number of bytes.
        """
        b, found = self.e.b, ir.Constant(vector(ir.IntType(1)), None)
        for offset, nbytes in spans:
            kind = ir.IntType(8 * nbytes)
            ones = ir.Constant(vector(kind), [masks[nbytes]] * LANES)
            masked = b.and_(self.numbers(offset, kind), ones)
            found = b.or_(found, b.icmp_unsigned("==", masked, ones))
        return b.zext(b.bitcast(found, I16), I64)
