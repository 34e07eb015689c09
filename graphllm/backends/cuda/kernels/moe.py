"""The mixture of experts of one token, whose products choose the experts (expert_choice.cuh)."""

from __future__ import annotations

from itertools import product

from ....backends.alignment import aligned
from ....formats import activation_of
from ....formats.activations import A8_32
from ....graph.dtype import F32, I32, dtype
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.work import Launch, ceil
from .elementwise import ACTIVATIONS
from .experts import (
    MOST_SUMMED,
    Gate,
    dtype_mismatch,
    experts_argument,
    gemv_module,
    quantises_itself,
    summed_gemv,
    tile,
)
from .fused_experts import CLAMPED
from .linear import WARPS
from .quantize import quantise
from .routing import SCORES
from .weight_packing import INTEGERS, PACK

_CHOICES = (1, 4, 8)  # CHOICE of experts_gemv.cu: experts of a lane


def _when(node: Tensor, options: Options) -> str | None:
    x, w, up, down, logits = node.sources[:5]
    correction, a = node.src[-1], node.attrs
    if KernelContext.upper_bound(x.meta.rows) > 1 or options.deterministic:
        return "several tokens, or results that must not depend on their number"
    if a["groups"] > 1 or a["k"] > MOST_SUMMED or int(w.shape[0]) > 32 * _CHOICES[-1]:  # type: ignore[arg-type]
        return f"{a['k']} experts of {w.shape[0]} in {a['groups']} groups"
    if logits.shape[-1] != w.shape[0] or (correction is not None and a["score"] != "sigmoid"):
        return "logits or corrections for other experts or scores"
    if w.meta != up.meta or any(m.dtype.name not in INTEGERS for m in (w, up, down)):
        return "weights of two kinds, or not multiplied by int8"
    if not x.dtype.quantised or x.meta.offset % 16:
        return "x is not quantised, or not aligned to 16 bytes"
    row = _row(node)
    alone = not a["dtypes"] and quantises_itself(row, down.meta, options)
    int8 = a["dtypes"] == (A8_32.name,) and activation_of(down.dtype) == A8_32
    if not alone and (not int8 or A8_32.row_nbytes(row.inner[-1]) % 16):
        return f"gated units of {row.inner[-1]} elements as {a['dtypes']} before {down.dtype}"
    return dtype_mismatch(node, options)


def _row(node: Tensor) -> Meta:
    """Meta of the gated units of a token's pairs."""
    x, w = node.sources[:2]
    return Meta.of((x.meta.rows, node.attrs["k"], w.meta.shape[1]), F32)


def _workspace(node: Tensor) -> list[Meta]:
    """What the workspace holds: gated units, ids and weights of the experts, and the gated units as
    they are quantised, if they are.

    Each is aligned to 64 bytes, so that ids, which are read speculatively, share no sector of the
    L1 cache with what is read after the wait.
    """
    row, choice = _row(node), (1, node.attrs["k"])
    quantised = (Meta.of(row.shape, dtype(name)) for name in node.attrs["dtypes"])
    return [row, Meta.of(choice, I32), Meta.of(choice, F32), *quantised]


def _scratch(node: Tensor, options: Options) -> int:
    return sum(aligned(meta.bound().nbytes) for meta in _workspace(node))


def _gated(ctx: KernelContext, row: OperandRef, ids: OperandRef, weights: OperandRef) -> Launch:
    """The gated units, whose kernel stores the ids and weights of the chosen experts, too."""
    a, each, name = ctx.attrs, ctx.attrs["k"], ctx.w.dtype.name
    clamped = a["act"] == "clamped"
    act = CLAMPED if clamped else ACTIVATIONS[a["act"], a["kind"]]
    unit = Gate(ctx.w2, ctx.op("bias2"), F32, act, float(a["alpha"]), float(a["limit"]))
    arg = experts_argument(
        ctx, None, ctx.op("bias"), row.address, unit, each=each, logits=ctx.logits.address,
        correction=address(ctx.op("correction")), chosen=ids.address,
        chosen_weights=weights.address, score=SCORES[a["score"]],
        normalised=a["eps"] is not None, eps=float(a["eps"] or 0), factor=float(a["factor"]),
    )  # fmt: skip
    experts, n, _ = ctx.w.meta.shape
    rows, *_ = tile(name, True, True)
    choice = next(c for c in _CHOICES if experts <= 32 * c)
    known = [ref for ref in (ctx.w, ctx.w2, ctx.op("correction")) if ref is not None]
    return Launch(
        gemv_module(name, True, gated=True, choice=choice)["aligned"],
        (each, ceil(n, WARPS * rows) + 1), (32 * WARPS,), (arg,), triggers_after_wait=True,
        prefetches=known,
    )  # fmt: skip


@BACKEND.kernel(
    "moe_add", layout={"x": ROWS, "logits": ROWS, "r": ROWS}, when=_when, scratch=_scratch,
    dtypes={"w": INTEGERS, **dict.fromkeys(
        ("logits", "r", "bias", "bias2", "bias3", "correction"), "f32")},
    pack={"w": PACK, "w2": PACK, "w3": PACK},
)  # fmt: skip
def moe_add(ctx: KernelContext) -> list[Launch]:
    """Gated units, whose result is quantised by a launch of its own if rows are long, and the
    products after them with their weighted sum."""
    refs, at = list[OperandRef](), ctx.scratch
    for meta in _workspace(ctx.node):
        refs.append(OperandRef(at, meta, ctx.out.operand))
        at += aligned(meta.bound().nbytes)
    row, ids, weights, *quantised = refs
    stride = int(row.meta.strides[0])
    x = (quantised or [row])[0]
    after = ctx.with_operand("x", x).with_operand("w", ctx.w3)
    each = ctx.attrs["k"]
    return [_gated(ctx, row, ids, weights),
            *(quantise(ctx, row.address, stride, form) for form in quantised),
            summed_gemv(after, ids, weights, ctx.op("bias3"), each, True)]  # fmt: skip


for _name, _choice in product(INTEGERS, _CHOICES):  # so that tests compile them
    gemv_module(_name, True, gated=True, choice=_choice)
