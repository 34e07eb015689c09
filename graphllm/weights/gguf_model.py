"""From a GGUF file to a model: its configuration keys, read strictly, and its tensors' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ModelFileError
from ..rotary import FREQUENCIES, LONG_FACTORS, SHORT_FACTORS
from .gguf import GGUF
from .keys import Keys
from .rules import SAME, STACKED, Change, WeightRule

if TYPE_CHECKING:
    from ..config import Names
    from ..family import Family


def _layer(canonical: str, stored: str, change: Change = SAME) -> WeightRule:
    return WeightRule(f"model.layers.{{i}}.{canonical}", f"blk.{{i}}.{stored}", change)


def layer_rules(names: Mapping[str, str]) -> tuple[WeightRule, ...]:
    """Weight and bias of modules of a layer: what GGUF calls them, by their paths."""
    return tuple(
        WeightRule(f"model.layers.{{i}}.{path}.{kind}", f"blk.{{i}}.{stored}.{kind}")
        for path, stored in names.items()
        for kind in ("weight", "bias")
    )


# The names of the llama family in GGUF (source: gguf-py, `constants.py` and `tensor_mapping.py`).
LLAMA_RULES = (
    WeightRule("model.embed_tokens.weight", "token_embd.weight"),
    WeightRule("model.norm.weight", "output_norm.weight"),
    WeightRule("model.norm.bias", "output_norm.bias"),
    WeightRule("lm_head.weight", "output.weight"),
    *layer_rules({
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }),
    *(WeightRule(name, name) for name in (FREQUENCIES, SHORT_FACTORS, LONG_FACTORS)),
)  # fmt: skip


def _expert_rules(module: str, stored: str, change: Change = SAME) -> tuple[WeightRule, ...]:
    return tuple(
        _layer(f"mlp.{module}.{name}_proj.{kind}", f"ffn_{name}{stored}.{kind}", change)
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    )


# Mixtures of experts; older files have a tensor for each expert.
EXPERT_RULES = (
    *layer_rules({"mlp.gate": "ffn_gate_inp"}),
    *_expert_rules("experts", "_exps"),
    *_expert_rules("experts", ".{e}", STACKED),
)


def shared_rules(module: str) -> tuple[WeightRule, ...]:
    """Of the MLP ``module``, which all tokens pass beside their experts."""
    return _expert_rules(module, "_shexp")


# Latent attention, and DeepSeek's mixtures.
LATENT_RULES = (
    *LLAMA_RULES,
    *EXPERT_RULES,
    *shared_rules("shared_experts"),
    _layer("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    *layer_rules({
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
    }),
)  # fmt: skip

GPT_OSS_RULES = (
    _layer("self_attn.sinks", "attn_sinks.weight"),
    *layer_rules({
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    }),
    *EXPERT_RULES,
    *LLAMA_RULES,
)  # fmt: skip

# With norms around attention and MLP.
GEMMA_RULES = (
    *layer_rules({
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "post_attention_layernorm": "post_attention_norm",
    }),
    *LLAMA_RULES,
)  # fmt: skip


def rules_for(n: Names) -> tuple[WeightRule, ...]:
    """What GGUF calls the weights of a model whose modules have these names."""
    layer = f"{n.model}.{n.layers}.{{i}}"
    mlp = f"{layer}.{n.mlp}".rstrip(".")
    return (
        WeightRule(f"{n.head}.{{*}}", "output.{*}"),
        *_within(n.model, "", {
            n.embed: "token_embd", n.embed_norm: "token_embd_norm", n.positions: "position_embd",
            n.norm: "output_norm",
        }),
        *_within(layer, "blk.{i}.", {
            n.before_attn: "attn_norm", n.after_attn: "post_attention_norm",
            n.before_mlp: "ffn_norm", n.after_mlp: "post_ffw_norm",
        }),
        *_within(f"{layer}.{n.attn}", "blk.{i}.", {
            n.q: "attn_q", n.k: "attn_k", n.v: "attn_v", n.qkv: "attn_qkv", n.out: "attn_output",
            n.q_norm: "attn_q_norm", n.k_norm: "attn_k_norm",
        }),
        *_within(mlp, "blk.{i}.", {n.gate: "ffn_gate", n.up: "ffn_up", n.down: "ffn_down"}),
    )  # fmt: skip


def _within(path: str, stored: str, names: Mapping[str, str]) -> Iterator[WeightRule]:
    for name, to in names.items():
        if name:
            yield WeightRule(f"{path}.{name}.{{*}}", f"{stored}{to}.{{*}}")


# What GGUF calls Hugging Face's keys, after `<architecture>.`; a family's GGUF_KEYS come on top.
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
LATENT_KEYS = {  # where there is latent attention
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
}
_SCALING = {  # of Hugging Face's rope_scaling
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_IGNORED = ("vocab_size", "rope.scaling.finetuned")  # what says nothing about the computation


def gguf_keys(file: GGUF, family: Family) -> Keys:
    """The file's configuration under Hugging Face's names. ConfigError."""
    prefix = f"{file.architecture}."
    found = {
        key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    usual = {name: s for name, s in GGUF_KEYS.items() if name not in family.gguf_keys}
    names = {**family.gguf_keys, **usual}
    shown = {name: prefix + stored for name, stored in names.items()}
    shown |= {stored: prefix + stored for stored in found}
    values: dict[str, Any] = {n: found.pop(s) for n, s in names.items() if s in found}
    scaling = {name: found.pop(stored) for name, stored in _SCALING.items() if stored in found}
    if scaling:
        values["rope_scaling"] = scaling
        shown["rope_scaling"] = prefix + "rope.scaling"
    for name in _IGNORED:
        found.pop(name, None)
    values |= found
    values["vocab_size"] = _vocab(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    keys = Keys(str(file.path), values, file.tensors, shown, gguf=True)
    if "v_head_dim" not in family.gguf_keys and keys.has("v_head_dim"):
        width = keys.positive("v_head_dim")
        if keys.positive("head_dim", width) != width:
            raise ConfigError(f"{file.path}: key_length and value_length differ")
    return keys


def _vocab(file: GGUF) -> int:
    """The rows of the embedding, one for each token: else there were ids without a piece."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: missing tensor 'token_embd.weight'")
    rows, tokens = embedding.shape[0], file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != rows:
        raise ModelFileError(
            f"{file.path}: 'token_embd.weight' has {rows} rows for {len(tokens)} tokens"
        )
    return rows
