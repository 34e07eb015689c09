"""Mixture of experts (MoE): each token passes the few MLPs that its router selects."""

from __future__ import annotations

from typing import Any

from .. import ops
from ..graph.tensor import Tensor, scope
from .blocks import DecoderBlocks
from .config import Moe
from .config_keys import Keys
from .nn import activation


def moe_config(
    keys: Keys, intermediate_size: int, experts: str = "num_experts", **fields: Any
) -> Moe:
    """Read the configuration of a mixture of experts.

    Args:
        keys: Configuration.
        intermediate_size: Intermediate size of each expert.
        experts: Key of the number of experts.
        fields: Further fields of `Moe`.

    Raises:
        ConfigError: Groups do not fit the number of experts, or too few can be selected.
    """
    c = Moe(
        keys.positive(experts), keys.positive("num_experts_per_tok"), intermediate_size, **fields
    )
    if c.experts % c.groups or c.top_groups > c.groups or c.top_per_group > c.experts // c.groups:
        raise keys.error(
            experts, f"= {c.experts} cannot form {c.groups} groups with {c.top_groups} selected"
        )
    if c.experts_per_token > (most := c.experts // c.groups * c.top_groups):
        raise keys.error("num_experts_per_tok", f"= {c.experts_per_token} is above {most}")
    return c


def sparse_layers(keys: Keys) -> list[bool]:
    """Return which layers have a mixture of experts, by Qwen's keys; all by default."""
    dense, step = keys("mlp_only_layers", list, []), keys.positive("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(keys.layers())]


def moe_mlp(decoder: DecoderBlocks, x: Tensor) -> Tensor:
    """Mixture of experts of the decoder's configuration in the current scope.

    x [T, dim] -> [T, dim]. Shazeer et al. 2017; shared experts: Dai et al. 2024 (DeepSeekMoE).
    """
    c, n = decoder.cfg.moe, decoder.cfg.names
    assert c is not None
    logits = decoder.linear(x, n.router, c.experts, c.bias)  # [T, E]
    with scope(n.router):
        ids, weights = route(decoder, logits, c)  # [T, k]
    with scope("experts"):
        selected = _experts(decoder, x, ids, c)  # [T, k, dim]
        y = ops.combine(selected, weights)
    if not c.shared_intermediate_size:
        return y
    with scope(n.shared):
        shared = decoder.feed_forward(x, c.shared_intermediate_size)
    if c.shared_gate:
        gate = ops.sigmoid(decoder.linear(x, f"{n.shared}_gate", 1))  # [T, 1]
        shared = ops.combine(shared.reshape(shared.shape[0], 1, decoder.cfg.dim), gate)
    return ops.add(y, shared)


def route(decoder: DecoderBlocks, logits: Tensor, c: Moe) -> tuple[Tensor, Tensor]:
    """Select the experts of each token from the router's ``logits`` [T, E].

    Returns:
        Expert indices and the weights of their outputs, both [T, k].
    """
    scores = logits
    if c.score != "topk_softmax":
        scores = ops.softmax(logits) if c.score == "softmax" else ops.sigmoid(logits)
    correction = decoder.vector("e_score_correction_bias", c.experts) if c.correction else None
    ids = ops.top_k(
        scores, correction, k=c.experts_per_token, groups=c.groups, top_groups=c.top_groups,
        top_per_group=c.top_per_group,
    )  # fmt: skip
    weights = ops.pick(scores, ids)
    if c.score == "topk_softmax":
        weights = ops.softmax(weights)
    elif c.normalise:
        weights = ops.sum_norm(weights, eps=1e-20)
    return ids, weights if c.scale == 1.0 else ops.scale(weights, factor=c.scale)


def _experts(decoder: DecoderBlocks, x: Tensor, ids: Tensor, c: Moe) -> Tensor:
    """Apply the experts ``ids`` [T, k] to x [T, dim]: [T, k, dim]."""
    n, shape = decoder.cfg.names, (c.experts, c.intermediate_size)
    gate, up = (decoder.expert_linear(x, name, ids, shape, c.bias) for name in (n.gate, n.up))
    if c.swiglu_limit:
        h = ops.clamped_glu(gate, up, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
    else:
        h = ops.mul(activation(gate, decoder.cfg.mlp.act), up)
    return decoder.expert_linear(h, n.down, ids, (c.experts, decoder.cfg.dim), c.bias)
