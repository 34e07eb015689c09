"""The decoder that all models share.

A model file fills in a `DecoderConfig`, and overrides the methods in which its model differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from .. import ops
from ..errors import RequestError, UnusedTensors
from ..graph.dtype import dtype
from ..graph.tensor import Tensor, scope
from .batch import Batch, CacheSpec, Limits
from .blocks import DecoderBlocks
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
from .moe import moe_mlp

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


class Decoder(DecoderBlocks):
    """Decoder-only transformer that a `DecoderConfig` describes.

    `build` makes the graph of one step, without sampling. Its outputs are ``logits`` [N, vocab],
    and ``kv.*``, the updated KV pools, which are enough for a prefill chunk.

    Attributes:
        kind: "decoder", "encoder" or "encoder-decoder".
    """

    kind: ClassVar[str] = "decoder"

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """KV cache groups: layers with the same window."""
        groups: dict[int, list[int]] = {}
        for i, layer in enumerate(self.cfg.layers):
            groups.setdefault(layer.window, []).append(i)
        return tuple(
            CacheSpec(f"window{w}" if w else "full", tuple(layers), self.cache_entries(), w)
            for w, layers in groups.items()
        )

    def cache_entries(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each cache entry of one token in one layer."""
        a = self.cfg.attention
        shape = a.kv_heads, a.head_dim
        return {"k": shape} if a.mla else {"k": shape, "v": shape}

    def limits(self, wanted: Limits) -> Limits:
        """Return ``wanted`` reduced to the model's maximum context.

        A model with a bidirectional prefix must take a whole prompt in one step. Steps of a model
        with sliding windows stay short, since its pools have blocks for a step of each sequence.
        """
        limits = wanted.within(self.cfg.context)
        if self.cfg.attention.prefix_token_ids:
            return replace(limits, tokens=limits.context)
        if any(cache.window for cache in self.caches):
            return replace(limits, tokens=min(limits.tokens, Limits.tokens))
        return limits

    def bidirectional_prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the prompt's bidirectional prefix.

        Its tokens attend to each other, not only to earlier ones. It is 0 unless
        `config.Attention.prefix_token_ids` is set. RequestError for a malformed prompt.
        """
        return 0

    def max_source(self, limits: Limits) -> int:
        """Return the maximum number of tokens of a source; 0 unless it is an encoder-decoder."""
        return 0

    # -- the graph
    def build(self, batch: Batch) -> dict[str, Tensor]:
        """Build the graph of one step over ``batch`` and return its outputs by name.

        Raises:
            ModelFileError: A weight is missing, has another shape, or is not used.
            RequestError: The KV cache dtype does not fit the head size.
        """
        hidden = self._start(batch)
        logits = self.head(ops.gather_rows(hidden, batch.rows))
        self._check_used(set())
        outputs = {"logits": logits, "hidden": hidden}
        return {**outputs, **{f"kv.{name}": pool for name, pool in self.pools.items()}}

    def build_states(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, dim] after the final norm; the output head is left out.

        Raises:
            ModelFileError, RequestError: As for `build`.
        """
        hidden = self.final_norm(self._start(batch))
        self._check_used({f"{self.cfg.names.head}.weight"})
        return hidden

    def _start(self, batch: Batch) -> Tensor:
        self.check_cache(batch.limits)
        self._group = {i: c for c in self.caches for i in c.layers}
        self.pools: dict[str, Tensor] = {}
        return self.forward(batch)

    def _check_used(self, left_out: set[str]) -> None:
        """Raise UnusedTensors unless the graph uses all weights but those in ``left_out``."""
        optional = left_out.union(*(e.rope.factor_weights for e in self.cfg.layers if e.rope))
        unused = sorted(set(self.weights.names()) - self.used - optional)
        if unused:
            raise UnusedTensors(unused)

    def check_cache(self, limits: Limits) -> None:
        """Raise RequestError if the KV cache dtype does not fit the head size."""
        kind, mla = dtype(limits.kv_dtype), self.cfg.attention.mla
        widths = {s[-1] for group in self.caches for s in group.entries.values()}
        if mla and kind.tail:
            raise RequestError(
                f"kv_type = {kind.name!r} is not supported for latent attention: its values are "
                "columns of the keys, without a scale of their own",
                "kv_type",
            )
        if mla:
            widths.add(mla.rank)  # the columns that are values as well
        for width in sorted(widths):
            if width % kind.block:
                raise RequestError(
                    f"kv_type = {kind.name!r} has blocks of {kind.block} elements, but the head "
                    f"size is {width}",
                    "kv_type",
                )

    # -- methods that a model file may override
    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, dim] of all tokens, before the final norm."""
        with scope(self.cfg.names.model):
            x = self.embed(batch)
            for i in range(len(self.cfg.layers)):
                with scope(f"{self.cfg.names.layers}.{i}"):
                    x = self.layer(x, i, batch)
        return x

    def embed(self, batch: Batch) -> Tensor:
        """Return the input of the first layer [T, dim]."""
        x = self.add_positions(self.token_embedding(batch.ids), batch.pos)
        return self.norm(x, self.cfg.names.embed_norm)

    def layer(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Apply layer ``i``: x [T, dim] -> [T, dim]."""
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
            from .mla import mla_attention  # few families need it

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

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the MLP: x [T, dim] -> [T, dim]."""
        return self.feed_forward(x, self.cfg.mlp.intermediate_size)

    def moe(self, x: Tensor) -> Tensor:
        """Apply the mixture of experts: x [T, dim] -> [T, dim]."""
        return moe_mlp(self, x)

    def final_norm(self, x: Tensor) -> Tensor:
        """Apply the final norm: x [N, dim] -> [N, dim]."""
        with scope(self.cfg.names.model):
            return self.norm(x, self.cfg.names.norm)

    def head(self, x: Tensor) -> Tensor:
        """Apply the final norm and the output head: x [N, dim] -> logits [N, vocab]."""
        c, n = self.cfg, self.cfg.names
        x = self.final_norm(x)
        with scope(n.model):
            if c.tied:
                with scope(n.embed):
                    w = self.weight("weight", c.vocab, c.dim)
        with scope(n.head):
            if not c.tied:
                x, w = self.reordered(x), self.weight("weight", c.vocab, c.dim)
            logits = ops.linear(x, w)
            if c.logit_scale != 1.0:
                logits = ops.scale(logits, factor=c.logit_scale)
            return ops.softcap(logits, cap=c.logit_softcap) if c.logit_softcap else logits


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else ops.scale(x, factor=factor)
