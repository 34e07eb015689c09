"""Quantisation to blocks of activations and weights, bit for bit as in
`graphllm.formats.quantization`. `quantize_rows` registers the kernels of both ops."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from ....graph.dtype import DTYPES
from ..formats import FORMATS
from ..formats.encoder import ROUND, ROUND_BITS, BlockEncoder
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import Kernel, kernel, load_i64, next_chunk, set_status
from ..runtime.lazy_numba import intrinsic, ir, types
from ..runtime.thread_pool import STATUS_VALUE
from ..simd.emitter import F32, F32S, I8, I16, I32, I32S, LANES, VECTOR, Emitter, Value
from .linear_microkernels import workspace

_CHUNK_COLUMNS = 4096  # columns that a thread takes at a time
_TINY_BITS = 0x0D800000  # of 2**-100
INF_BITS, _NAN_BITS = 0x7F800000, 0x7FC00000


def scale_factors(e: Emitter, largest: Value, most: float) -> tuple[Value, Value, Value]:
    """Return (most / amax, bits of d, whether it is finite and not tiny) from the bits of amax."""
    b = e.b
    finite = b.icmp_unsigned("<", largest, ir.Constant(I32, INF_BITS))
    some = b.icmp_unsigned(">=", largest, ir.Constant(I32, _TINY_BITS))
    live = b.and_(finite, some)
    one = ir.Constant(F32, 1.0)
    amax, top = b.select(live, b.bitcast(largest, F32), one), ir.Constant(F32, most)
    d = b.bitcast(e.divide_positive(amax, top), I32)
    d = b.select(live, d, b.select(finite, ir.Constant(I32, 0), ir.Constant(I32, _NAN_BITS)))
    return e.divide_positive(top, amax), d, live


def _quantise(e: Emitter, block: int, x: Value, q: Value, d: Value, s: Value) -> None:
    """Emit one block: float32 at ``x``; int8, scale and sums to ``q``, ``d``, ``s``."""
    b, count = e.b, block // LANES
    values = [e.load(x, offset=VECTOR * i) for i in range(count)]
    largest = e.mask(values[0], 0x7FFFFFFF)
    for value in values[1:]:
        size = e.mask(value, 0x7FFFFFFF)
        largest = b.select(b.icmp_unsigned(">", size, largest), size, largest)
    inverse, scale, live = scale_factors(e, e.reduce("umax", largest), 127.0)
    e.store(scale, d)
    keep, inverse = e.splat(b.sext(live, I32)), e.splat(inverse)
    sums = []
    for i, value in enumerate(values):
        value = b.bitcast(b.and_(value, keep), F32S)
        moved = e.add(e.mul(value, inverse), e.f32(ROUND))
        rounded = b.sub(b.bitcast(moved, I32S), e.i32(ROUND_BITS))
        e.store(b.trunc(rounded, ir.VectorType(I8, LANES)), q, LANES * i)
        sums.append(rounded)
    if block == 32:
        e.store(e.reduce("add", b.add(*sums)), s)
        return
    for i, vector in enumerate(sums):
        e.store(b.trunc(e.reduce("add", vector), I16), s, 2 * i)


@intrinsic(prefer_literal=True)
def quantise_block(typingctx, block, x, q, d, s):
    """Quantise one block of 32 or 256 (a literal) activations; see `_quantise`."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        _quantise(Emitter(builder), block.literal_value, *given[1:])
        return context.get_dummy_value()

    return types.none(block, *[types.int64] * 4), generate


