"""The encoder that all bidirectional models share.

A model file fills in an `EncoderConfig`, and overrides the methods in which its model differs.
"""

from __future__ import annotations

from typing import ClassVar

from .. import ops
from ..errors import UnusedTensors
from ..graph.tensor import Tensor, Var, feed, scope
from ..weights import Weights
from .batch import Batch
from .blocks import Blocks
from .config import Attention, EncoderConfig, Head, Layer, Mlp, ModuleNames, Norm
from .nn import activation

__all__ = [
    "Attention", "Encoder", "EncoderBatch", "EncoderConfig", "Head", "Layer", "Mlp", "ModuleNames",
    "Norm",
]  # fmt: skip


class EncoderBatch:
    """Graph inputs of an encoder: T tokens of S sequences, packed without padding.

    Attributes:
        ids: Token ids [T].
        pos: Rows of the position table [T], `EncoderConfig.position_offset` for a first token.
        token_types: Token types [T].
        q_start: Index of each sequence's first token, and T [S + 1].
        head_rows: Maximum number of rows that the head computes at once.
    """

    def __init__(self, tokens: int, sequences: int, head_rows: int = 1) -> None:
        t, q = Var("T", 1, tokens), Var("Q", 2, sequences + 1)
        self.ids, self.pos = feed("ids", (t,), "i32"), feed("pos", (t,), "i32")
        self.token_types = feed("token_types", (t,), "i32")
        self.q_start = feed("q_start", (q,), "i32")
        self.head_rows = head_rows


class Encoder(Blocks):
    """Bidirectional transformer that an `EncoderConfig` describes, with or without a head.

    Attributes:
        kind: "decoder", "encoder" or "encoder-decoder".
        cfg: the model's configuration.
    """

    kind: ClassVar[str] = "encoder"

    def __init__(self, cfg: EncoderConfig, weights: Weights) -> None:
        super().__init__(cfg, weights)
        self.cfg: EncoderConfig = cfg

    def build(self, batch: EncoderBatch) -> dict[str, Tensor]:
        """Build the graph over ``batch``; its output ``hidden`` is [T, dim].

        With a head, the output ``logits`` [R, labels] is computed from the input ``rows`` [R, dim]:
        hidden states that the caller has selected or pooled.

        ModelFileError: a weight is missing, has another shape, or is not used.
        """
        outputs = {"hidden": self.forward(batch)}
        if self.cfg.head is not None:
            rows = feed("rows", (Var("R", 1, batch.head_rows), self.cfg.dim), "f32")
            outputs["logits"] = self.head(rows, self.cfg.head)
        if unused := sorted(set(self.weights.names()) - self.used):
            raise UnusedTensors(unused)
        return outputs

    # -- methods that a model file may override
    def forward(self, batch: EncoderBatch | Batch) -> Tensor:
        """Return the hidden states [T, dim] of all tokens."""
        n = self.cfg.names
        with scope(n.model):
            x = self.embed(batch)
            for i in range(len(self.cfg.layers)):
                with scope(f"{n.layers}.{i}"):
                    x = self.layer(x, i, batch)
            return self.norm(x, n.norm)

    def embed(self, batch: EncoderBatch | Batch) -> Tensor:
        """Return the input of the first layer [T, dim]."""
        c, n = self.cfg, self.cfg.names
        x = self.token_embedding(batch.ids)
        if c.token_types:
            assert isinstance(batch, EncoderBatch)
            x = ops.add(x, self.embedding(batch.token_types, n.token_types, c.token_types, c.dim))
        return self.norm(self.add_positions(x, batch.pos), n.embed_norm)

    def layer(self, x: Tensor, i: int, batch: EncoderBatch | Batch) -> Tensor:
        """Apply layer ``i``: x [T, dim] -> [T, dim]."""
        n = self.cfg.names
        h = self.norm(x, n.pre_attn_norm)
        with scope(n.attn):
            a = self.attn(h, i, batch)
        x = self.norm(ops.add(x, a), n.post_attn_norm)
        h = self.norm(x, n.pre_mlp_norm)
        with scope(n.mlp):
            m = self.feed_forward(h, self.cfg.mlp.intermediate_size)
        return self.norm(ops.add(x, m), n.post_mlp_norm)

    def head(self, x: Tensor, head: Head) -> Tensor:
        """Apply the head: x [R, dim] -> [R, labels]."""
        c = self.cfg
        if head.dense:
            x = self.linear(x, head.dense, head.width or c.dim, head.dense_bias)
            x = activation(x, head.act)
        x = self.norm(x, head.norm)
        tied = head.out == c.names.head and c.tied
        name = f"{c.names.model}.{c.names.embed}" if tied else head.out
        meta = self.weights.meta(f"{name}.weight")
        # The number of labels is that of the file; a missing tensor is reported with any number.
        labels: int = 1 if meta is None else meta.shape[0]  # type: ignore[assignment]
        w = self.weight(f"{name}.weight", labels, x.shape[-1])  # type: ignore[arg-type]
        return ops.linear(x, w, self.vector(head.bias, labels) if head.bias else None)

    def attn(self, x: Tensor, i: int, batch: EncoderBatch | Batch) -> Tensor:
        """Bidirectional attention of layer ``i``: x [T, dim] -> [T, dim]."""
        c, own = self.cfg.attention, self.cfg.layers[i]
        q, k, v = self.qkv(x)
        if own.rope:
            q, k = self.rotate(q, batch.pos, own.rope), self.rotate(k, batch.pos, own.rope)
        h = ops.packed_attention(
            q, k, v, batch.q_start, self.position_bias(), scale=c.scale or c.head_dim**-0.5,
            window=own.window,
        )  # fmt: skip
        return self.linear(h.flatten(), self.cfg.names.out, self.cfg.dim, c.out_bias)
