"""Quantisation of rows to planes of int8 or e4m3: activations, and weights in row formats. Also
registers the kernels of `quantize`, which write blocks, and has what kernels use that quantise the
rows that they compute.

Bit for bit as `graphllm.formats.activations`. A thread takes whole rows, because the scale of a row
is known only when all of it has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from ....formats import ROW_FORMATS
from ....formats.activations import A8_ROW, ACTIVATIONS, E4M3, F8_128, F8_ROW, LAYOUTS
from ....graph.dtype import DTYPES, F32, DType
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..formats import FORMATS
from ..formats.encoder import BlockEncoder
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32s, helper, i32s, kernel, load_i64, set_status
from ..runtime.lazy_numba import intrinsic, types
from ..runtime.thread_pool import STATUS_VALUE
from ..simd.emitter import F32S, I8S, I32, I64, LANES, Value
from . import quantize
from .elementwise import thread_range
from .quantize import INF_BITS, LOADS, quantise_block, rotate_blocks, scale_factors

BY_ROWS = (A8_ROW, F8_ROW, F8_128)  # activations that these kernels write
_LEAST_NORMAL = 0x3C800000  # bits of 2^-6, the least normal number of e4m3
_SUBNORMAL_STEPS = 2.0**14  # a float32 whose last bit counts 2^-9, the least number of e4m3


@intrinsic(prefer_literal=True)
def largest_size(typingctx, source, x, count):
    """The bits of the largest magnitude of ``count`` elements of dtype ``source`` (a literal)."""
    load, nbytes = LOADS[source.literal_value], DTYPES[source.literal_value].nbytes

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        e = BlockEncoder(builder)
        found = e.variable(e.i32(0))
        with e.loop(e.b.sdiv(given[2], e.count(LANES))) as loop:
            size = e.size(load(e, e.at(given[1], e.times(loop.index, LANES * nbytes))))
            more = e.b.icmp_unsigned(">", size, e.get(found))
            e.set(found, e.b.select(more, size, e.get(found)))
        return e.b.zext(e.reduce("umax", e.get(found)), I64)

    return types.int64(source, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def quantise_run(typingctx, source, float8, x, count, largest, q, d):
    """Quantise ``count`` elements to int8, or e4m3 if ``float8`` (a literal, 0 or 1), at ``q``.

    ``largest``: result of `largest_size`. Writes the scale to ``d``; returns the sum of int8.
    """
    load, nbytes = LOADS[source.literal_value], DTYPES[source.literal_value].nbytes
    narrow = bool(float8.literal_value)

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        e = BlockEncoder(builder)
        x, count, largest, q, d = given[2:]
        most = LAYOUTS[F8_ROW if narrow else A8_ROW].most
        inverse, scale, live = scale_factors(e, e.b.trunc(largest, I32), most)
        e.store(scale, d)
        keep, inverse = e.splat(e.b.sext(live, I32)), e.splat(inverse)
        total = e.variable(e.i32(0))
        with e.loop(e.b.sdiv(count, e.count(LANES))) as loop:
            value = e.bits_of(load(e, e.at(x, e.times(loop.index, LANES * nbytes))))
            value = e.mul(e.b.bitcast(e.b.and_(value, keep), F32S), inverse)
            if narrow:
                made = _to_e4m3(e, value)
            else:
                made = e.rounded(value, -127, 127)
                e.set(total, e.b.add(e.get(total), made))
            e.store(e.b.trunc(made, I8S), e.at(q, e.times(loop.index, LANES)))
        return e.b.sext(e.reduce("add", e.get(total)), I64)

    number = types.int64
    return number(source, float8, number, number, number, number, number), generate


def _to_e4m3(e: BlockEncoder, x: Value) -> Value:
    """The bytes of the nearest e4m3, ties to even, of floats below 464 in magnitude; int32."""
    size = e.size(x)
    odd = e.mask(e.shr(size, 20), 1)
    normal = e.shr(e.b.add(e.b.add(size, e.i32((1 << 19) - 1)), odd), 20)
    normal = e.b.sub(normal, e.i32((127 - 7) << 3))  # the exponents' biases
    steps = e.bits_of(e.add(e.magnitude(x), e.f32(_SUBNORMAL_STEPS)))
    steps = e.b.sub(steps, e.bits_of(e.f32(_SUBNORMAL_STEPS)))
    small = e.b.icmp_unsigned("<", size, e.i32(_LEAST_NORMAL))
    return e.b.or_(e.b.select(small, steps, normal), e.mask(e.shr(e.bits_of(x), 24), 0x80))


class RowsArgs(NamedTuple):
    """Argument block: x [rows, inner, k] to lines of planes."""

    x: int
    x_stride: int
    y: int
    y_stride: int
    rows: int  # address of the live count
    inner: int
    k: int
    line_bytes: int  # of y


_read_rows = argument_reader(RowsArgs)


@cache
def _rows_kernel(source: str, target: str) -> Kernel:
    """Make the kernel that quantises rows of dtype ``source`` to an activation or row format."""
    weights = target in ROW_FORMATS
    layout = LAYOUTS[ROW_FORMATS[target].activation if weights else DTYPES[target]]
    float8, per, sums = int(layout.q == E4M3), layout.block, bool(layout.sums) and not weights
    size = DTYPES[source].nbytes

    @kernel(key=(source, target))
    def quantise_rows(p, thread, threads):
        a = _read_rows(p)
        k, block = a.k, per if per != 0 else a.k
        first, last = thread_range(load_i64(a.rows) * a.inner, thread, threads)
        for line in range(first, last):
            t, j = line // a.inner, line % a.inner
            x = a.x + t * a.x_stride + j * k * size
            y = a.y + t * a.y_stride + j * a.line_bytes
            end, total = y + k, 0
            for at in range(0, k, block):
                largest = largest_size(source, x + at * size, block)
                if weights and largest >= INF_BITS:
                    set_status(p, STATUS_VALUE)
                    return
                total = quantise_run(source, float8, x + at * size, block, largest, y + at, end)
                end += 4
            if sums:
                i32s(end)[0] = total
                end += 4
            for place in range(end, y + a.line_bytes, 4):
                i32s(place)[0] = 0

    return quantise_rows


def launch(
    x: Meta, at: int, stride: int, rows: int, y: int, y_stride: int, target: DType,
    overlaps_previous: bool = False,
) -> Launch:  # fmt: skip
    """Launch the quantisation of ``x``, at address ``at``, to ``target`` at ``y``.

    Threads share out rows by `thread_range`.

    Args:
        x: shape [T, ..., K] and dtype.
        at, stride: address of x, and bytes from row to row.
        rows: address of the live number of rows.
        y, y_stride: the same of the result.
        target: an activation format of `BY_ROWS`, or a row format.
        overlaps_previous: see `Launch`.
    """
    *inner, k = x.inner
    block = RowsArgs(at, stride, y, y_stride, rows, prod(inner), k, target.row_nbytes(k))
    return Launch(_rows_kernel(x.dtype.name, target.name), block, overlaps_previous)


# ------------------------------------------------------------- rows as results of other kernels

COLUMNS = 256  # columns that are computed at a time: whole blocks of activations
ROW_BYTES = 4 * COLUMNS


class Target(NamedTuple):
    """Where result rows are written, and whether they are quantised. A kernel has two of them."""

    address: int  # 0: this target is not used
    stride: int
    block: int  # block of the quantised activations, 0: rows stay float32


UNUSED = Target(0, 0, 0)


def one_or_two(node: Tensor, options: Options) -> str | None:
    """Rule of kernels that write each row to at most two targets."""
    kinds = [DTYPES[name] for name in node.attrs["dtypes"]]
    if len(kinds) > 2:
        return "a row has more than two result formats"
    if other := [kind for kind in kinds if kind != F32 and kind not in ACTIVATIONS]:
        return f"results are {other[0]}"
    by_rows = [kind in BY_ROWS for kind in kinds if kind != F32]
    return "results are quantised by rows and by blocks" if len(set(by_rows)) > 1 else None


def float_bytes(node: Tensor, options: Options) -> int:
    """Bytes of scratch for float rows that are quantised as a whole; 0 if they are a result."""
    names = node.attrs["dtypes"]
    if "f32" in names or not any(DTYPES[name] in BY_ROWS for name in names):
        return 0
    assert node.src[0] is not None
    return _float_rows(node.src[0].meta).bound().nbytes


def _float_rows(meta: Meta) -> Meta:
    return Meta.of(meta.shape, F32)


def targets(
    ctx: KernelContext, refs: Sequence[OperandRef], like: Meta, scratch: int, same_rows: bool
) -> tuple[list[Target], list[Launch]]:
    """Return targets for results, and launches that quantise rows as a whole after the kernel.

    Args:
        ctx: context of the step.
        refs: results, of the shape of ``like``.
        like: Meta of the float rows.
        scratch: address of `float_bytes`.
        same_rows: whether each thread of the kernel writes the rows that it quantises afterwards.
    """
    by_rows = [ref for ref in refs if ref.dtype in BY_ROWS]
    if not by_rows:
        blocks = (0 if ref.dtype == F32 else ref.dtype.block for ref in refs)
        return [Target(ref.address, ref.row_stride, b) for ref, b in zip(refs, blocks)], []
    floats = next((ref for ref in refs if ref.dtype == F32), None)
    meta, live = _float_rows(like), ctx.live(like.rows)
    at, stride = (
        floats.address if floats else scratch,
        floats.row_stride if floats else meta.strides[0],
    )
    launches = [
        launch(meta, at, stride, live, ref.address, ref.row_stride, ref.dtype, same_rows)
        for ref in by_rows
    ]
    return [Target(at, stride, 0)], launches


@helper
def write_row(values, y, block, column, count, width):
    """Write ``count`` values from ``column`` on to a row at ``y``, quantised in blocks if not 0."""
    if block == 0:
        source, target = f32s(values), f32s(y + 4 * column)
        for i in range(count):
            target[i] = source[i]
    elif block == 32:
        d, s = y + width, y + width + width // 32 * 4
        for b in range(count // 32):
            at = column // 32 + b
            quantise_block(32, values + 128 * b, y + 32 * at, d + 4 * at, s + 4 * at)
    else:
        at = column // 256
        d, s = y + width, y + width + width // 256 * 4
        quantise_block(256, values, y + column, d + 4 * at, s + 32 * at)


# -------------------------------------------------------------------------------- registration


def _launch(ctx: KernelContext) -> Launch:
    x, out = ctx.x, ctx.out
    live = ctx.live(x.meta.rows)
    return launch(x.meta, x.address, x.row_stride, live, out.address, out.row_stride, out.dtype)


def _quantised(node: Tensor, options: Options) -> str | None:
    return None if node.dtype.quantised else f"to {node.dtype}"


@BACKEND.kernel("quantise_act", dtypes={"x": "f32"}, layout={"x": ROWS}, when=_quantised)
def quantise_act(ctx: KernelContext) -> Launch:
    return _launch(ctx) if ctx.out.dtype in BY_ROWS else quantize.launch_act(ctx)


def _has_encoder(node: Tensor, options: Options) -> str | None:
    form = FORMATS.get(node.dtype.name)
    known = node.dtype.name in ROW_FORMATS or (form and form.encode)
    return None if known else f"no encoder for {node.dtype}"


@BACKEND.kernel("quantise", dtypes={"x": tuple(LOADS)}, layout={"x": ROWS}, when=_has_encoder)
def quantise(ctx: KernelContext) -> Launch:
    return _launch(ctx) if ctx.out.dtype.name in ROW_FORMATS else quantize.launch_weights(ctx)


# --------------------------------------------------------------------------------------- rotation


class HadamardArgs(NamedTuple):
    """Argument block of `hadamard`."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live count
    width: int  # elements of a row


_read_hadamard = argument_reader(HadamardArgs)


@kernel
def _hadamard(p, thread, threads):
    a = _read_hadamard(p)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        rotate_blocks(a.x + row * a.x_stride, a.y + 4 * row * a.width, a.width)


@BACKEND.kernel("hadamard", dtypes={"x": "f32"}, layout={"x": ROWS})
def hadamard(ctx: KernelContext) -> Launch:
    x = ctx.x
    args = x.address, x.row_stride, ctx.out.address, ctx.live(x.meta.rows), prod(x.meta.inner)
    return Launch(_hadamard, HadamardArgs(*args))


def _in_blocks(node: Tensor, options: Options) -> str | None:
    by_rows = DTYPES[node.attrs["dtype"]] in BY_ROWS
    return "results are quantised by rows" if by_rows else None


@BACKEND.kernel("hadamard_quantise", dtypes={"x": "f32"}, layout={"x": ROWS}, when=_in_blocks)
def hadamard_quantise(ctx: KernelContext) -> Launch:
    return quantize.launch_act(ctx, rotated=True)
