"""The encoder that all bidirectional models share.

A model file fills in an `EncoderConfig`, and overrides the methods in which its model differs.
"""

from __future__ import annotations

from .. import ops
from ..errors import UnusedTensors
from ..graph.tensor import Tensor, Var, feed, scope
from ..weights import Weights
from .config import Attention, EncoderConfig, Layer, Mlp, ModuleNames, Norm
from .nn import Module, activation

__all__ = [
    "Attention", "Encoder", "EncoderBatch", "EncoderConfig", "Layer", "Mlp", "ModuleNames", "Norm",
]  # fmt: skip


class EncoderBatch:
    """Graph inputs of an encoder: T tokens of S sequences, packed without padding.

    Attributes:
        ids: Token ids [T].
        pos: Rows of the position table [T], `EncoderConfig.position_offset` for a first token.
        token_types: Token types [T].
        q_start: Index of each sequence's first token, and T [S + 1].
    """

    def __init__(self, tokens: int, sequences: int) -> None:
        t, q = Var("T", 1, tokens), Var("Q", 2, sequences + 1)
        self.ids, self.pos = feed("ids", (t,), "i32"), feed("pos", (t,), "i32")
        self.token_types = feed("token_types", (t,), "i32")
        self.q_start = feed("q_start", (q,), "i32")


class Encoder(Module):
    """Bidirectional transformer that an `EncoderConfig` describes, without a head.

    Attributes:
        cfg: the model's configuration.
    """

    def __init__(self, cfg: EncoderConfig, weights: Weights) -> None:
        super().__init__(weights)
        self.cfg = cfg

    def build(self, batch: EncoderBatch) -> dict[str, Tensor]:
        """Build the graph over ``batch``; its output ``hidden`` is [T, dim].

        ModelFileError: a weight is missing, has another shape, or is not used.
        """
        n = self.cfg.names
        with scope(n.model):
            x = self.embed(batch)
            for i in range(len(self.cfg.layers)):
                with scope(f"{n.layers}.{i}"):
                    x = self.layer(x, batch)
        if unused := sorted(set(self.weights.names()) - self.used):
            raise UnusedTensors(unused)
        return {"hidden": x}

    # -- methods that a model file may override
    def embed(self, batch: EncoderBatch) -> Tensor:
        """Return the input of the first layer [T, dim]."""
        c, n = self.cfg, self.cfg.names
        x = self.embedding(batch.ids, n.embed, c.vocab, c.dim)
        if c.token_types:
            x = ops.add(x, self.embedding(batch.token_types, n.token_types, c.token_types, c.dim))
        rows = c.context + c.position_offset
        x = ops.add(x, self.embedding(batch.pos, n.positions, rows, c.dim))
        return self.norm(x, n.embed_norm)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply the layer norm ``name`` over the last axis."""
        return self.layer_norm(x, name, self.cfg.norm.eps, self.cfg.norm.bias)

    def layer(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """Apply a layer: x [T, dim] -> [T, dim]."""
        n = self.cfg.names
        with scope(n.attn):
            a = self.attn(x, batch)
        x = self.norm(ops.add(x, a), n.post_attn_norm)
        with scope(n.mlp):
            m = self.mlp(x)
        return self.norm(ops.add(x, m), n.post_mlp_norm)

    def attn(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """Apply bidirectional attention: x [T, dim] -> [T, dim]."""
        c, n = self.cfg.attention, self.cfg.names
        q, k, v = (
            self.linear(x, name, count * c.head_dim, c.bias).heads(count)
            for name, count in ((n.q, c.heads), (n.k, c.kv_heads), (n.v, c.kv_heads))
        )
        scale = c.scale or c.head_dim**-0.5
        h = ops.packed_attention(q, k, v, batch.q_start, scale=scale)
        return self.linear(h.flatten(), n.out, self.cfg.dim, c.out_bias)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the MLP: x [T, dim] -> [T, dim]."""
        c, n = self.cfg.mlp, self.cfg.names
        h = activation(self.linear(x, n.up, c.intermediate_size, c.bias), c.act)
        return self.linear(h, n.down, self.cfg.dim, c.bias)
