"""The one shared decoder. A model file fills in `DecoderConfig`, and overrides what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from .. import ops
from ..errors import RequestError, UnusedTensors
from ..graph.dtype import dtype
from ..graph.tensor import Tensor, scope, state
from ..weights import Weights
from .batch import Batch, CacheSpec, Limits
from .config import (
    SANDWICH_NORMS,
    Attention,
    DecoderConfig,
    Layer,
    Mla,
    Mlp,
    ModuleNames,
    Moe,
    Norm,
    Rope,
)
from .mla import mla_attention
from .moe import moe_mlp
from .nn import Module, activation

__all__ = [
    "SANDWICH_NORMS",
    "Attention",
    "Batch",
    "CacheSpec",
    "Decoder",
    "DecoderConfig",
    "Layer",
    "Limits",
    "Mla",
    "Mlp",
    "ModuleNames",
    "Moe",
    "Norm",
    "Rope",
]


class Decoder(Module):
    """A decoder whose parts `DecoderConfig` describes: norms, attention in groups of heads, an MLP
    or a mixture of experts.

    `build` makes the graph: its outputs are ``logits`` [N, vocab], ``ids`` [T] (sampled and written
    into the step's state, so that the next step can run at once), ``ids.penalised`` (the same, by
    way of `ops.penalise`), and ``kv.*`` (the written pools, for a step that wants nothing else).
    """

    def __init__(self, cfg: DecoderConfig, weights: Weights) -> None:
        super().__init__(weights)
        self.cfg = cfg

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """The layers grouped by window."""
        groups: dict[int, list[int]] = {}
        for i, layer in enumerate(self.cfg.layers):
            groups.setdefault(layer.window, []).append(i)
        return tuple(
            CacheSpec(f"window{w}" if w else "full", tuple(layers), self.cache_entries(), w)
            for w, layers in groups.items()
        )

    def cache_entries(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what a layer caches of each token."""
        a = self.cfg.attention
        shape = a.kv_heads, a.head_dim
        return {"k": shape} if a.mla else {"k": shape, "v": shape}

    def limits(self, wanted: Limits) -> Limits:
        """``wanted``, within what the model was made for; a step takes a whole prompt where
        `bidirectional_prefix` may need it."""
        limits = wanted.within(self.cfg.context)
        return (
            replace(limits, tokens=limits.context)
            if self.cfg.attention.prefix_token_ids
            else limits
        )

    def bidirectional_prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the prompt's bidirectional prefix.

        Its tokens attend to each other, not only to earlier ones. It is 0 unless
        `config.Attention.prefix_token_ids` is set. RequestError for a malformed prompt.
        """
        return 0

    # -- the graph
    def build(self, limits: Limits) -> dict[str, Tensor]:
        """The outputs of one step, by name. ModelFileError names a missing or unused weight,
        RequestError a cache dtype that the entries do not fit."""
        self._check_cache(limits)
        batch = Batch(self.caches, limits)
        self._group = {i: c for c in self.caches for i in c.layers}
        self.pools: dict[str, Tensor] = {}
        hidden = self.forward(batch)
        logits = self.head(ops.gather_rows(hidden, batch.rows))
        spare = set().union(*(e.rope.factor_weights for e in self.cfg.layers if e.rope))
        unused = sorted(set(self.weights.names()) - self.used - spare)
        if unused:
            raise UnusedTensors(unused)
        penalised = ops.penalise(
            logits, batch.history, batch.count, batch.stop, batch.repeat, batch.presence,
            batch.frequency, batch.min_tokens,
        )  # fmt: skip
        pools = {f"kv.{name}": pool for name, pool in self.pools.items()}
        return {
            "logits": logits,
            "ids": self._next(logits, batch),
            "ids.penalised": self._next(penalised, batch),
            **pools,
        }

    def _check_cache(self, limits: Limits) -> None:
        kind, mla = dtype(limits.kv_dtype), self.cfg.attention.mla
        widths = {s[-1] for group in self.caches for s in group.entries.values()}
        if mla:
            widths.add(mla.rank)  # the columns that are values, too
        for width in sorted(widths):
            if width % kind.block:
                raise RequestError(
                    f"kv_type = {kind.name!r} keeps blocks of {kind.block}, and a head size of "
                    f"{width} is no multiple of that",
                    "kv_type",
                )

    def _next(self, logits: Tensor, batch: Batch) -> Tensor:
        """The ids drawn from ``logits``, as the next step's tokens."""
        ids = ops.sample(
            logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed,
            batch.count,
        )  # fmt: skip
        groups = [t for c in self.caches for t in (batch.slot[c.name], batch.table[c.name])]
        return ops.advance(
            ids, batch.stop, batch.ids, batch.pos, batch.kv_len, batch.count, batch.done,
            batch.history, *groups, block=batch.limits.block,
        )  # fmt: skip

    # -- what a model file may override
    def forward(self, batch: Batch) -> Tensor:
        """The hidden states [T, dim] of all tokens, before the final norm."""
        with scope(self.cfg.names.model):
            x = self.embed(batch)
            for i in range(len(self.cfg.layers)):
                with scope(f"{self.cfg.names.layers}.{i}"):
                    x = self.layer(x, i, batch)
        return x

    def embed(self, batch: Batch) -> Tensor:
        """What the first layer reads: [T, dim]."""
        c, n = self.cfg, self.cfg.names
        x = self.embedding(batch.ids, n.embed, c.vocab, c.dim)
        if c.embed_scale != 1.0:
            x = ops.scale(x, factor=c.embed_scale)
        if c.positions == "learned":
            rows = c.context + c.position_offset
            x = ops.add(x, self.embedding(batch.pos, n.positions, rows, c.dim))
        elif c.positions == "sinusoidal":
            x = ops.add(x, ops.sinusoids(batch.pos, width=c.dim, offset=c.position_offset))
        return self.norm(x, n.embed_norm) if n.embed_norm else x

    def layer(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """One block: x [T, dim] -> [T, dim]."""
        c, n = self.cfg, self.cfg.names
        before = self.norm(x, n.pre_attn_norm)
        with scope(n.attn):
            a = self.attn(before, i, batch)
        a = _scaled(self.norm(a, n.post_attn_norm), c.residual_scale)
        if c.post_layernorm_residual:
            x = _scaled(before, c.post_layernorm_residual)
        if not c.parallel:
            before = x = ops.add(x, a)
        h = self.norm(x, n.pre_mlp_norm) if n.pre_mlp_norm else before
        with scope(n.mlp):
            m = self.moe(h) if c.layers[i].moe else self.mlp(h)
        m = _scaled(self.norm(m, n.post_mlp_norm), c.residual_scale)
        if c.post_layernorm_residual:
            x = _scaled(h, c.post_layernorm_residual)
        return ops.add(ops.add(x, a), m) if c.parallel else ops.add(x, m)

    def attn(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Attention of layer ``i``: x [T, dim] -> [T, dim]."""
        c, n = self.cfg.attention, self.cfg.names
        if c.mla:
            return mla_attention(self, x, i, batch)
        q, k, v = self.qkv(x)
        if c.qk_norm == "row":
            q = self.norm(q.flatten(), n.q_norm).heads(c.heads)
            k = self.norm(k.flatten(), n.k_norm).heads(c.kv_heads)
        if c.qk_norm == "head":
            q, k = self.norm(q, n.q_norm), self.norm(k, n.k_norm)
        q, k = self.rope(q, i, batch), self.rope(k, i, batch)
        h = self.attend(q, k, v, i, batch)
        return self.linear(h, n.out, self.cfg.dim, c.out_bias)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, Hkv, D] of x [T, dim]."""
        c, n, d = self.cfg.attention, self.cfg.names, self.cfg.attention.head_dim
        counts = (c.heads, c.kv_heads, c.kv_heads)
        if c.fused == "heads":
            y = self.linear(x, n.qkv, sum(counts) * d, c.bias).heads(c.kv_heads)
            q, k, v = _columns(y, (c.heads // c.kv_heads * d, d, d))
            return q.reshape(q.shape[0], c.heads, d), k, v
        if c.fused:
            y = self.linear(x, n.qkv, sum(counts) * d, c.bias)
            parts = _columns(y, tuple(count * d for count in counts))
        else:
            each = zip((n.q, n.k, n.v), counts, strict=True)
            parts = [self.linear(x, name, count * d, c.bias) for name, count in each]
        q, k, v = (part.heads(count) for part, count in zip(parts, counts, strict=True))
        return q, k, v

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP: x [T, dim] -> [T, dim]."""
        return self.feed_forward(x, self.cfg.mlp.hidden)

    def feed_forward(self, x: Tensor, hidden: int) -> Tensor:
        """An MLP of this width, as `config.Mlp` has it otherwise: x [T, dim] -> [T, dim]."""
        c, n = self.cfg.mlp, self.cfg.names
        if c.fused:
            gate, up = _columns(self.linear(x, n.gate_up, 2 * hidden, c.bias), (hidden, hidden))
            h = ops.mul(activation(gate, c.act), up)
        elif c.gated:
            gate = activation(self.linear(x, n.gate, hidden, c.bias), c.act)
            h = ops.mul(gate, self.linear(x, n.up, hidden, c.bias))
        else:
            h = activation(self.linear(x, n.up, hidden, c.bias), c.act)
        return self.linear(h, n.down, self.cfg.dim, c.bias)

    def moe(self, x: Tensor) -> Tensor:
        """The mixture of experts: x [T, dim] -> [T, dim]."""
        return moe_mlp(self, x)

    def head(self, x: Tensor) -> Tensor:
        """Final norm and logits: x [N, dim] -> [N, vocab]."""
        c, n = self.cfg, self.cfg.names
        with scope(n.model):
            x = self.norm(x, n.norm)
            if c.tied:
                with scope(n.embed):
                    w = self.weight("weight", c.vocab, c.dim)
        with scope(n.head):
            logits = ops.linear(x, w if c.tied else self.weight("weight", c.vocab, c.dim))
            if c.logit_scale != 1.0:
                logits = ops.scale(logits, factor=c.logit_scale)
            return ops.softcap(logits, cap=c.logit_softcap) if c.logit_softcap else logits

    # -- pieces for model files
    def norm(self, x: Tensor, name: str) -> Tensor:
        """The norm ``name`` over the last axis; x as it is if the name is empty."""
        c = self.cfg.norm
        if not name:
            return x
        if c.kind == "rms":
            return self.rms_norm(x, name, c.eps)
        return self.layer_norm(x, name, c.eps, c.bias)

    def rope(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Rotary positions of layer ``i``, if it has them, on x [T, H, D]."""
        rope = self.cfg.layers[i].rope
        if rope is None:
            return x
        return self.rotate(x, batch.pos, rope.for_context(batch.limits.context))

    def rotate(self, x: Tensor, pos: Tensor, rope: Rope) -> Tensor:
        """x [T, H, D] turned by the positions ``pos`` [T]."""
        factors = None
        if isinstance(rope.factors, str):
            pairs = (rope.dims or x.shape[-1]) // 2  # type: ignore[operator]
            factors = self.vector(rope.factors, pairs, root=True)
        elif rope.factors:
            values = np.asarray(rope.factors, np.float32)
            factors = self.constant(f"rope.factors.{crc32(values.tobytes()):08x}", values)
        return ops.rope(
            x, pos, factors, base=rope.base, dims=rope.dims, style=rope.style, scale=rope.scale,
            attention_factor=rope.attention_factor,
        )  # fmt: skip

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, i: int, batch: Batch, scale: float = 0.0
    ) -> Tensor:
        """Cache k and v [T, Hkv, D] of layer ``i``, and attend with q [T, H, D]: [T, H * D]."""
        k, v = self.cache(i, "k", k, batch), self.cache(i, "v", v, batch)
        return self.attention(q, k, v, i, batch, scale)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, i: int, batch: Batch, scale: float = 0.0
    ) -> Tensor:
        """Attend with q [T, H, D] over the pools of layer ``i``: [T, H * Dv]."""
        c, group = self.cfg.attention, self._group[i]
        scale = scale or self.cfg.layers[i].scale or c.scale or c.head_dim**-0.5
        sinks = self.vector("sinks", c.heads) if c.sinks else None
        slopes = self.constant("alibi.slopes", c.slopes) if c.slopes else None
        prefix = batch.prefix_len if c.prefix_token_ids else None
        out = ops.attention(
            q, k, v, batch.q_start, batch.kv_len, batch.table[group.name], sinks, slopes, prefix,
            scale=scale, block=batch.limits.block, window=group.window, softcap=c.softcap,
        )  # fmt: skip
        return out.flatten()

    def cache(self, i: int, entry: str, x: Tensor, batch: Batch) -> Tensor:
        """Layer ``i``'s pool [slots, H, D] with x [T, H, D] written to it."""
        group, limits = self._group[i], batch.limits
        slots = limits.sequences * limits.kept(group.window) * limits.block
        name = f"{group.name}.{i}.{entry}"
        pool = state(name, (slots, *group.entries[entry]), limits.kv_dtype)
        self.pools[name] = ops.kv_write(pool, x, batch.slot[group.name])
        return self.pools[name]


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor=factor)


def _columns(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    """The last axis cut into pieces of these widths."""
    axis, at, pieces = x.meta.ndim - 1, 0, []
    for width in widths:
        pieces.append(x.slice(axis, at, at + width))
        at += width
    return pieces
