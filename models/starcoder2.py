"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases, an ungated MLP and a sliding window."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("starcoder2",)
GGUF_KEYS = {"norm_epsilon": "attention.layer_norm_epsilon"}
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "norm_epsilon": 1e-5,
        "max_position_embeddings": 128, "sliding_window": 9, "tie_word_embeddings": True,
    },
    {"num_key_value_heads": 6, "use_bias": False, "norm_epsilon": 0.01, "sliding_window": None},
    {"num_key_value_heads": 1, "tie_word_embeddings": False, "rope_theta": 500.0,
     "hidden_act": "silu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=2, norm_epsilon=1e-5, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    keys.require("norm_type", "layer_norm")
    keys.require("mlp_type", "default")
    keys.require("scale_attn_weights", True)
    # The first two duplicate norm_epsilon and hidden_act; the others do not change the result.
    keys.ignore("layer_norm_epsilon", "activation_function", "attention_softmax_in_fp32")
    keys.ignore("scale_attention_softmax_in_fp32")
    c = base_config(keys, eps="norm_epsilon", act="gelu_pytorch_tanh")
    bias, window = keys.bias("use_bias", True), keys.positive("sliding_window", 0)
    return replace(
        c,
        layers=tuple(replace(layer, window=window) for layer in c.layers),
        attention=replace(c.attention, bias=bias, out_bias=bias),
        mlp=replace(c.mlp, bias=bias, gated=False),
        norm=replace(c.norm, kind="layer"),
        names=replace(c.names, up="c_fc", down="c_proj"),
    )
