"""Building blocks of the layers of encoders and decoders, which read the model's configuration."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from .. import ops
from ..graph.tensor import Tensor, state
from ..weights import Weights
from .batch import Batch, CacheSpec
from .config import DecoderConfig, EncoderConfig, Rope
from .nn import Module, activation


class Blocks(Module):
    """Norms, position embeddings, inputs of attention, and MLPs.

    Attributes:
        cfg: the model's configuration, a `DecoderConfig` or an `EncoderConfig`.
    """

    def __init__(self, cfg: DecoderConfig | EncoderConfig, weights: Weights) -> None:
        super().__init__(weights)
        self.cfg: DecoderConfig | EncoderConfig = cfg

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the norm ``name`` over the last axis; return x if the name is empty."""
        c = self.cfg.norm
        if not name:
            return x
        if c.kind == "rms":
            return self.rms_norm(x, name, c.eps)
        return self.layer_norm(x, name, c.eps, c.bias)

    def token_embedding(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings [T, dim] of token ids [T]."""
        c = self.cfg
        x = self.embedding(ids, c.names.embed, c.vocab, c.dim)
        return x if c.embed_scale == 1.0 else ops.scale(x, factor=c.embed_scale)

    def add_positions(self, x: Tensor, pos: Tensor) -> Tensor:
        """Add the embeddings of positions ``pos`` [T], if the model has them, to x [T, dim]."""
        c = self.cfg
        if c.positions == "learned":
            rows = c.context + c.position_offset
            return ops.add(x, self.embedding(pos, c.names.positions, rows, c.dim))
        if c.positions == "sinusoidal":
            return ops.add(x, ops.sinusoids(pos, width=c.dim, offset=c.position_offset))
        return x

    def position_bias(self) -> Tensor | None:
        """Return the biases of relative positions [H, 2 R + 1], which all layers share; or None."""
        c = self.cfg.attention
        if not c.bias_reach:
            return None
        return self.vector(c.bias_name, c.heads, 2 * c.bias_reach + 1, root=True)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, Hkv, D] of x [T, dim]."""
        c, n, d = self.cfg.attention, self.cfg.names, self.cfg.attention.head_dim
        counts = (c.heads, c.kv_heads, c.kv_heads)
        if c.fused == "heads":
            y = self.linear(x, n.qkv, sum(counts) * d, c.bias).heads(c.kv_heads)
            q, k, v = split_columns(y, (c.heads // c.kv_heads * d, d, d))
            return q.reshape(q.shape[0], c.heads, d), k, v
        if c.fused:
            y = self.linear(x, n.qkv, sum(counts) * d, c.bias)
            parts = split_columns(y, tuple(count * d for count in counts))
        else:
            each = zip((n.q, n.k, n.v), counts, strict=True)
            parts = [self.linear(x, name, count * d, c.bias) for name, count in each]
        q, k, v = (part.heads(count) for part, count in zip(parts, counts, strict=True))
        return q, k, v

    def rotate(self, x: Tensor, pos: Tensor, rope: Rope) -> Tensor:
        """Rotate x [T, H, D] by the positions ``pos`` [T]."""
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

    def feed_forward(self, x: Tensor, intermediate_size: int) -> Tensor:
        """Apply an MLP of `config.Mlp`'s kind with another width: x [T, dim] -> [T, dim]."""
        c, n, hidden = self.cfg.mlp, self.cfg.names, intermediate_size
        if c.fused:
            gate, up = split_columns(
                self.linear(x, n.gate_up, 2 * hidden, c.bias), (hidden, hidden)
            )
            h = ops.mul(activation(gate, c.act), up)
        elif c.gated:
            gate = activation(self.linear(x, n.gate, hidden, c.bias), c.act)
            h = ops.mul(gate, self.linear(x, n.up, hidden, c.bias))
        else:
            h = activation(self.linear(x, n.up, hidden, c.bias), c.act)
        return self.linear(h, n.down, self.cfg.dim, c.bias)


class DecoderBlocks(Blocks):
    """Rotary positions and attention over the KV cache.

    Attributes:
        cfg: the model's configuration.
        pools: updated KV pools of the graph being built, by name.
    """

    def __init__(self, cfg: DecoderConfig, weights: Weights) -> None:
        super().__init__(cfg, weights)
        self.cfg: DecoderConfig = cfg
        self.pools: dict[str, Tensor] = {}
        self._group: dict[int, CacheSpec] = {}  # of each layer

    def rope(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Apply the rotary positions of layer ``i``, if it has any, to x [T, H, D]."""
        rope = self.cfg.layers[i].rope
        if rope is None:
            return x
        return self.rotate(x, batch.pos, rope.for_context(batch.limits.context))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, i: int, batch: Batch, scale: float = 0.0
    ) -> Tensor:
        """Cache k and v [T, Hkv, D] of layer ``i`` and attend with q [T, H, D]: [T, H * D].

        ``scale``: factor on the scores; 0 uses the configuration's.
        """
        k, v = self.cache(i, "k", k, batch), self.cache(i, "v", v, batch)
        return self.attention(q, k, v, i, batch, scale)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, i: int, batch: Batch, scale: float = 0.0
    ) -> Tensor:
        """Attend with q [T, H, D] to the KV pools ``k`` and ``v`` of layer ``i``: [T, H * Dv]."""
        c, group = self.cfg.attention, self._group[i]
        scale = scale or self.cfg.layers[i].scale or c.scale or c.head_dim**-0.5
        sinks = self.vector("sinks", c.heads) if c.sinks else None
        slopes = self.constant("alibi.slopes", c.slopes) if c.slopes else None
        prefix = batch.prefix_len if c.prefix_token_ids or c.skip_prefix else None
        out = ops.attention(
            q, k, v, batch.q_start, batch.kv_len, batch.table[group.name], sinks, slopes, prefix,
            self.position_bias(), scale=scale, block=batch.limits.block, window=group.window,
            softcap=c.softcap, skip_prefix=c.skip_prefix,
        )  # fmt: skip
        return out.flatten()

    def cache(self, i: int, entry: str, x: Tensor, batch: Batch) -> Tensor:
        """Write x [T, H, D] to layer ``i``'s KV pool [slots, H, D] and return the pool."""
        name = f"{self._group[i].name}.{i}.{entry}"
        self.pools[name] = self.write(i, entry, x, batch)
        return self.pools[name]

    def write(self, i: int, entry: str, x: Tensor, batch: Batch) -> Tensor:
        """Return layer ``i``'s KV pool [slots, H, D] with x [T, H, D] written to it."""
        group, limits = self._group[i], batch.limits
        slots = limits.pool_blocks(group.window) * limits.block
        shape = (slots, *group.entries[entry])
        pool = state(f"{group.name}.{i}.{entry}", shape, limits.kv_dtype)
        return ops.kv_write(pool, x, batch.slot[group.name])


def split_columns(x: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    """Split the last axis into parts of these widths."""
    axis, at, parts = x.meta.ndim - 1, 0, []
    for width in widths:
        parts.append(x.slice(axis, at, at + width))
        at += width
    return parts
