"""The encoder-decoder that all models with cross-attention share.

A request is one sequence: the tokens of the source, then those of the target. The source is the
prefix of the sequence and is computed at once, by `EncoderDecoder.encode`; its rows of the KV cache
hold the keys and values of cross-attention. The rows behind hold those of self-attention, as in a
decoder. So beams, samples and later requests share a source like any other prefix. Tokens of a
source are marked, see `batch.source_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .. import ops
from ..errors import RequestError
from ..graph.tensor import Tensor, scope
from ..weights import Weights
from .batch import ENCODED, Batch, Limits, source_length
from .config import (
    Attention,
    EncoderConfig,
    EncoderDecoderConfig,
    Layer,
    Mlp,
    ModuleNames,
    Norm,
)
from .decoder import Decoder
from .encoder import Encoder

__all__ = [
    "Attention", "EncoderConfig", "EncoderDecoder", "EncoderDecoderConfig", "Layer", "Mlp",
    "ModuleNames", "Norm",
]  # fmt: skip


class EncoderDecoder(Decoder):
    """Transformer with an encoder for sources and a decoder for targets.

    Attributes:
        encoder: the encoder.
    """

    kind = "encoder-decoder"
    cfg: EncoderDecoderConfig

    def __init__(self, cfg: EncoderDecoderConfig, weights: Weights) -> None:
        super().__init__(cfg, weights)
        assert cfg.encoder is not None
        self.encoder = Encoder(cfg.encoder, weights)
        self.encoder.weights, self.encoder.used = self.weights, self.used

    def limits(self, wanted: Limits) -> Limits:
        """Return ``wanted`` reduced to the model's maximum source and target.

        The context counts the tokens of both. A step takes any source.
        """
        limits = wanted.within(self.encoder.cfg.context + self.cfg.context)
        return replace(limits, tokens=max(limits.tokens, limits.context))

    def max_source(self, limits: Limits) -> int:
        """Return the maximum number of tokens of a source: at most half of the context."""
        return max(1, min(self.encoder.cfg.context, limits.context // 2))

    def bidirectional_prefix(self, tokens: Sequence[int]) -> int:
        """Return the length of the source. RequestError: there is no source, or no target."""
        length = source_length(tokens)
        if not 0 < length < len(tokens):
            raise RequestError(
                "this is not supported for encoder-decoders, whose sequences have a source and a "
                "target; generate, stream, submit and logits are"
            )
        return length

    def build(self, batch: Batch) -> dict[str, Tensor]:
        """Build the graph of one step over the tokens of targets, and of one over sources.

        See `Decoder.build`. The outputs of the step over sources have the prefix `ENCODED`.
        """
        self._group = {i: c for c in self.caches for i in c.layers}
        encoded = self.encode(batch)
        return {**super().build(batch), **{f"{ENCODED}{n}": pool for n, pool in encoded.items()}}

    def encode(self, batch: Batch) -> dict[str, Tensor]:
        """Return the KV pools by name, with the keys and values of cross-attention written."""
        n, found = self.cfg.names, {}
        hidden = self.encoder.forward(batch)
        for i in range(len(self.cfg.layers)):
            with scope(n.model), scope(f"{n.layers}.{i}"), scope(n.cross_attn):
                for entry, name in (("k", n.k), ("v", n.v)):
                    c = self.cfg.attention
                    x = self.linear(hidden, name, c.kv_heads * c.head_dim, c.bias)
                    pool = self.write(i, entry, x.heads(c.kv_heads), batch)
                    found[f"{self._group[i].name}.{i}.{entry}"] = pool
        return found

    # -- the graph of the decoder
    def embed(self, batch: Batch) -> Tensor:
        """Return the input of the first layer [T, dim]; positions count from 1 in the target."""
        pos = batch.pos
        if self.cfg.positions:
            pos = ops.positions_2d(pos, batch.q_start, batch.prefix_len, part=1)
        x = self.add_positions(self.token_embedding(batch.ids), pos)
        return self.norm(x, self.cfg.names.embed_norm)

    def layer(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Apply layer ``i``: x [T, dim] -> [T, dim]."""
        n = self.cfg.names
        h = self.norm(x, n.pre_attn_norm)
        with scope(n.attn):
            a = self.attn(h, i, batch)
        x = self.norm(ops.add(x, a), n.post_attn_norm)
        h = self.norm(x, n.pre_cross_norm)
        with scope(n.cross_attn):
            a = self.cross_attn(h, i, batch)
        x = self.norm(ops.add(x, a), n.post_cross_norm)
        h = self.norm(x, n.pre_mlp_norm)
        with scope(n.mlp):
            m = self.mlp(h)
        return self.norm(ops.add(x, m), n.post_mlp_norm)

    def cross_attn(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        """Attend to the source of each sequence: x [T, dim] -> [T, dim]."""
        c, n, group = self.cfg.attention, self.cfg.names, self._group[i].name
        q = self.linear(x, n.q, c.heads * c.head_dim, c.bias).heads(c.heads)
        k, v = (self.pools[f"{group}.{i}.{entry}"] for entry in ("k", "v"))
        h = ops.attention(
            q, k, v, batch.q_start, batch.prefix_len, batch.table[group], causal=False,
            scale=c.scale or c.head_dim**-0.5, block=batch.limits.block,
        )  # fmt: skip
        return self.linear(h.flatten(), n.out, self.cfg.dim, c.out_bias)

    def head(self, x: Tensor) -> Tensor:
        """Apply the final norm, the output head and its bias: x [N, dim] -> logits [N, vocab]."""
        logits, bias = super().head(x), self.cfg.logits_bias
        if self.weights.meta(bias) is None:
            return logits
        return ops.add(logits, self.vector(bias, self.cfg.vocab, root=True))
