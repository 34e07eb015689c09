"""transformers' models as GGUF files, laid out as llama.cpp's converter lays them out: by the names
of the `gguf` package and what is known of the converter, and by no rule of the tested code.

`ARCHS` says for each model_type (and what follows a hyphen) what its file looks like, `CASES` what
small models are tried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import hf_models
import numpy as np
from gguf_files import finish

VOCAB = json.loads((Path(__file__).parents[1] / "golden" / "tiny_spm.json").read_text())
Config = Mapping[str, Any]
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Arch:
    """How models of a model_type are stored.

    ``name``: llama.cpp's architecture. ``keys``: the metadata beside the common one, of a
    configuration, after ``<name>.``; None takes a common one away. ``tensors``: what becomes of the
    tensors under their published names, or what is added under GGUF's. ``cases``: changes of TINY's
    first configuration, each a model that GGUF can state and llama.cpp runs.
    """

    name: str
    keys: Callable[[Config], Mapping[str, Any]] = lambda c: {}
    tensors: Callable[[Config, Tensors], Tensors] = lambda c, t: t
    cases: tuple[Config, ...] = ({},)


# ------------------------------------------------------------------------- what becomes of tensors


def head_dim(c: Config) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def permuted(c: Config, tensors: Tensors) -> Tensors:
    """Rows of q and k from halves to pairs, those of biases as well; llama3's factors are added."""
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    out = dict(tensors)
    for name, value in tensors.items():
        module = name.split(".")[-2]
        if module in heads:
            halves = value.reshape(heads[module], 2, -1, *value.shape[1:])
            out[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
    rope = c["rope_parameters"]
    if rope["rope_type"] == "llama3":
        out["rope_freqs.weight"] = llama3_factors(rope, head_dim(c))
    return out


def llama3_factors(rope: Config, width: int) -> np.ndarray:
    """What the frequency of each pair is divided by, wave by wave."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, width, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / width)
        turns = rope["original_max_position_embeddings"] / wave
        mixed = (turns - low) / (high - low)
        between = 1 / ((1 - mixed) / rope["factor"] + mixed)
        factors.append(1.0 if turns > high else rope["factor"] if turns < low else between)
    return np.array(factors, np.float32)


def plus_one(c: Config, tensors: Tensors) -> Tensors:
    """Norms that are published as their distance from one."""
    return {n: t + np.float32(1) if n.endswith("norm.weight") else t for n, t in tensors.items()}


def stacked_norms(c: Config, tensors: Tensors) -> Tensors:
    """StableLM's norms of single heads, side by side."""
    out: Tensors = {}
    for name, value in tensors.items():
        base, apart, rest = name.partition(".norms.")
        name = f"{base}.{rest.split('.')[1]}" if apart else name
        out[name] = np.concatenate([out[name], value[None]]) if name in out else value
        if apart and out[name].ndim == 1:
            out[name] = value[None]
    return out


def fused_qkv(c: Config, tensors: Tensors) -> Tensors:
    """As ChatGLM's files have them: rows of q, k and v in one tensor."""
    three = ("q_proj", "k_proj", "v_proj")
    out = {n: t for n, t in tensors.items() if n.split(".")[-2] not in three}
    for name in tensors:
        if ".q_proj." in name:
            stored = name.replace("model.layers.", "blk.").replace("self_attn.q_proj", "attn_qkv")
            out[stored] = np.concatenate([tensors[name.replace("q_proj", n)] for n in three])
    return out


def conv1d(c: Config, tensors: Tensors) -> Tensors:
    """GPT-2's matrices, which are published as [in, out]."""
    turned_over = ("c_attn", "c_proj", "c_fc")
    return {
        name: value.T if value.ndim == 2 and name.split(".")[-2] in turned_over else value
        for name, value in tensors.items()
    }


def sorted_heads(c: Config, tensors: Tensors) -> Tensors:
    """Rows of all queries, then all keys, then all values, where published ones go by heads."""
    out: Tensors = {}
    for name, value in tensors.items():
        if ".query_key_value." in name:
            each = value.reshape(c["num_attention_heads"], 3, -1, *value.shape[1:])
            value = each.swapaxes(0, 1).reshape(value.shape)
        out[name.removeprefix("transformer.")] = value
    return out


def longrope(c: Config, tensors: Tensors) -> Tensors:
    rope = c["rope_parameters"]
    if rope["rope_type"] != "longrope":
        return tensors
    factors = {f"rope_factors_{n}.weight": rope[f"{n}_factor"] for n in ("long", "short")}
    return tensors | {name: np.array(value, np.float32) for name, value in factors.items()}


def experts(c: Config, tensors: Tensors) -> Tensors:
    """Gate and up of stacked experts apart; a shared expert's gate has one axis."""
    out: Tensors = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1)):
                out[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            out[f"{name}.weight"] = value
        else:
            out[name] = value[0] if name.endswith("shared_expert_gate.weight") else value
    return out


def latent(c: Config, tensors: Tensors) -> Tensors:
    """Each head's keys transposed and its values, apart."""
    out: Tensors = {}
    nope = c["qk_nope_head_dim"]
    for name, value in experts(c, tensors).items():
        if ".kv_b_proj." in name:
            heads = value.reshape(c["num_attention_heads"], nope + c["v_head_dim"], -1)
            out[name.replace("kv_b", "k_b")] = heads[:, :nope].swapaxes(1, 2)
            out[name.replace("kv_b", "v_b")] = heads[:, nope:]
        else:
            out[name.replace("correction_bias", "correction.bias")] = value
    return out


def gpt_oss(c: Config, tensors: Tensors) -> Tensors:
    """Experts as matrices of rows; gate and up, whose columns take turns, apart."""
    out: Tensors = {}
    for stored, value in tensors.items():
        name = stored.replace("_proj_bias", "_proj.bias").replace("sinks", "sinks.weight")
        if stored.endswith("_proj"):
            name, value = f"{stored}.weight", value.swapaxes(1, 2)
        if "gate_up_proj" in name:
            for i, part in enumerate(("gate", "up")):
                out[name.replace("gate_up_proj", f"{part}_proj")] = value[:, i::2]
        else:
            out[name] = value
    return out


# ------------------------------------------------------------------------------------------- keys


def common_keys(c: Config) -> dict[str, Any]:
    """What the converter writes for most architectures."""
    rope = c.get("rope_parameters") or {}
    keys = {
        "vocab_size": c["vocab_size"],
        "context_length": c.get("max_position_embeddings"),
        "embedding_length": c["hidden_size"],
        "block_count": c["num_hidden_layers"],
        "feed_forward_length": c.get("intermediate_size"),
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": next(
            (c[n] for n in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon") if n in c), None
        ),
        "attention.key_length": c.get("head_dim"),
        "attention.value_length": c.get("head_dim"),
        "rope.freq_base": rope.get("rope_theta"),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = float(rope["factor"])
        keys["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return keys


def turned(c: Config) -> dict[str, Any]:
    """The columns of a head that rotate."""
    share = c["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(head_dim(c) * share)}


def phi3_keys(c: Config) -> dict[str, Any]:
    rope, original = c["rope_parameters"], c["original_max_position_embeddings"]
    keys: dict[str, Any] = turned(c) | {
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": c["sliding_window"] or 0,
    }
    if rope["rope_type"] == "longrope":
        stretch = max(1.0, c["max_position_embeddings"] / original)
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    return keys


def expert_keys(c: Config) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return {
        "expert_count": next(c[name] for name in names if name in c),
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }


def latent_keys(c: Config) -> dict[str, Any]:
    multiplier = c["rope_parameters"].get("mscale_all_dim")
    return expert_keys(c) | {
        "attention.head_count_kv": 1,  # that of the cache
        "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "rope.dimension_count": c["qk_rope_head_dim"],
        "rope.scaling.yarn_log_multiplier": multiplier and 0.1 * multiplier,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "expert_gating_func": 2 if c["model_type"] == "deepseek_v3" else 1,
        "expert_group_count": c["n_group"],
        "expert_group_used_count": c["topk_group"],
    }


def gpt_oss_keys(c: Config) -> dict[str, Any]:
    return expert_keys(c) | {
        "expert_feed_forward_length": c["intermediate_size"],
        "attention.sliding_window": c["sliding_window"],
    }


def write(path: Path, model: Any, arch: Arch) -> Path:
    """transformers' ``model`` as a GGUF file with float32 tensors."""
    config = model.config.to_dict()
    config |= {name: getattr(model.config, name) for name in model.config.attribute_map}
    writer = gguf.GGUFWriter(path, arch.name)
    for name, value in (common_keys(config) | dict(arch.keys(config))).items():
        if value is not None:
            add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
            getattr(writer, add[type(value)])(f"{arch.name}.{name}", value)
    writer.add_tokenizer_model("llama")
    count = config["vocab_size"]
    writer.add_token_list([piece.encode() for piece in VOCAB["pieces"][:count]])
    writer.add_token_scores(VOCAB["scores"][:count])
    writer.add_token_types(VOCAB["types"][:count])
    for name, value in stored_tensors(model, config, arch):
        writer.add_tensor(name, value)
    return finish(writer, path)


def stored_tensors(model: Any, config: Config, arch: Arch) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values as they are stored; a head that is the embedding is not."""
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch.name]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    for name, value in arch.tensors(config, tensors).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored or name.startswith(("blk.", "rope_")), name
        yield stored or name, np.ascontiguousarray(value, np.float32)


# ------------------------------------------------------------------------------------------ models

CONTEXT = 256  # llama.cpp has no smaller one
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ALL, ONE = {"num_key_value_heads": 6}, {"num_key_value_heads": 1}
FAR = {"sliding_window": None}
CLAMPED = {"swiglu_limit": 7.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
RAMP = {**YARN, "truncate": False}
LINEAR = {"rope_type": "linear", "factor": 4.0}

SHORT = [1.0, 1.1, 1.2, 1.5, 1.9, 2.5]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": [4 * f for f in SHORT],
            "partial_rotary_factor": 0.75}  # fmt: skip

GLM = {"head_dim": 10, "partial_rotary_factor": 0.6}  # as wide as the heads together

ARCHS = {
    "llama": Arch(
        "llama", turned, permuted,
        ({}, {**TIED, **ALL, "attention_bias": True}, {**ONE, "rope_scaling": LLAMA3},
         {"rope_scaling": LINEAR}),
    ),
    "mistral": Arch(
        "llama", turned, permuted, ({**FAR, "head_dim": 14}, {**FAR, **TIED, "rope_theta": 1e6})
    ),
    "qwen2": Arch("qwen2", cases=({}, {**TIED, **ALL}, {**ONE, "rope_scaling": YARN})),
    "qwen3": Arch("qwen3", cases=({}, {**TIED, **ALL}, {**ONE, "rope_scaling": YARN})),
    "gemma": Arch("gemma", tensors=plus_one, cases=({}, ALL, ONE)),
    "gemma2": Arch(
        "gemma2",
        lambda c: {n: c[n] for n in ("attn_logit_softcapping", "final_logit_softcapping")}
        | {"attention.sliding_window": c["sliding_window"]},
        plus_one,
        ({}, ALL, {**ONE, "sliding_window": 1}),
    ),
    "gemma3_text": Arch(
        "gemma3",
        lambda c: {
            "rope.freq_base": c["rope_parameters"]["full_attention"]["rope_theta"],
            "attention.sliding_window": c["sliding_window"],
        },
        plus_one,
        ({"layer_types": None, "num_hidden_layers": 7},
         {"layer_types": None, "num_hidden_layers": 6, **ONE}),
    ),
    # llama.cpp leaves the window out, and takes the context for the length: 256 is beyond 16, and
    # not beyond 400.
    "phi3": Arch(
        "phi3", phi3_keys, longrope,
        ({}, {**TIED, **ALL, "rope_scaling": LONGROPE, "max_position_embeddings": 512,
              "original_max_position_embeddings": 16},
         {**ONE, "rope_scaling": LONGROPE, "max_position_embeddings": 512,
          "original_max_position_embeddings": 400}),
    ),
    "olmo2": Arch("olmo2", cases=({}, ALL, {**ONE, "rope_theta": 5e5})),
    "granite": Arch(
        "granite",
        lambda c: turned(c) | {
            "embedding_scale": c["embedding_multiplier"],
            "residual_scale": c["residual_multiplier"],
            "attention.scale": c["attention_multiplier"],
            "logit_scale": c["logits_scaling"],
        },
        permuted,
        ({}, {**TIED, **ALL}, {**ONE, "attention_bias": True}),
    ),
    "stablelm": Arch(
        "stablelm",
        lambda c: turned(c) | {"use_parallel_residual": True},  # of all of them
        stacked_norms,
        ({}, {**ALL, "use_qkv_bias": True},
         {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 1.0}),
    ),
    "smollm3": Arch(
        "smollm3", turned, permuted, ({}, {**UNTIED, **ALL}, {**ONE, "rope_theta": 5e5})
    ),
    "starcoder2": Arch(
        "starcoder2", cases=tuple({**FAR, **c} for c in ({}, {**UNTIED, **ALL}, ONE))
    ),
    "glm": Arch("chatglm", turned, cases=(GLM, {**GLM, **ALL, "attention_bias": False})),
    "glm-fused": Arch("chatglm", turned, fused_qkv, (GLM, {**GLM, **ONE})),
    "gpt2": Arch(
        "gpt2", lambda c: {"feed_forward_length": 4 * c["n_embd"]}, conv1d,
        tuple({"n_positions": CONTEXT, **c} for c in ({}, {"n_head": 3}, {"n_head": 1, **UNTIED})),
    ),
    "gpt_neox": Arch(
        "gptneox", lambda c: turned(c) | {"use_parallel_residual": c["use_parallel_residual"]},
        sorted_heads,
        ({}, {"use_parallel_residual": False, "rotary_pct": 0.5, "rotary_emb_base": 500.0,
              "num_attention_heads": 3},
         {"rotary_pct": 1.0, "num_attention_heads": 5}),
    ),
    "bloom": Arch(
        "bloom", lambda c: {
            "context_length": c["hidden_size"], "feed_forward_length": 4 * c["hidden_size"],
            "attention.head_count_kv": c["num_attention_heads"],
        },
        sorted_heads,
        ({}, {"hidden_size": 60, "n_head": 6}, {"hidden_size": 44, "n_head": 11, **UNTIED}),
    ),
    "glm4": Arch("glm4", turned, cases=({}, {**ALL, "attention_bias": False})),
    "mixtral": Arch(
        "llama", lambda c: turned(c) | expert_keys(c), lambda c, t: permuted(c, experts(c, t)),
        ({}, {**TIED, **ALL}, {**ONE, "num_experts_per_tok": 1, "rope_theta": 1e4}),
    ),
    "qwen2_moe": Arch(
        "qwen2moe", expert_keys, experts,
        ({}, {**ALL, "num_experts_per_tok": 3}, {**ONE, "rope_theta": 1e6}),
    ),
    "qwen3_moe": Arch(
        "qwen3moe", expert_keys, experts,
        ({}, {**TIED, **ALL}, {**ONE, "head_dim": 16, "num_experts_per_tok": 1}),
    ),
    "deepseek_v2": Arch(
        "deepseek2", latent_keys, latent,
        ({"q_lora_rank": 20},
         {**TIED, "q_lora_rank": 20, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5,
          "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ),
    "deepseek_v3": Arch(
        "deepseek2", latent_keys, latent,
        ({}, {"n_group": 1, "topk_group": 1,
              "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ),
    # llama.cpp truncates yarn's ramp, the model does not: with these bases it ends at a whole pair.
    "gpt_oss": Arch(
        "gpt-oss", gpt_oss_keys, gpt_oss,
        ({**CLAMPED, "rope_scaling": {**RAMP, "rope_theta": 673.0}},
         {**CLAMPED, **ONE, "head_dim": 8, "num_experts_per_tok": 1,
          "rope_scaling": {**RAMP, "rope_theta": 26.0}}),
    ),
}  # fmt: skip

CASES = [(kind, i) for kind, arch in ARCHS.items() for i in range(len(arch.cases))]
IDS = [int(i) for i in np.random.default_rng(7).integers(3, 120, 40)]
ROWS = (12, 39)  # those whose logits are kept


def model_of(kind: str, i: int) -> Any:
    """transformers' model of a case."""
    name = kind.partition("-")[0]
    config = {**hf_models.SPECS[name].tiny[0], **ARCHS[kind].cases[i]}
    return hf_models.oracle(config, name, seed=i)
