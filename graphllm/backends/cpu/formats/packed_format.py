"""How microkernels read weight formats: packing into row tiles, and unpacking into vectors.

Weights are packed at load into tiles of 16 rows. A tile holds the bytes of the stored blocks,
block after block, interleaved in chunks of four bytes: a vector is the same chunk of 16 rows, so
lane = row, an activation is one broadcast, and no sum crosses lanes. The order of the fields within
a block of a tile is the format's own.

A format says in `PackedFormat.fields` where its fields go, and in the other methods how vectors of
a tile become integers with scales. The modules of this package hold one family each, as those of
`graphllm.formats`, which declares layouts and formulas.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .... import formats
from ....graph.dtype import DTYPES
from ..runtime.isa import ISA
from ..runtime.lazy_numba import ir
from ..simd.emitter import LANES, VECTOR, Emitter, Value
from .bit_layout import BitLayout
from .encoder import Encoder

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

HALVES = 32  # bytes of 16 float16
NIBBLES = 0x0F0F0F0F
SCALE_ORDER = (0, 2, 1, 3)  # of the scales in each four, in formats with 16 sub-blocks
_EXPONENT = {1: 0xFF, 2: 0x7C00}  # bits that are all set in an infinite or NaN scale, by its bytes


class Field(NamedTuple):
    """Bytes of a tile's block: its offset, and a vector with a lane for each row."""

    offset: int
    value: Value


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """A weight format as microkernels read it. ``encode``, if any, writes its blocks from floats:
    without it the reference quantises weights on load."""

    name: str
    encode: Encoder | None = None

    @property
    def code(self) -> int:
        """The number of the format in intrinsics, whose literals are integers."""
        return list(FORMATS).index(self.name)

    @property
    def cache_key(self) -> str:
        """The name; for a format declared outside this package, whose sources the kernel cache does
        not know, with a hash of its source file."""
        source = Path(inspect.getfile(type(self))).resolve()
        if source.is_relative_to(Path(__file__).resolve().parent):
            return self.name
        return f"{self.name} {hashlib.sha256(source.read_bytes()).hexdigest()}"

    @property
    def block(self) -> int:
        """Elements of a row in a block."""
        return DTYPES[self.name].block

    @property
    def nbytes(self) -> int:
        """Bytes of a block of 16 rows."""
        return LANES * DTYPES[self.name].nbytes

    def group_nbytes(self, columns: int) -> int:
        """Bytes of 16 packed rows."""
        return columns // self.block * self.nbytes

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        """Yield the fields that a block of 16 rows is packed to; each byte at most once."""
        raise NotImplementedError

    def pack(self, rows: StoredRows, target: Value) -> Value:
        """Emit the packing of the stored blocks ``rows`` into a tile's block.

        Returns:
            As `bad_scales`.
        """
        bad = self.bad_scales(rows)
        for offset, value in self.fields(rows):
            rows.e.store(value, target, offset)
        return bad

    def bad_scales(self, rows: StoredRows) -> Value:
        """int64: bit r is set if a scale of row r is infinite or NaN."""
        form = formats.BLOCK_FORMATS.get(self.name)
        return rows.with_all_bits(form.scale_spans() if form else (), _EXPONENT)

    # -- fields that are packed as they are stored
    def span(self, field: str) -> tuple[int, int]:
        """(offset, bytes) of a field in the stored block."""
        start, end = formats.BLOCK_FORMATS[self.name].span(field)
        return start, end - start

    def chunks(self, rows: StoredRows, field: str, target: int) -> Iterator[Field]:
        """Chunks of four bytes of a field, as vectors from offset ``target`` on."""
        for j, word in enumerate(rows.words(self.span(field))):
            yield Field(target + VECTOR * j, word)

    def scalar(self, rows: StoredRows, field: str, target: int) -> Iterator[Field]:
        """A field of one or two bytes, such as a scale."""
        offset, nbytes = self.span(field)
        yield Field(target, rows.numbers(offset, ir.IntType(8 * nbytes)))

    # -- unpacking
    def in_place_tokens(self, target: ISA) -> int:
        """Most tokens whose tiles read the packed integers in place, instead of an unpacked copy;
        each tile of tokens unpacks them again."""
        return 8 if target.avx512 and target.vnni else 0

    def signed(self, target: ISA) -> bool:
        """Whether the integers are signed bytes. Not with VNNI."""
        return False

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        """Yield (k, element k of each row as f32x16) for one block at ``at``. Each value rounds as
        the format's NumPy decoder does."""
        raise NotImplementedError


