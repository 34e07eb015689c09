"""Bidirectional attention over packed sequences; see packed_attention.cu.

Kernels are chosen by the shape alone, so that a token's result is the same in every batch.
"""

from __future__ import annotations

from .... import ops
from ....graph.dtype import F16, F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import matmul_dtype
from .quantize import HALVES, quantise

_ARGUMENT = ArgumentStruct("packed_attention.cuh", "PackedAttention")
# Head dimensions of the kernels on tensor cores; tokens that the one for f16 has in shared memory.
_ROWS = {32: 256, 64: 160, 96: 128, 128: 96}
_TOKENS = 64  # of a thread block of that kernel
_FLOAT_TYPES = ("f32", "f16")
_ROTATIONS = ("rope", "rms_norm", "layer_norm")  # between a linear and attention


def _fits_tensor_cores(ctx: KernelContext) -> bool:
    depth, width = ctx.q.meta.inner[-1], ctx.v.meta.inner[-1]
    places = [at for ref in (ctx.q, ctx.k, ctx.v) for at in (ref.address, ref.row_stride)]
    shaped = depth == width and depth in _ROWS and all(at % 16 == 0 for at in places)
    return shaped and bool(ctx.device.gpu.capability >= (8, 0))


def _tensor_kernel(halves: bool, depth: int, biased: bool) -> Function:
    family = "packed_attention" if halves else "packed_attention_float"
    return module(family, DEPTH=depth, BIASED=int(biased))["attend"]


def _generic_kernel(halves: bool) -> Function:
    return module("packed_attention_generic", HALVES=int(halves))["attend"]


def _launch(ctx: KernelContext, out: int, stride: int, kind: int = 0) -> Launch:
    """Attend, and store the results at address ``out``.

    Args:
        ctx: the step.
        out: address of the results.
        stride: bytes from one token's results to the next.
        kind: dtype of the results: 0 for float32, else as in `HALVES`.
    """
    q, k, v, bias = ctx.q, ctx.k, ctx.v, ctx.op("position_bias")
    (heads, depth), (kv_heads, width) = q.meta.inner, v.meta.inner
    arg = _ARGUMENT.pack(
        q=q.address, q_stride=q.row_stride, k=k.address, k_stride=k.row_stride, v=v.address,
        v_stride=v.row_stride, q_start=ctx.q_start.address,
        position_bias=bias.address if bias else 0, tokens=ctx.live_address(q.meta.rows),
        starts=ctx.live_address(ctx.q_start.meta.rows), out=out, out_stride=stride, heads=heads,
        kv_heads=kv_heads, window=ctx.attrs["window"],
        reach=bias.width // 2 if bias else 0, starts_ready=ctx.readable_before_wait("q_start"),
        scale=ctx.attrs["scale"], kind=kind,
    )  # fmt: skip
    halves, tokens = q.dtype == F16, ctx.upper_bound(q.meta.rows)
    if _fits_tensor_cores(ctx):
        kernel = _tensor_kernel(halves, depth, bias is not None)
        shared = 4 * _ROWS[depth] * (depth + 8) if halves else 0  # struct Rows
        return Launch(kernel, (heads, ceil(tokens, _TOKENS)), (128,), (arg,), shared)
    args = (arg, depth, width)
    return Launch(_generic_kernel(halves), (heads, tokens), (128,), args, 4 * width)


def _multiplied_as_halves(x: Tensor) -> bool:
    """Whether x is a linear of f16 or bf16 factors, possibly normalized or rotated."""
    x = x.base
    while x.op in _ROTATIONS:
        x = x.sources[0].base
    return x.op == "linear" and matmul_dtype(x.sources[1].dtype) != F32


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """Queries, keys and values in f16, unless their linears have float32 weights."""
    rows, rest = node.sources[:3], node.src[3:]
    if any(x.dtype != F32 or not _multiplied_as_halves(x) for x in rows):
        return node.src
    return (*(ops.quantise_act(x, dtype=F16.name) for x in rows), *rest)


_LAYOUT = dict.fromkeys(("q", "k", "v"), ROWS)
_DTYPES = dict.fromkeys(("q", "k", "v"), _FLOAT_TYPES)


@BACKEND.kernel("packed_attention", layout=_LAYOUT, dtypes=_DTYPES, lower=_lower)
def packed_attention(ctx: KernelContext) -> Launch:
    return _launch(ctx, ctx.out.address, ctx.out.row_stride)


def _float_result(node: Tensor) -> Meta:
    """Meta of a float32 result that a kernel of its own quantizes."""
    q, _, v = node.sources[:3]
    return Meta.of((q.shape[0], q.meta.inner[0] * v.meta.inner[1]), F32)


def _scratch(node: Tensor, options: Options) -> int:
    return 0 if node.attrs["dtype"] in HALVES else _float_result(node).bound().nbytes


@BACKEND.kernel("packed_attention_quantise", layout=_LAYOUT, dtypes=_DTYPES, scratch=_scratch)
def packed_attention_quantise(ctx: KernelContext) -> list[Launch]:
    out = ctx.out
    if out.dtype.name in HALVES:
        return [_launch(ctx, out.address, out.row_stride, HALVES[out.dtype.name])]
    stride = _float_result(ctx.node).strides[0]
    return [_launch(ctx, ctx.scratch, stride), quantise(ctx, ctx.scratch, stride, out)]


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for halves in (False, True):
        _generic_kernel(halves)
        for depth in _ROWS:
            for biased in (False, True):
                _tensor_kernel(halves, depth, biased)


_all_instances()