def _rotated(e: Emitter, x: Value) -> Value:
    """The fast Walsh-Hadamard transform of the lanes of x, divided by 4.

    A product with 1 or -1 is exact, so `madd` has the bits of a sum or a difference.
    """
    for distance in (1, 2, 4, 8):
        other = ir.Constant(I32S, [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(F32S, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        x = e.madd(x, signs, e.b.shuffle_vector(x, x, other))
    return e.mul(x, e.f32(0.25))


@intrinsic
def rotate_blocks(typingctx, source, target, count):
    """Rotate ``count`` float32, whole blocks of 16, from ``source`` to ``target``; may be equal.

    A block is a vector; the bits are those of `graphllm.ops.linear.hadamard`.
    """

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        e = Emitter(builder)
        source, target, count = given
        with e.loop(e.b.sdiv(count, e.count(LANES))) as loop:
            at = e.times(loop.index, VECTOR)
            e.store(_rotated(e, e.load_f32(e.at(source, at))), e.at(target, at))
        return context.get_dummy_value()

    number = types.int64
    return types.none(number, number, number), generate


class QuantiseArgs(NamedTuple):
    """Argument block of `quantise_act`: x and y [rows, inner, k]."""

    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int  # address of the live count
    inner: int
    k: int


_read_quantise = argument_reader(QuantiseArgs)


@cache
def quantise_kernel(block: int, rotated: bool = False) -> Kernel:
    """Make a kernel that quantises float32 rows in blocks of 32 or 256, perhaps ``rotated``."""
    chunk_blocks = _CHUNK_COLUMNS // block
    sum_bytes = 4 if block == 32 else 32  # of a block

    buffer_bytes = 4 * _CHUNK_COLUMNS if rotated else 0

    @kernel
    def quantise(p, thread, threads):
        a = _read_quantise(p)
        inner, k, blocks = a.inner, a.k, a.k // block
        chunks = (blocks + chunk_blocks - 1) // chunk_blocks
        line_bytes = k + blocks * (4 + sum_bytes)
        items = load_i64(a.rows) * inner * chunks
        item, turned = next_chunk(p), workspace(buffer_bytes)
        while item < items:
            line, first = item // chunks, item % chunks * chunk_blocks
            t, j = line // inner, line % inner
            source, target = a.x + t * a.x_stride + 4 * j * k, a.y + t * a.y_stride + j * line_bytes
            last = min(first + chunk_blocks, blocks)
            if rotated:
                rotate_blocks(source + 4 * block * first, turned, block * (last - first))
                source = turned - 4 * block * first
            for i in range(first, last):
                d, s = target + k + 4 * i, target + k + 4 * blocks + sum_bytes * i
                quantise_block(block, source + 4 * block * i, target + block * i, d, s)
            item = next_chunk(p)

    return quantise


def launch_act(ctx: KernelContext, rotated: bool = False) -> Launch:
    """Launch `quantise_act`, or if ``rotated`` `hadamard_quantise`, to a format with blocks."""
    x, out = ctx.x, ctx.out
    block = QuantiseArgs(
        x=x.address,
        x_stride=x.row_stride,
        y=out.address,
        y_stride=out.row_stride,
        rows=ctx.live(x.meta.rows),
        inner=prod(x.meta.inner[:-1]),
        k=x.meta.inner[-1],
    )
    return Launch(quantise_kernel(DTYPES[ctx.attrs["dtype"]].block, rotated), block)


# ---------------------------------------------------------------------------------------- weights

_RUN = 256  # elements that are encoded together: a block of 256, or eight blocks of 32
_CHUNK = 1 << 15  # elements that a thread takes at a time, a multiple of `_RUN`
LOADS = {
    "f32": BlockEncoder.load_f32,
    "f16": BlockEncoder.load_f16,
    "bf16": BlockEncoder.load_bf16,
}


@intrinsic(prefer_literal=True)
def encode(typingctx, source, target, elements, x, y):
    """Encode elements of dtype ``source`` at ``x`` as blocks of ``target`` at ``y``.

    The dtypes and the number of elements are literals. Returns an int64, 1 if an element is
    infinite or NaN, else 0.
    """
    load, write = LOADS[source.literal_value], FORMATS[target.literal_value].encode
    assert write is not None
    nbytes, count = DTYPES[source.literal_value].nbytes, elements.literal_value

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        e = BlockEncoder(builder)
        vectors = [load(e, given[3], nbytes * i) for i in range(0, count, LANES)]
        return write(e, vectors, given[4])

    return types.int64(source, target, elements, types.int64, types.int64), generate


class EncodeArgs(NamedTuple):
    """Argument block of `quantise`: rows of floats to rows of blocks."""

    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int  # address of the live count
    k: int


_read_encode = argument_reader(EncodeArgs)


@cache
def _to_blocks(source: str, target: str) -> Kernel:
    """Make a kernel that encodes rows of dtype ``source`` in the block format ``target``."""
    size, block, nbytes = DTYPES[source].nbytes, DTYPES[target].block, DTYPES[target].nbytes

    @kernel(key=(source, FORMATS[target].cache_key))
    def to_blocks(p, thread, threads):
        a = _read_encode(p)
        lines, k = load_i64(a.rows), a.k
        if a.x_stride == k * size and lines > 0:  # contiguous rows are encoded as one long row
            lines, k = 1, k * lines
        chunks = (k + _CHUNK - 1) // _CHUNK
        item = next_chunk(p)
        while item < lines * chunks:
            line, first = item // chunks, item % chunks * _CHUNK
            at = a.x + line * a.x_stride + first * size
            to = a.y + line * a.y_stride + first // block * nbytes
            i, count, bad = 0, min(_CHUNK, k - first), 0
            while block < _RUN and i + _RUN <= count:
                bad |= encode(source, target, _RUN, at + i * size, to + i // block * nbytes)
                i += _RUN
            while i < count:
                bad |= encode(source, target, block, at + i * size, to + i // block * nbytes)
                i += block
            if bad != 0:
                set_status(p, STATUS_VALUE)
                return
            item = next_chunk(p)

    return to_blocks


def launch_weights(ctx: KernelContext) -> Launch:
    """Launch `quantise` to a block format."""
    x, out = ctx.x, ctx.out
    block = EncodeArgs(
        x=x.address,
        x_stride=x.row_stride,
        y=out.address,
        y_stride=out.row_stride,
        rows=ctx.live(x.meta.rows),
        k=x.meta.inner[0],
    )
    return Launch(_to_blocks(x.dtype.name, out.dtype.name), block)
