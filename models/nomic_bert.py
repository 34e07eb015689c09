"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions and SwiGLU, without biases."""

from dataclasses import replace

from graphllm.model.config import ACTIVATIONS
from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderConfig, Layer
from graphllm.model.encoder_config import bert_config, bert_heads, bert_names, encoder_rules
from graphllm.model.rope import rope_config
from graphllm.weights.weight_rules import WeightRule

GGUF = ("nomic-bert",)
Model = Encoder
TINY = (
    {"vocab_size": 131, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6,
     "intermediate_size": 52, "max_position_embeddings": 64},
    {"hidden_size": 44, "num_attention_heads": 11, "head_dim": 6, "hidden_act": "gelu",
     "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
)  # fmt: skip


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    return encoder_rules(config, "cls", "pooler")


def config(keys: Keys) -> EncoderConfig:
    names = replace(
        bert_names("nomic_bert"), embed_norm="emb_ln", layers="encoder.layers", attn="attn",
        qkv="Wqkv", out="out_proj", post_attn_norm="norm1", mlp="mlp", gate="fc12", up="fc11",
        down="fc2", post_mlp_norm="norm2",
    )  # fmt: skip
    keys.set_defaults(hidden_act="silu", max_position_embeddings=2048)
    c = bert_config(keys, names, bert_heads(keys, "nomic_bert", "layer_norm"))
    width = keys.positive("head_dim", c.attention.head_dim)
    attention = replace(c.attention, head_dim=width, bias=False, out_bias=False, fused="rows")
    rope = rope_config(keys, width, base=10_000.0 if keys.gguf else 1000.0)
    act = keys.choice("hidden_act", ACTIVATIONS, "silu")
    mlp = replace(c.mlp, act=act, gated=True, bias=False)
    layers = (Layer(rope),) * len(c.layers)
    return replace(c, positions="", layers=layers, attention=attention, mlp=mlp)
