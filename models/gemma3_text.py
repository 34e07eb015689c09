"""Gemma 3, text only (Gemma Team 2025): five layers with a window to each one without."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import SANDWICH_NORMS, Decoder, DecoderConfig, Layer
from graphllm.model.rope import FULL_ATTENTION, rope_config
from graphllm.weights.weight_rules import GEMMA_NORM_RULES

GGUF = ("gemma3",)
GGUF_KEYS = {
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
}
HF = GEMMA_NORM_RULES
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 128, "query_pre_attn_scalar": 10,
    },
    {"num_key_value_heads": 6, "query_pre_attn_scalar": 23, "final_logit_softcapping": 5.0},
    {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 1, "tie_word_embeddings": False},
    {"layer_types": None, "sliding_window_pattern": 2, "rope_theta": 500.0, "rms_norm_eps": 0.01,
     "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
     "attention_bias": True, "hidden_activation": "silu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        rms_norm_eps=1e-6, max_position_embeddings=131072, tie_word_embeddings=True,
        query_pre_attn_scalar=256, sliding_window=4096,
    )  # fmt: skip
    keys.require("use_bidirectional_attention", False)
    keys.require("attn_logit_softcapping", None)
    c = base_config(
        keys,
        act="gelu_pytorch_tanh",
        act_key="hidden_activation",
        layer_type=FULL_ATTENTION,
        base=1e6,
    )
    a, wide, period = c.attention, c.layers[0].rope, keys.positive("sliding_window_pattern", 6)
    # layer_types and hidden_activation take precedence over these.
    keys.ignore("_sliding_window_pattern", "hidden_act")
    local = rope_config(
        keys, a.head_dim, "sliding_attention", theta="rope_local_base_freq", old_form=False
    )
    windows = sliding_windows(keys, lambda i: i % period != period - 1)
    # GGUF has no key for the scale. llama.cpp recognises the 27B, which differs, by its 62 layers.
    width = a.head_dim if len(windows) != 62 else c.dim // a.heads
    return replace(
        c,
        layers=tuple(Layer(local if w else wide, w) for w in windows),
        attention=replace(
            a, qk_norm="head", scale=keys.factor("query_pre_attn_scalar", width) ** -0.5,
            bias=keys.bias("attention_bias"), out_bias=keys.bias("attention_bias"),
        ),
        names=replace(c.names, **SANDWICH_NORMS),
        embed_scale=c.dim**0.5,
        logit_softcap=keys.factor("final_logit_softcapping", 0.0),
    )  # fmt: skip
