"""ChatGLM-6B (GLM; Du et al. 2022): a bidirectional prefix, and two positions for each token.

Its successors have the same model_type; their configurations are read by `chatglm2`.
"""

from collections.abc import Sequence

from graphllm import ops
from graphllm.errors import RequestError
from graphllm.graph.tensor import Tensor
from graphllm.model.config import Attention, DecoderConfig, Layer, Mlp, ModuleNames, Norm, Rope
from graphllm.model.config_keys import Keys, mha_sizes
from graphllm.model.decoder import Batch, Decoder
from graphllm.models import chatglm2

NAMES = ModuleNames(
    model="transformer", embed="word_embeddings", norm="final_layernorm",
    attn="attention", qkv="query_key_value", out="dense", up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
HF = chatglm2.HF
TINY = (
    {"vocab_size": 131, "hidden_size": 72, "inner_hidden_size": 52, "num_attention_heads": 6,
     "num_layers": 3, "max_sequence_length": 128, "layernorm_epsilon": 1e-5,
     "bos_token_id": 1, "gmask_token_id": 2, "mask_token_id": 0, "position_encoding_2d": True},
    {"num_attention_heads": 1, "hidden_size": 20, "num_layers": 2, "layernorm_epsilon": 1e-3},
    {"num_attention_heads": 9, "inner_hidden_size": 75, "tie_word_embeddings": True},
)  # fmt: skip


class Model(Decoder):
    def bidirectional_prefix(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before sop if the last of them is a mask token.

        RequestError for a mask elsewhere, which would change the positions.
        """
        sop, *masks = self.cfg.attention.prefix_token_ids or (-1,)
        before = list(tokens[: list(tokens).index(sop)]) if sop in tokens else []
        at = next((before.index(mask) for mask in masks if mask in before), -1)
        if -1 < at < len(before) - 1:
            raise RequestError(
                f"token {at + 1}, {before[at]}, is a mask and must be followed by sop ({sop})"
            )
        return at + 1

    def rope(self, x: Tensor, i: int, batch: Batch) -> Tensor:
        rope, half = self.cfg.layers[i].rope, self.cfg.attention.head_dim // 2
        if rope is None or not self.cfg.attention.prefix_token_ids:
            return super().rope(x, i, batch)
        at = [ops.positions_2d(batch.pos, batch.q_start, batch.prefix_len, part=n) for n in (0, 1)]
        first = self.rotate(x.slice(2, 0, half), at[0], rope)
        return ops.concat(first, self.rotate(x.slice(2, half, 2 * half), at[1], rope))


def config(keys: Keys) -> DecoderConfig:
    if keys.has("ffn_hidden_size"):
        return chatglm2.config(keys)
    chatglm2.common(keys)
    (dim, heads, width), count = mha_sizes(keys), keys.layers()
    keys.require("position_encoding_2d", True)
    ids = (keys("bos_token_id", int), keys("gmask_token_id", int), keys("mask_token_id", int, -1))
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=keys.positive("max_sequence_length"),
        layers=(Layer(Rope()),) * count,
        attention=Attention(
            heads, heads, width, bias=True, out_bias=True, fused="heads", prefix_token_ids=ids
        ),
        mlp=Mlp(keys.positive("inner_hidden_size"), "gelu_new", gated=False, bias=True),
        norm=Norm(keys.eps("layernorm_epsilon", 1e-5), "layer"),
        names=NAMES,
        post_layernorm_residual=(2 * count) ** 0.5,
        tied=keys("tie_word_embeddings", bool, "lm_head.weight" not in keys.tensors),
    )
