"""Attention of few tokens of one sequence that rotates their heads and writes their keys itself.

So such a step has one launch less, see attention_rotation.cuh. Pools are f16: other keys have to be
read back with the bits that were written.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.fused_op import decompose
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.work import Launch
from .attention import NewTokens, float_launches, quantised_launches, quantised_nbytes
from .attention_shapes import (
    FEW_TOKENS,
    fits_tensor_cores,
    max_sequences,
    max_tokens,
    on_tensor_cores,
    partials_nbytes,
)
from .kv_cache import (
    different_heads,
    heads_argument,
    pool_argument,
    rope_write,
    rotates_whole_heads,
)
from .rope import rotation

_TOKENS = ArgumentStruct("new_tokens.cuh", "NewTokens")
# Queries of up to so many elements gain nothing by an early start of the output projection.
_FEW_ELEMENTS = 1024


def _attention(node: Tensor) -> Tensor:
    """The attention in the decomposition of a node."""
    return next(part for part in decompose(node).nodes if part.op == "attention")


def _when(node: Tensor, options: Options) -> str | None:
    part = _attention(node)
    if max_tokens(part) > FEW_TOKENS or max_sequences(part) != 1:
        return "steps of many tokens or several sequences"
    if not fits_tensor_cores(part) or not rotates_whole_heads(node):
        return "heads that are not computed on tensor cores, or not rotated as a whole"
    if not node.attrs["causal"] or node.attrs["skip_prefix"]:
        return "tokens that do not see their own keys"
    return different_heads(node, options)


def _rotated_nbytes(node: Tensor) -> int:
    """Bytes of rotated queries, which only GPUs without tensor cores for f16 have in memory."""
    return aligned(Meta.of(node.sources[0].shape, F32).bound().nbytes)


def _new_tokens(ctx: KernelContext, most: int) -> NewTokens:
    slot, (heads, width) = ctx.slot, ctx.q.meta.inner
    argument = _TOKENS.pack(
        q=heads_argument(ctx.q, ctx.address("q_norm")),
        k=heads_argument(ctx.k, ctx.address("k_norm")), v=heads_argument(ctx.v, 0),
        k_pool=pool_argument(ctx.k_pool, slot), v_pool=pool_argument(ctx.v_pool, slot),
        rotation=rotation(ctx, width), eps=ctx.attrs["eps"],
        position_ready=ctx.readable_before_wait("slot", "pos"),
        few_heads=heads * width <= _FEW_ELEMENTS,
    )  # fmt: skip
    early = [ref for ref in map(ctx.op, ("factors", "q_norm", "k_norm")) if ref is not None]
    return NewTokens(argument, most, early)


def _launches(ctx: KernelContext, quantised: bool) -> list[Launch]:
    """The launches of both parts of the op, which are one if the GPU has tensor cores for f16."""
    node, room = ctx.node, ctx.scratch + _rotated_nbytes(ctx.node)
    rope, attended = copy(ctx), ctx.with_operand("k", ctx.k_pool).with_operand("v", ctx.v_pool)
    rope.attrs = {**ctx.attrs, "scale": ctx.attrs["rope_scale"]}
    attended.node = _attention(node)
    new, before = None, []
    if on_tensor_cores(attended):
        new = _new_tokens(rope, 1 if max_tokens(attended.node) == 1 else FEW_TOKENS)
    else:
        rope.out = OperandRef(ctx.scratch, Meta.of(ctx.q.meta.shape, F32), ctx.q.operand)
        attended = attended.with_operand("q", rope.out)
        before = [rope_write(rope)]
    if quantised:
        return [*before, *quantised_launches(attended, room, new)]
    return [*before, *float_launches(attended, ctx.out.address, room, new)]


_RULES: dict[str, Any] = {
    "layout": dict.fromkeys(("q", "k", "v"), ROWS),
    "dtypes": {"k_pool": "f16", "v_pool": "f16"},
    "when": _when,
}


@BACKEND.kernel(
    "rope_attention", **_RULES,
    scratch=lambda node, options: (
        _rotated_nbytes(node) + partials_nbytes(_attention(node))
    ),
)  # fmt: skip
def rope_attention(ctx: KernelContext) -> list[Launch]:
    return _launches(ctx, quantised=False)


@BACKEND.kernel(
    "rope_attention_quantise", **_RULES,
    scratch=lambda node, options: (
        _rotated_nbytes(node) + quantised_nbytes(_attention(node))
    ),
)  # fmt: skip
def rope_attention_quantise(ctx: KernelContext) -> list[Launch]:
    return _launches(ctx, quantised=True)
