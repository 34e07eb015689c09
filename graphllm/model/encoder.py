"""The encoder that all bidirectional models share.

A model file fills in an `EncoderConfig`, and overrides the methods in which its model differs.
"""

from __future__ import annotations

from .. import ops
from ..errors import UnusedTensors
from ..graph.tensor import Tensor, Var, feed, scope
from ..weights import Weights
from .batch import Batch
from .blocks import Blocks
from .config import Attention, EncoderConfig, Layer, Mlp, ModuleNames, Norm

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


class Encoder(Blocks):
    """Bidirectional transformer that an `EncoderConfig` describes, without a head.

    Attributes:
        cfg: the model's configuration.
    """

    def __init__(self, cfg: EncoderConfig, weights: Weights) -> None:
        super().__init__(cfg, weights)
        self.cfg: EncoderConfig = cfg

    def build(self, batch: EncoderBatch) -> dict[str, Tensor]:
        """Build the graph over ``batch``; its output ``hidden`` is [T, dim].

        ModelFileError: a weight is missing, has another shape, or is not used.
        """
        x = self.forward(batch)
        if unused := sorted(set(self.weights.names()) - self.used):
            raise UnusedTensors(unused)
        return {"hidden": x}

    # -- methods that a model file may override
    def forward(self, batch: EncoderBatch | Batch) -> Tensor:
        """Return the hidden states [T, dim] of all tokens."""
        n = self.cfg.names
        with scope(n.model):
            x = self.embed(batch)
            for i in range(len(self.cfg.layers)):
                with scope(f"{n.layers}.{i}"):
                    x = self.layer(x, batch)
            return self.norm(x, n.norm)

    def embed(self, batch: EncoderBatch | Batch) -> Tensor:
        """Return the input of the first layer [T, dim]."""
        c, n = self.cfg, self.cfg.names
        x = self.token_embedding(batch.ids)
        if c.token_types:
            assert isinstance(batch, EncoderBatch)
            x = ops.add(x, self.embedding(batch.token_types, n.token_types, c.token_types, c.dim))
        return self.norm(self.add_positions(x, batch.pos), n.embed_norm)

    def layer(self, x: Tensor, batch: EncoderBatch | Batch) -> Tensor:
        """Apply a layer: x [T, dim] -> [T, dim]."""
        n = self.cfg.names
        h = self.norm(x, n.pre_attn_norm)
        with scope(n.attn):
            a = self.attn(h, batch)
        x = self.norm(ops.add(x, a), n.post_attn_norm)
        h = self.norm(x, n.pre_mlp_norm)
        with scope(n.mlp):
            m = self.feed_forward(h, self.cfg.mlp.intermediate_size)
        return self.norm(ops.add(x, m), n.post_mlp_norm)

    def attn(self, x: Tensor, batch: EncoderBatch | Batch) -> Tensor:
        """Apply bidirectional attention: x [T, dim] -> [T, dim]."""
        c, n = self.cfg.attention, self.cfg.names
        q, k, v = (
            self.linear(x, name, count * c.head_dim, c.bias).heads(count)
            for name, count in ((n.q, c.heads), (n.k, c.kv_heads), (n.v, c.kv_heads))
        )
        scale = c.scale or c.head_dim**-0.5
        h = ops.packed_attention(q, k, v, batch.q_start, self.position_bias(), scale=scale)
        return self.linear(h.flatten(), n.out, self.cfg.dim, c.out_bias)
