"""SmolLM3 (Hugging Face 2025): a llama with every fourth layer without rotary positions."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("smollm3",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 5,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "pad_token_id": 0,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.01,
     "tie_word_embeddings": False, "no_rope_layer_interval": 2, "rope_theta": 500.0},
    {"num_key_value_heads": 1, "no_rope_layers": [1, 0, 0, 1, 0], "hidden_act": "gelu",
     "use_sliding_window": True, "sliding_window": 9},
    {"use_sliding_window": True, "sliding_window": 5,
     "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.interleaved = keys.gguf  # llama.cpp's converter permutes q and k
    keys.set_defaults(
        num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=32768,
        tie_word_embeddings=True, rope_theta=2e6,
    )  # fmt: skip
    keys.ignore("max_window_layers")  # left over from a Qwen configuration
    c, bias = base_config(keys), keys.bias("attention_bias")
    period, count = keys.positive("no_rope_layer_interval", 4), len(c.layers)
    rotates = keys("no_rope_layers", list, [int((i + 1) % period != 0) for i in range(count)])
    if len(rotates) < count or any(flag not in (0, 1) for flag in rotates):
        raise keys.error("no_rope_layers", f"is not a list of {count} flags (0 or 1)")
    used = keys("use_sliding_window", bool, False)
    windows = sliding_windows(keys, lambda i: not rotates[i], used=used)
    return replace(
        c,
        layers=tuple(
            replace(e, rope=e.rope if flag else None, window=w)
            for e, flag, w in zip(c.layers, rotates, windows)
        ),
        attention=replace(c.attention, bias=bias, out_bias=bias),
        mlp=replace(c.mlp, bias=keys.bias("mlp_bias")),
    )
