"""Linears: GEMV and small-batch kernels for few tokens; many tokens go to `gemm`.

Block formats multiply int8 activations of one token (or float32, see `Options.linear`), and f16
activations of several tokens on tensor cores. Row formats multiply their own quantised activations
of any number of tokens (`linear_bytes`; one token of w8a8: gemv.cu). f16 and bf16 weights multiply
float32 activations of one token, and activations of their own dtype of several tokens, as cuBLASLt
does. On GPUs with enough shared memory, `gemv_ring` takes the place of gemv.cu for one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from .... import ops
from ....formats import ROW_FORMATS, activation_of
from ....formats.activations import A8_32, F8_ROW
from ....graph.dtype import F32, dtype
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch, Work, ceil
from . import (
    e4m3_copy,
    gemv_ring,
    gemv_shapes,
    linear_bytes,
    small_batch,
    small_batch_blocks,
)
from .gemm import (
    PLAIN,
    Job,
    dequantize_module,
    gemms,
    matmul_dtype,
    workspace_nbytes,
)
from .gemv_shapes import Shape
from .matrices import MAX_FUSED_LINEARS, MAX_TOKENS, matrices_argument
from .quantize import HALVES, dequantise
from .split_norm import SplitNorm
from .weight_packing import INTEGERS, PACK, QUANTISED, item_elements

Pair = tuple[Tensor | None, Tensor | None]  # activation and weight of a linear
Builder = Callable[[KernelContext], list[Work]]
Check = Callable[[Tensor, Options], str | None]

MAX_F32_TOKENS = 8  # tokens up to which float32 weights are multiplied by gemv.cu
_NARROW_F32 = (256, 64)  # rows up to which it multiplies more tokens: routers of mixtures
MAX_FLOAT_TOKENS = 16  # tokens up to which block weights multiply float32 activations
WARPS = 4  # of a block of gemv_unaligned.cu and experts_gemv.cu
_WARPS_PER_ROW = (1, 2, 4)  # choices
_GEMV_TOKENS = (1, 2, 4, 8)  # tokens that a GEMV kernel takes at a time


# ---------------------------------------------------------------------------------- few tokens


def _gemv_kernel(
    name: str, integer: bool, shape: Shape, tokens: int = 1, gated: bool = False, shared: int = 1,
    norm: str = "",
) -> Function:  # fmt: skip
    """gemv.cu for a format; the file describes the macros, which include NORM_BEFORE or NORM_AFTER
    if ``norm`` is "BEFORE" or "AFTER"."""
    own = {f"NORM_{norm}": 1} if norm else {}
    made = module(
        "gemv", FORMAT=name.upper(), INTEGER=int(integer), TOKENS=tokens, ROWS=shape.rows,
        DEPTH=shape.depth, GATED=int(gated), NEXT=shape.next, SHARED_BY=shared, WARPS=shape.warps,
        AHEAD=int(shape.ahead), STAGED=int(shape.staged), RESIDENT=shape.resident,
        ROW_LANES=shape.lanes, **own,
    )  # fmt: skip
    return made["gemv"]


def _unaligned_kernel(name: str) -> Function:
    return module("gemv_unaligned", FORMAT=PLAIN.index(name))["gemv"]


def _token_counts(name: str, integer: bool) -> tuple[int, ...]:
    """Numbers of tokens that GEMV kernels exist for: those that fit in registers.

    f16 and bf16 multiply float32 activations of one token only, and int8 activations of several
    tokens only where there are no tensor cores.
    """
    if name in ("f16", "bf16"):
        return (1,)
    if integer:
        return (1, 8)
    return _GEMV_TOKENS if name in PLAIN else _GEMV_TOKENS[:3]


def gemv(
    ctx: KernelContext, jobs: Sequence[Job], act: int = -1, *, before: SplitNorm | None = None,
    after: SplitNorm | None = None,
) -> Launch:  # fmt: skip
    """Linears of few tokens, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `MAX_FUSED_LINEARS` linears of one activation and format.
        act: an activation as in `elementwise.ACTIVATIONS`: act(first) * second is written to the
            first job's result, see `can_fuse_gate`. -1: no gated unit.
        before: the norm that the linears of one token are multiplied with.
        after: the norm of the result of a linear of one token.
    """
    gated, weights = act >= 0, [job.w for job in jobs]
    x, w, k = jobs[0].x, jobs[0].w, jobs[0].depth
    name, most = w.dtype.name, ctx.upper_bound(x.meta.rows)
    args: list[int | float | bytes] = [
        x.address, x.row_stride, ctx.live_address(x.meta.rows), k, matrices_argument(jobs)
    ]  # fmt: skip
    several = most > 1 or ctx.deterministic
    ring = None if several or before or after else gemv_ring.launch(ctx, jobs, act)
    if ring is not None:
        return ring
    unaligned = x.dtype == F32 and (x.address % 16 or (x.row_stride % 16 and several))
    if name in PLAIN and (k % item_elements(w.dtype) or unaligned):
        return _launch(_unaligned_kernel(name), jobs, 1, WARPS, most, args)
    sizes = _token_counts(name, x.dtype != F32)
    tokens = next((n for n in sizes if n >= most and not ctx.deterministic), sizes[-1])
    shape = gemv_shapes.shape(name, x.dtype != F32, k, gated, tokens)
    if after is not None:
        shape = gemv_shapes.before_norm(name, k)
    own = jobs[:1] if gated else jobs
    groups = sum(ceil(job.rows, shape.rows) for job in own)
    items = k // item_elements(w.dtype)
    shared = _warps_per_row(groups, items, shape, ctx) if shape.split else 1
    place = "BEFORE" if before else "AFTER" if after else ""
    kernel = _gemv_kernel(name, x.dtype != F32, shape, tokens, gated, shared, place)
    args.append(act)
    if norm := before or after:
        args.append(norm.argument())
        weights.append(norm.weight)
    grid = (ceil(groups, shape.warps * 32 // shape.lanes // shared), ceil(most, tokens))
    staged = x.dtype.row_nbytes(k) if shape.staged else 0
    return Launch(kernel, grid, (32 * shape.warps,), args, staged, prefetches=weights)


def _warps_per_row(groups: int, items: int, shape: Shape, ctx: KernelContext) -> int:
    """Number of warps that share the depth of a group of rows: enough to keep the GPU busy.

    Args:
        groups: groups of rows, one for each warp if none is shared.
        items: items of a row.
        shape: how a matrix is divided if no row is shared.
        ctx: the step.
    """
    wanted = shape.split * ctx.device.gpu.processors
    return next(
        (n for n in _WARPS_PER_ROW if groups * n >= wanted or items < 64 * shape.depth * n),
        _WARPS_PER_ROW[-1],
    )


def _launch(
    kernel: Function, jobs: Sequence[Job], rows: int, warps: int, y: int, args: list[Any]
) -> Launch:
    """A launch with ``rows`` rows of the matrices per warp and ``warps`` warps per block."""
    groups = sum(ceil(job.rows, rows) for job in jobs)
    return Launch(kernel, (ceil(groups, warps), y), (32 * WARPS,), args)


# ------------------------------------------------------------------------------------ registration


def few_tokens(
    x: Tensor | OperandRef, w: Tensor | OperandRef, integer: bool, deterministic: bool
) -> bool:
    """Whether x is multiplied as float32, or quantised if ``integer``, at this number of tokens.

    If ``deterministic``, the weight alone decides.
    """
    if w.dtype.name in ROW_FORMATS and integer:
        return True
    rows, depth = w.meta.bound().shape[-2:]
    assert isinstance(rows, int) and isinstance(depth, int)
    narrow = rows < small_batch_blocks.MIN_ROWS
    if deterministic and w.dtype.quantised:
        return narrow or not integer
    if deterministic:
        return w.dtype.name not in HALVES or depth % 8 > 0
    if w.dtype.quantised:
        narrow &= activation_of(w.dtype) is not None
        most = MAX_FLOAT_TOKENS if not integer else MAX_TOKENS if narrow else 1
    else:
        few_f32 = _NARROW_F32[1] if rows <= _NARROW_F32[0] else MAX_F32_TOKENS
        most = few_f32 if w.dtype == F32 else 1
    return KernelContext.upper_bound(x.meta.rows) <= most


def launches(
    ctx: KernelContext, jobs: Sequence[Job], workspace: int, before: SplitNorm | None = None
) -> list[Work]:
    """Work of several linears; those of one activation and format share launches.

    Args:
        ctx: the step.
        jobs: the linears.
        workspace: address of `workspace_nbytes` bytes.
        before: the norm that the linears of one token are multiplied with, see `gemv`.
    """
    groups: dict[tuple[int, str], list[Job]] = {}  # by activation and kernel
    for job in map(e4m3_copy.on_copy, jobs):
        if small_batch_blocks.fits(ctx, job):
            kind = f"blocks of {job.w.dtype.name}"
        elif linear_bytes.fits(ctx, job):
            kind = f"bytes of {job.w.dtype.name}"
        elif job.x.dtype.name in HALVES:
            kind = "small_batch" if small_batch.fits(ctx, job) else "gemm"
        else:
            few = job.x.dtype.quantised or few_tokens(job.x, job.w, False, ctx.deterministic)
            kind = job.w.dtype.name if few else "gemm"
            if linear_bytes.needs_upcast(ctx, job):
                kind = f"floats of {kind}"
        groups.setdefault((job.x.address, kind), []).append(job)
    work: list[Work] = []
    blocks: dict[int, list[list[Job]]] = {}  # by activation
    for (address, kind), own in groups.items():
        if kind == "gemm":
            work += gemms(ctx, own, workspace)
            continue
        if kind.startswith("floats of"):
            upcast, x = dequantise(ctx, own[0].x, workspace, F32)
            work.append(upcast)
            own = [replace(job, x=x) for job in own]
        for i in range(0, len(own), MAX_FUSED_LINEARS):
            some = own[i : i + MAX_FUSED_LINEARS]
            if kind == "small_batch":
                work.append(small_batch.small_batch(ctx, some))
            elif kind.startswith("blocks of"):
                blocks.setdefault(address, []).append(some)
            elif kind.startswith("bytes of"):
                work.append(linear_bytes.launch(ctx, some))
            else:
                work.append(gemv(ctx, some, before=before))
    for some_groups in blocks.values():
        work += small_batch_blocks.blocks(ctx, some_groups, workspace)
    return work


def can_fuse_gate(gate: Job, up: Job) -> bool:
    """Whether `gemv` can compute both linears of a gated unit in one kernel."""
    kind = gate.w.dtype
    if gate.x.dtype.name in HALVES:
        return False
    same = (gate.x.address, kind, gate.w.meta.shape) == (up.x.address, up.w.dtype, up.w.meta.shape)
    whole = kind.name in QUANTISED or (gate.depth % item_elements(kind) == 0)
    return same and whole and gate.x.address % 16 == 0


def dtype_mismatch(x: Tensor | None, w: Tensor | None, options: Options) -> str | None:
    """Why the weight does not match the activation as `_lower` leaves it; None if it does."""
    assert x is not None and w is not None
    if x.dtype == F8_ROW and e4m3_copy.has_copy(x, w, options):
        fits = True
    elif x.dtype.quantised:
        fits = w.dtype.name in QUANTISED and x.dtype == activation_of(w.dtype)
    elif x.dtype == F32:
        fits = few_tokens(x, w, False, options.deterministic) or w.dtype == F32
    else:
        fits = x.dtype == matmul_dtype(w.dtype)
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _when(node: Tensor, options: Options) -> str | None:
    x, w = node.src[:2]
    return None if x is not None and x.dtype == F32 else dtype_mismatch(x, w, options)


def lower_activation(x: Tensor, w: Tensor, few: bool, options: Options) -> Tensor:
    """The activation in the dtype that the kernels multiply.

    Few tokens (see `few_tokens`) are quantised for quantised weights, or made contiguous if float32
    rows are not aligned to 16 bytes. More get `matmul_dtype` of the weight.
    """
    if x.dtype != F32:
        return x
    if not few:
        return (
            x
            if matmul_dtype(w.dtype) == F32
            else ops.quantise_act(x, dtype=matmul_dtype(w.dtype).name)
        )
    if w.dtype.name not in QUANTISED:
        return x
    kind = activation_of(w.dtype)
    if options.linear != "float" and kind is not None:
        return ops.quantise_act(x, dtype=kind.name)
    apart = any(at % 16 for at in (x.meta.offset, *x.meta.strides[:-1]))
    return ops.contiguous(x) if apart else x


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    assert x is not None and w is not None
    if x.dtype == F32 and e4m3_copy.wants_e4m3(x, w, options):
        return (ops.quantise_act(x, dtype=F8_ROW.name), w, *rest)
    few = few_tokens(x, w, options.linear != "float", options.deterministic)
    return (lower_activation(x, w, few, options), w, *rest)


def pairs(node: Tensor) -> list[Pair]:
    """Activation and weight of each linear of a fused op."""
    return list(zip(node.src[::3], node.src[1::3]))


def first_pair(node: Tensor) -> list[Pair]:
    """Activation and weight of an op with one linear."""
    return [(node.src[0], node.src[1])]


def linear_kernels(
    op: str, pairs: Callable[[Tensor], list[Pair]], when: Check, **rules: Any
) -> Callable[[Builder], Builder]:
    """Register a builder for plain weights, and for block weights, which are packed; then again for
    weights that have a copy, see `e4m3_copy`.

    Args:
        op: the op.
        pairs: activation and weight of each linear.
        when: why no kernel can run a node; None if one can.
        **rules: other arguments of `Backend.kernel`.
    """
    dtypes = rules.pop("dtypes", {})

    def when_copied(node: Tensor, options: Options) -> str | None:
        missing = not all(e4m3_copy.has_copy(*pair, options) for pair in pairs(node))
        return "a weight has no copy in e4m3" if missing else when(node, options)

    def when_plain(node: Tensor, options: Options) -> str | None:
        copied = any(e4m3_copy.has_copy(*pair, options) for pair in pairs(node))
        return "a weight has a copy in e4m3" if copied else when(node, options)

    def register(build: Builder) -> Builder:
        for kind, formats, pack in (("plain", PLAIN, {}), ("blocks", QUANTISED, {"w": PACK})):
            own: dict[str, Any] = {"dtypes": {"w": formats, **dtypes}, "pack": pack}
            BACKEND.kernel(op, name=f"{op}_{kind}", when=when_plain, **own, **rules)(build)
            copied = [name for name in formats if name in e4m3_copy.COPIED]
            own = {"dtypes": {"w": copied, **dtypes}, "pack": {"w": e4m3_copy.PACK_WITH_COPY}}
            BACKEND.kernel(op, name=f"{op}_{kind}_e4m3", when=when_copied, **own, **rules)(build)
        return build

    return register


@linear_kernels(
    "linear", first_pair, _when, layout={"x": ROWS}, lower=_lower,
    scratch=lambda node, options: workspace_nbytes(*first_pair(node)),
)  # fmt: skip
def linear(ctx: KernelContext) -> list[Work]:
    return launches(ctx, [Job(ctx.x, ctx.w, ctx.op("bias"), ctx.out)], ctx.scratch)


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all. Of gemv_ring.cu a
    plan compiles its own ones."""
    integers = [name for name in QUANTISED if name in INTEGERS or linear_bytes.is_exact(name)]
    floats = [(name, False) for name in (*QUANTISED, *PLAIN)]
    for name, integer in [*((name, True) for name in integers), *floats]:
        for tokens in _token_counts(name, integer)[1:]:
            _gemv_kernel(name, integer, gemv_shapes.shape(name, integer, 0, False, tokens), tokens)
        for k, gated in product(gemv_shapes.DEPTHS, (False, True)):
            shape = gemv_shapes.shape(name, integer, k, gated)
            for shared in _WARPS_PER_ROW if shape.split else (1,):
                _gemv_kernel(name, integer, shape, gated=gated, shared=shared)
                if name in INTEGERS and integer and activation_of(dtype(name)) == A8_32:
                    _gemv_kernel(name, True, shape, gated=gated, shared=shared, norm="BEFORE")
            if name in INTEGERS and integer and not gated:
                _gemv_kernel(name, True, gemv_shapes.before_norm(name, k), norm="AFTER")
    for name in QUANTISED:
        dequantize_module(dtype(name))
    for name in PLAIN:
        _unaligned_kernel(name)
    gemv_ring.register()
    small_batch.register()
    small_batch_blocks.register()
    linear_bytes.register()
    e4m3_copy.register()


_all_instances()
