"""Configuration keys and tensor names of GGUF files, mapped to Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, ModelFileError
from ..weights.gguf import GgufFile, StringArray
from ..weights.weight_rules import FIRST_HALF, SECOND_HALF, STACK, WeightRule
from .config import DecoderConfig, EncoderConfig, EncoderDecoderConfig, ModelConfig, ModuleNames
from .config_keys import Keys
from .rope import FREQUENCIES, LONG_FACTORS, SHORT_FACTORS


def gguf_weight_rules(config: ModelConfig) -> list[WeightRule]:
    """Return the rules from GGUF's tensor names to the weights of a model with this configuration.

    Source: gguf-py, `constants.py` and `tensor_mapping.py`.
    """
    n, stacks = config.names, {"": config}
    if isinstance(config, EncoderDecoderConfig):
        assert config.encoder is not None
        stacks = {"dec.": config, "enc.": config.encoder}
    return [
        WeightRule(f"{n.head}.{{*}}", "output.{*}"),
        *_modules(n.model, "", {
            n.embed: "token_embd", n.embed_norm: "token_embd_norm", n.positions: "position_embd",
            n.token_types: "token_types",
        }),
        *(rule for prefix, stack in stacks.items() for rule in _stack_rules(stack, prefix)),
        *(WeightRule(name, name) for name in (FREQUENCIES, SHORT_FACTORS, LONG_FACTORS)),
    ]  # fmt: skip


def _stack_rules(config: ModelConfig, prefix: str) -> Iterator[WeightRule]:
    """Rules for the layers and the final norm of an encoder or a decoder.

    ``prefix``: what their names in the file begin with, ``enc.`` or ``dec.`` in encoder-decoders.
    """
    n, up = config.names, config.names.gate_up if config.mlp.fused else config.names.up
    layer, stored = _path(n.model, n.layers, "{i}"), f"{prefix}blk.{{i}}."
    post_norms = ("post_attention_norm", "post_ffw_norm")
    if isinstance(config, EncoderConfig):
        post_norms = ("attn_output_norm", "layer_output_norm")
    yield from _modules(n.model, prefix, {n.norm: "output_norm"})
    yield from _modules(layer, stored, {
        n.pre_attn_norm: "attn_norm", n.post_attn_norm: post_norms[0],
        n.pre_cross_norm: "cross_attn_norm",
        n.pre_mlp_norm: "ffn_norm", n.post_mlp_norm: post_norms[1],
    })  # fmt: skip
    yield from _modules(_path(layer, n.attn), stored, {
        n.q: "attn_q", n.k: "attn_k", n.v: "attn_v", n.qkv: "attn_qkv",
        n.out: "attn_o" if prefix else "attn_output", n.q_norm: "attn_q_norm",
        n.k_norm: "attn_k_norm", **_MLA_NAMES,
    })  # fmt: skip
    if n.cross_attn:
        yield from _modules(_path(layer, n.cross_attn), stored, {
            n.q: "cross_attn_q", n.k: "cross_attn_k", n.v: "cross_attn_v", n.out: "cross_attn_o",
        })  # fmt: skip
        # T5's files may have it; transformers does not use it either.
        yield WeightRule("", f"{stored}cross_attn_rel_b.weight")
    yield WeightRule(_path(layer, n.attn, "sinks"), f"{stored}attn_sinks.weight")
    mlp = _path(layer, n.mlp)
    if isinstance(config, DecoderConfig) and config.moe:
        yield from _moe_rules(mlp, n)
    yield from _modules(mlp, stored, {n.gate: "ffn_gate", up: "ffn_up", n.down: "ffn_down"})


def _path(*names: str) -> str:
    """Join the names of modules; empty ones stand for no module."""
    return ".".join(filter(None, names))


def _moe_rules(path: str, n: ModuleNames) -> Iterator[WeightRule]:
    """Rules for a mixture of experts.

    Old files store each expert in its own tensor; some new ones store gate and up in one tensor.
    """
    yield WeightRule(f"{path}.{n.router}.e_score_correction_bias", "blk.{i}.exp_probs_b.bias")
    yield from _modules(path, "blk.{i}.", {n.router: "ffn_gate_inp"})
    for name, kind in ((n.gate, "gate"), (n.up, "up"), (n.down, "down")):
        expert = f"{path}.experts.{name}"
        yield WeightRule(f"{expert}.weight", f"blk.{{i}}.ffn_{kind}.{{e}}.weight", STACK)
        yield from _modules(f"{path}.experts", "blk.{i}.", {name: f"ffn_{kind}_exps"})
        yield from _modules(f"{path}.{n.shared}", "blk.{i}.", {name: f"ffn_{kind}_shexp"})
    gate, up = (f"{path}.experts.{name}.weight" for name in (n.gate, n.up))
    both = "blk.{i}.ffn_gate_up_exps.weight"
    yield WeightRule(gate, both, FIRST_HALF, also=((up, SECOND_HALF),))
    # llama.cpp's converter drops axes of length 1.
    gate = f"{path}.{n.shared}_gate.weight"
    yield WeightRule(gate, "blk.{i}.ffn_gate_inp_shexp.weight", STACK)


_MLA_NAMES = {  # modules of `graphllm.model.mla`
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "k_b_proj": "attn_k_b",
    "v_b_proj": "attn_v_b",
}


def _modules(path: str, stored: str, names: Mapping[str, str]) -> Iterator[WeightRule]:
    """Rules for modules under ``path``, by their names in the file, which begin with ``stored``."""
    for name, stored_name in names.items():
        if name:
            yield WeightRule(_path(path, name, "{*}"), f"{stored}{stored_name}.{{*}}")


# Hugging Face's keys and GGUF's, without the prefix `<architecture>.`. A model file's GGUF_KEYS add
# to these.
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
MLA_KEYS = {  # GGUF_KEYS of models with latent attention
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
T5_KEYS = {  # GGUF_KEYS of T5
    "num_decoder_layers": "decoder_block_count",
    "num_heads": "attention.head_count",
    "d_kv": "attention.key_length",
    "d_ff": "feed_forward_length",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "relative_attention_num_buckets": "attention.relative_buckets_count",
}
_SCALING: dict[str, tuple[str, type]] = {  # keys of rope_scaling, and types of the values
    "rope_type": ("rope.scaling.type", str),
    "factor": ("rope.scaling.factor", float),
    "original_max_position_embeddings": ("rope.scaling.original_context_length", int),
    "attention_factor": ("rope.scaling.attn_factor", float),
    "yarn_log_multiplier": ("rope.scaling.yarn_log_multiplier", float),
    "beta_fast": ("rope.scaling.yarn_beta_fast", float),
    "beta_slow": ("rope.scaling.yarn_beta_slow", float),
}
_TOKEN_TYPES = "tokenizer.ggml.token_type_count"
_OLD_FACTOR = "rope.scale_linear"  # in files older than rope.scaling.factor
# Keys that do not change the computation, or are read by embeddings. The layout is always that of
# llama.cpp's converter.
_IGNORED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type")


def gguf_keys(file: GgufFile, own_keys: Mapping[str, str]) -> Keys:
    """Return the file's configuration under Hugging Face's names.

    Args:
        file: the GGUF file.
        own_keys: Hugging Face's name -> GGUF's key, in addition to `GGUF_KEYS`.

    Raises:
        ConfigError: the configuration is malformed.
    """
    prefix = f"{file.architecture}."
    found = {
        key[len(prefix) :]: _plain(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    common = {name: s for name, s in GGUF_KEYS.items() if name not in own_keys}
    names = {**own_keys, **common}
    called = {name: prefix + stored for name, stored in names.items()}
    called |= {stored: prefix + stored for stored in found}
    values: dict[str, Any] = {n: found.pop(s) for n, s in names.items() if s in found}
    scaling = _scaling(file, prefix)
    if scaling:
        values["rope_scaling"] = scaling
        called["rope_scaling"] = prefix + "rope.scaling"
        for stored in (_OLD_FACTOR, *(stored for stored, _ in _SCALING.values())):
            found.pop(stored, None)
    for name in _IGNORED:
        found.pop(name, None)
    values |= found
    values["vocab_size"] = _vocab_size(file)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "token_types.weight" in file.tensors:
        values["type_vocab_size"] = file.value(_TOKEN_TYPES, int)
        called["type_vocab_size"] = _TOKEN_TYPES
    keys = Keys(str(file.path), values, file.tensors, called, gguf=True)
    if "v_head_dim" not in own_keys and keys.has("v_head_dim"):
        width = keys.positive("v_head_dim")
        if keys.positive("head_dim", width) != width:
            raise ConfigError(f"{file.path}: key_length and value_length must be equal")
    return keys


def _plain(value: Any) -> Any:
    """Return a value as JSON would represent it: arrays become lists."""
    if isinstance(value, StringArray):
        return value[:]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Return the file's keys of RoPE scaling as Hugging Face's rope_scaling; empty without any.

    As in llama.cpp (`load_hparams`), a factor without a type is linear, and a factor of 0 means no
    scaling.
    """
    found: dict[str, Any] = {
        name: file.value(prefix + stored, kind) for name, (stored, kind) in _SCALING.items()
    }
    if found["factor"] is None:
        found["factor"] = file.value(prefix + _OLD_FACTOR, float)
    found = {name: value for name, value in found.items() if value is not None}
    if found:
        found.setdefault("rope_type", "linear" if "factor" in found else "none")
    if found.get("factor") == 0:
        found["factor"] = 1.0
    return found


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding; ModelFileError unless there is one for each token."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: missing tensor 'token_embd.weight'")
    rows, tokens = embedding.shape[0], file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != rows:
        raise ModelFileError(
            f"{file.path}: 'token_embd.weight' has {rows} rows for {len(tokens)} tokens"
        )
    return rows
