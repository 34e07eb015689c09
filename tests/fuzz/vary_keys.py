"""Campaign of configurations in which one key has another value: ``vary_keys.py [FAMILY ...]``.

Every small model of a family is built for each value of each key that any family knows, and without
each of its own keys. graphllm must compute what transformers computes, or reject the file. Prints
the number of cases by outcome as JSON. Cases that differ silently are printed on standard error,
and the exit code is 1. All families take an hour on one core.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hf_models import ELSEWHERE, SPECS, config_of, distance, logits_of, randomise

import graphllm
from graphllm.errors import GraphllmError
from graphllm.model.spec import ModelSpec

IDS = [int(i) for i in np.random.default_rng(7).integers(3, 120, 24)]
FLAG, NUMBERS = (True, False, None), (0.5, 1.0, 3, None)
ACTS = (
    "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "swish", "relu", "quick_gelu",
    "gelu_python", "mish", "sigmoid", None,
)  # fmt: skip
STRETCH = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = (
    None, {}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2}, {"type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", **STRETCH}, {"type": "yarn", "factor": 4.0},
    {"type": "yarn", **STRETCH}, {"rope_type": "yarn", **STRETCH, "rope_theta": 300.0},
    {"type": "yarn", **STRETCH, "attention_factor": 0.8, "beta_fast": 8, "truncate": False},
    {"type": "yarn", **STRETCH, "mscale": 0.5, "mscale_all_dim": 1.0}, {**LLAMA3, **STRETCH},
    {"rope_type": "default", "rope_theta": 333.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "proportional"},
)  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "qk_layernorm",
         "use_parallel_residual", "tie_word_embeddings", "use_sliding_window", "norm_topk_prob",
         "scale_embedding", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
         "add_cross_attention", "apply_residual_connection_post_layernorm", "is_decoder",
         "use_bidirectional_attention", "use_qk_norm", "lm_head_bias"), FLAG,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTS),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPES),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.25, 0.3, *NUMBERS)),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), (0.1, 1e-3, None)
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier",
         "routed_scaling_factor", "swiglu_limit", "swiglu_alpha", "attn_logit_softcapping",
         "final_logit_softcapping", "query_pre_attn_scalar"), NUMBERS,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (4, 6, None)),
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads"), (2, 1)),
    "rope_theta": (500.0, 1e6), "rotary_emb_base": (500, None), "rope_local_base_freq": (300.0,),
    "rope_interleave": (True, False), "rotary_dim": (4,), "sliding_window": (5, 1, 24, 0, None),
    "max_window_layers": (0, 1, 2, None), "sliding_window_pattern": (1, 2, 3),
    "_sliding_window_pattern": (1, 2, 3), "head_dim": (8, 12, 16, None),
    "num_key_value_heads": (1, 2, 6, None), "num_experts_per_tok": (1, 2, 4, None),
    "experts_per_token": (1, 2), "n_shared_experts": (0, 1, 3), "moe_intermediate_size": (11,),
    "shared_expert_intermediate_size": (0, 11), "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([0], [2], []), "first_k_dense_replace": (0, 2, 3), "n_group": (1, 2, 3),
    "topk_group": (1, 2), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"), "q_lora_rank": (10, None), "kv_lora_rank": (12,),
    "qk_nope_head_dim": (6,), "qk_rope_head_dim": (8,), "v_head_dim": (7,), "qk_head_dim": (14, 30),
    "moe_layer_freq": (1, 2), "num_nextn_predict_layers": (0, 1), "n_inner": (33, None),
    "no_rope_layer_interval": (1, 2, 3), "intermediate_size": (33,), "pretraining_tp": (1,),
    "max_position_embeddings": (24, 64), "original_max_position_embeddings": (16, 64),
    "pad_token_id": (0, 1, 5, None), "vocab_size": (100,), "clip_qkv": (0.1,),
}  # fmt: skip


def changes(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs (description of the change, changed configuration)."""
    yield "nothing", dict(config)
    for key in config:
        if key != "model_type":
            yield f"no {key}", {k: v for k, v in config.items() if k != key}
    count = next(config[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if k in config)
    near, far = "sliding_attention", "full_attention"
    own: dict[str, tuple[Any, ...]] = {
        "layer_types": ([far] * count, [near] * count, ([near, far] * count)[:count], [near]),
        "no_rope_layers": ([0] * count, [1] * count, ([1, 0] * count)[:count], []),
    }
    for key, values in {**VALUES, **own}.items():
        for value in values:
            if key not in config or config[key] != value:
                yield f"{key} = {value}", {**config, key: value}


def outcome(folder: Path, config: Mapping[str, Any]) -> str:
    """Return "equal", "refused" (by graphllm), "ours alone" (refused by transformers), or the
    difference."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    try:
        want = _transformers(folder)
    except Exception:  # a meaningless configuration may raise anything
        want = None
    path.write_text(json.dumps(config))
    try:
        options = {"device": "reference", "kv_type": "f32", "context": len(IDS)}
        have = graphllm.load(folder, **options).logits(IDS)
    except GraphllmError:
        return "refused"
    if want is None:
        return "ours alone"
    apart = distance(have, want)
    return "equal" if apart <= 1e-4 else f"{apart:.2g} of the range apart"


def _transformers(folder: Path) -> np.ndarray:
    """Build and save a random transformers model of this configuration; return its logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.from_pretrained(folder)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, **plain)
    randomise(model)
    model.eval().save_pretrained(folder)
    return logits_of(model, IDS)


def varied(spec: ModelSpec, variant: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changes of one small model of a family."""
    yield from changes({**config_of(spec, variant), "model_type": spec.name})


def main() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found: collections.Counter[str] = collections.Counter()
    for name in sys.argv[1:] or [
        n for n, s in SPECS.items() if n not in ELSEWHERE and s.is_decoder
    ]:
        for variant in range(len(SPECS[name].tiny)):
            for what, config in varied(SPECS[name], variant):
                with tempfile.TemporaryDirectory() as folder:
                    result = outcome(Path(folder), config)
                found[result if "range" not in result else "different"] += 1
                if "range" in result:
                    print(f"{name} {variant}, {what}: {result}", file=sys.stderr)
    print(json.dumps(found))
    sys.exit(found["different"] > 0)


if __name__ == "__main__":
    main()