FORMATS: dict[str, Any] = {}  # PackedFormat by name
BLOCK_FORMATS: dict[str, Any] = {}  # those of `graphllm.formats.BLOCK_FORMATS`


def register(form: PackedFormat) -> PackedFormat:
    """Let the kernels of this backend run a format, which `graphllm.formats` has declared."""
    assert form.name in DTYPES, f"{form.name} is not declared in graphllm.formats"
    FORMATS[form.name] = form
    if form.name in formats.BLOCK_FORMATS:
        BLOCK_FORMATS[form.name] = form
    return form


def by_code(code: int) -> Any:
    """The format of a `PackedFormat.code`."""
    return list(FORMATS.values())[code]


@dataclass(frozen=True, kw_only=True)
class BlockFormat(PackedFormat):
    """A format with integers that share scales."""

    largest: int  # unsigned q
    layout: ClassVar[BitLayout]  # of a chunk: a block of 32, or a part of a block of 256
    words_at: ClassVar[int] = 0  # offset of the first chunk in a tile's block
    symmetric: ClassVar[bool] = False  # whether no signed byte is -128

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return 4 * len(self.layout.words)

    @property
    def chunk_nbytes(self) -> int:
        return self.layout.vectors * VECTOR

    def words(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        """Yield (j, q of elements 4 j to 4 j + 3 of each row, a byte each) of the chunk at ``at``,
        each j once.

        The code of a word is emitted when it is asked for, in an order in which few vectors are
        live at a time: AVX2 has 16 registers, and a vector takes two.
        """
        return self.layout.unpack(e, lambda i: e.load(at, offset=VECTOR * i))

    def all_words(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        """As `words`, of all chunks of the block at ``at``."""
        for c in range(self.block // self.chunk):
            for j, word in self.words(e, e.at(at, self.words_at + c * self.chunk_nbytes)):
                yield c * self.chunk // 4 + j, word

    def stored_words(self, rows: StoredRows) -> list[Value]:
        """All words of the stored blocks, in order; none if `fields` packs them."""
        return []

    def pack(self, rows: StoredRows, target: Value) -> Value:
        bad, words, each = super().pack(rows, target), self.stored_words(rows), self.chunk // 4
        for first in range(0, len(words), each):
            at = self.words_at + first // each * self.chunk_nbytes
            for i, word in enumerate(self.layout.pack(rows.e, words[first : first + each])):
                rows.e.store(word, target, at + VECTOR * i)
        return bad

    def dot(self, e: Emitter, pairs: list[tuple[Value, Value]], total: Value | None) -> Value:
        """``total`` plus the sum of q times activations in each lane."""
        if self.signed(e.isa):
            return e.dot_signed_bytes(pairs, total)
        return e.dot_bytes(pairs, self.largest, total)


@dataclass(frozen=True, kw_only=True)
class Block32(BlockFormat):
    """32 integers with one scale: x = d * (q - zero point), or x = d * q + m."""

    has_minimum: bool = False  # has an m; then the zero point is 0

    def zero_point(self, e: Emitter) -> int:
        """The integer that stands for zero."""
        raise NotImplementedError

    def factors_at(self) -> int:
        """Offset of d, which m follows, in a tile's block: at its end."""
        return self.nbytes - HALVES * (1 + self.has_minimum)

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        """d, and m if the format has one, f32x16."""
        first = self.factors_at()
        return [e.load_f16(at, first + HALVES * i) for i in range(1 + self.has_minimum)]

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        (d, *m), zero = self.factors(e, at), self.zero_point(e)
        for j, word in self.all_words(e, at):
            for i in range(4):
                q = e.byte(word, i) if zero or m else e.signed_byte(word, i)
                q = e.b.sub(q, e.i32(zero)) if zero else q
                x = e.mul(e.to_f32(q), d)
                yield 4 * j + i, e.add(x, m[0]) if m else x


@dataclass(frozen=True, kw_only=True)
class Block256(BlockFormat):
    """A super-block of 256 elements, with an integer scale for each sub-block of ``sub`` elements:
    x = d * scale * q - (a term that does not depend on q)."""

    sub: int
    minima: ClassVar[bool]  # whether the term that does not depend on q has factors of its own
    offset: ClassVar[int]  # without minima: the integer that stands for zero
    signed_scales: ClassVar[bool]
    # How AMX multiplies integers by scales (`amx_operands`). "byte": products fit an unsigned byte.
    # "negated": minus the products fit a byte. "scale": scales have six bits, and products with
    # three of them fit an unsigned byte. "product": products fit int16.
    folding: ClassVar[str] = "product"

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        """Scales of sub-blocks 4 z to 4 z + 3 of each row, a byte each: see `place`."""
        raise NotImplementedError

    def place(self, k: int) -> int:
        """The byte that has the scale of sub-block k: so that even and odd bytes are the pairs of
        `offsets`."""
        return (k if self.sub == 32 else SCALE_ORDER[k % 4]) % 4

    def scale(self, e: Emitter, scale_bytes: Value, k: int) -> Value:
        """The scale of sub-block k as `Emitter.scale` returns it."""
        return e.scale(scale_bytes, self.place(k), self.signed_scales, self.fits_i16(e))

    def float_scales(
        self, e: Emitter, scale_bytes: Callable[[int], Value], factor: Value
    ) -> Callable[[int], Value]:
        """A function that returns the scale or minimum of sub-block k times a factor, f32x16; the
        code is emitted when it is asked for a k for the first time."""
        get, load = e.signed_byte if self.signed_scales else e.byte, cache(scale_bytes)
        return cache(lambda k: e.mul(e.to_f32(get(load(k // 4), self.place(k))), factor))

    def zero_point(self, e: Emitter) -> int:
        """What VNNI dots subtract from q, by starting at minus this times the activation sums: to
        save work later, or so that dots fit int16."""
        return 0

    def fits_i16(self, e: Emitter) -> bool:
        """Whether the dot of a sub-block fits int16, and is scaled as int16."""
        most = max(self.largest - self.zero_point(e), self.zero_point(e))
        return e.isa.vnni and self.sub * most * 127 < 1 << 15

    def has_corrections(self, e: Emitter) -> bool:
        """Whether there are `corrections`."""
        return self.minima and self.zero_point(e) != 0

    def corrections(self, e: Emitter, at: Value) -> list[Value]:
        """Pairs like `offsets` that add back what `zero_point` took from the dots, if the format
        itself has no zero point."""
        raise NotImplementedError

    def has_offsets(self, e: Emitter) -> bool:
        """Whether there are `offsets`."""
        return self.minima or self.zero_point(e) == 0

    def offset_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        """As `scale_bytes`, the numbers of `offsets`."""
        return self.scale_bytes(e, at, z)

    def offsets(self, e: Emitter, at: Value) -> list[Value]:
        """Vectors of int16 pairs to multiply by pairs of activation sums: with sub-blocks of 16,
        eight (sums 0 1, 2 3, ...); with sub-blocks of 32, four (sums 0 2, 1 3, 4 6, 5 7)."""
        return self.pairs(e, [self.offset_bytes(e, at, z) for z in range(64 // self.sub)])

    def pairs(self, e: Emitter, scale_bytes: list[Value]) -> list[Value]:
        """Bytes of sub-blocks as the int16 pairs of `offsets`."""
        return [pair for each in scale_bytes for pair in e.split_bytes(each, self.signed_scales)]

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        """The float scales, f32x16."""
        raise NotImplementedError

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        """Combine a super-block's integer sums, without the scale of the activations.

        Args:
            e: emitter.
            total: sum of scale * q * activation.
            offset: sum of `offsets` * activation sums, if there are offsets.
            factors: as `factors` returns them.

        Returns:
            f32x16.
        """
        raise NotImplementedError


def halves_of(e: Emitter, v: Value) -> tuple[Value, Value]:
    """The low halves of all bytes, and their high halves."""
    return e.mask(v, NIBBLES), e.mask(e.shr(v, 4), NIBBLES)


@dataclass(frozen=True)
class Codebook:
    """The values that four bits stand for, as bytes; unsigned, plus a zero point, where that is
    faster."""

    codes: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest unsigned byte."""
        return max(self.codes) - min(self.codes)

    def signed(self, target: ISA) -> bool:
        """Whether bytes are signed. Large unsigned ones need VNNI: without it `Emitter.dot_bytes`
        has to split them."""
        return not target.vnni and 2 * self.largest * 127 >= 1 << 15

    def zero_point(self, e: Emitter) -> int:
        return 0 if self.signed(e.isa) else -min(self.codes)

    def look_up(self, e: Emitter, nibbles: Value) -> Value:
        """The values of bytes below 16."""
        return e.lookup_bytes(nibbles, [(v + self.zero_point(e)) & 0xFF for v in self.codes])
