"""Mixtures of experts: each token passes the few MLPs that its router chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import ops
from ..graph.tensor import Tensor, scope
from .config import Moe
from .config_keys import Keys
from .nn import activation

if TYPE_CHECKING:
    from .decoder import Decoder


def moe_config(keys: Keys, hidden: int, experts: str = "num_experts", **facts: Any) -> Moe:
    """A mixture of experts of width ``hidden``, whose count is the key ``experts``; ``facts``: what
    else `Moe` states. ConfigError."""
    c = Moe(keys.positive(experts), keys.positive("num_experts_per_tok"), hidden, **facts)
    if c.experts % c.groups or c.kept > c.groups or c.best > c.experts // c.groups:
        raise keys.error(
            experts, f"= {c.experts} do not fall in {c.groups} groups of which {c.kept} count"
        )
    if c.active > c.experts // c.groups * c.kept:
        raise keys.error("num_experts_per_tok", f"= {c.active} are more than there are to choose")
    return c


def sparse_layers(keys: Keys) -> list[bool]:
    """Whether each layer has a mixture, as Qwen's keys say it: all by default."""
    dense, step = keys("mlp_only_layers", list, []), keys.positive("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(keys.layers())]


def moe_mlp(of: Decoder, x: Tensor) -> Tensor:
    """The mixture of the decoder's configuration under the current scope: [T, dim] -> [T, dim].

    Shazeer et al. 2017; shared experts: Dai et al. 2024 (DeepSeekMoE).
    """
    c, n = of.cfg.moe, of.cfg.names
    assert c is not None
    logits = of.linear(x, n.router, c.experts, c.bias)  # [T, E]
    with scope(n.router):
        ids, weights = route(of, logits, c)  # [T, k]
    with scope("experts"):
        chosen = _experts(of, x, ids, c)  # [T, k, dim]
        y = ops.combine(chosen, weights)
    if not c.shared:
        return y
    with scope(n.shared):
        every = of.feed_forward(x, c.shared)
    if c.shared_gate:
        gate = ops.sigmoid(of.linear(x, f"{n.shared}_gate", 1))  # [T, 1]
        every = ops.combine(every.reshape(every.shape[0], 1, of.cfg.dim), gate)
    return ops.add(y, every)


def route(of: Decoder, logits: Tensor, c: Moe) -> tuple[Tensor, Tensor]:
    """Which experts a token passes, and the weights of their results, both [T, k], from the
    router's ``logits`` [T, E]."""
    scores = logits
    if c.score != "chosen":
        scores = ops.softmax(logits) if c.score == "softmax" else ops.sigmoid(logits)
    correction = of.vector("e_score_correction_bias", c.experts) if c.correction else None
    ids = ops.top_k(
        scores, correction, k=c.active, groups=c.groups, top_groups=c.kept, top_per_group=c.best
    )
    weights = ops.pick(scores, ids)
    if c.score == "chosen":
        weights = ops.softmax(weights)
    elif c.normalise:
        weights = ops.sum_norm(weights, eps=1e-20)
    return ids, weights if c.scale == 1.0 else ops.scale(weights, factor=c.scale)


def _experts(of: Decoder, x: Tensor, ids: Tensor, c: Moe) -> Tensor:
    """x [T, dim] through the experts ``ids`` [T, k]: [T, k, dim]."""
    n, inner = of.cfg.names, (c.experts, c.hidden)
    gate, up = (of.experts(x, name, ids, inner, c.bias) for name in (n.gate, n.up))
    if c.limit:
        h = ops.clamped_glu(gate, up, alpha=c.alpha, limit=c.limit)
    else:
        h = ops.mul(activation(gate, of.cfg.mlp.act), up)
    return of.experts(h, n.down, ids, (c.experts, of.cfg.dim), c.bias)
