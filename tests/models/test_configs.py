"""Published configurations, and their missing keys, are read as transformers reads them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import vary_keys
from hf_models import ELSEWHERE, SPECS
from published_configs import PUBLISHED

from graphllm.errors import ConfigError
from graphllm.model.config import DecoderConfig
from graphllm.model.config_keys import Keys

# Keys that a configuration must state; all others have defaults.
SIZES = {"hidden_size": 256, "intermediate_size": 52, "num_hidden_layers": 3,
         "num_attention_heads": 32, "vocab_size": 131}  # fmt: skip
BARE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2",
         "granite", "stablelm", "smollm3", "starcoder2", "glm", "glm4", "gpt2", "gpt_neox",
         "bloom", "mixtral", "qwen2_moe", "qwen3_moe")  # fmt: skip


def read(values: dict[str, Any]) -> DecoderConfig:
    """Return the decoder configuration of a config.json; every key must be known."""
    count = next(values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in values)
    last = f"model.layers.{count - 1}.input_layernorm.weight"
    keys = Keys("config.json", values, (last, "lm_head.weight"), {})
    config = SPECS[values["model_type"]].config(keys)
    keys.finish()
    return config


def saved_by_transformers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as transformers reads and saves it."""
    from transformers import AutoConfig

    given = copy.deepcopy(values)  # transformers modifies its argument
    del given["model_type"]
    return json.loads(AutoConfig.for_model(values["model_type"], **given).to_json_string(False))


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", [name for name, c in PUBLISHED.items() if c["model_type"] not in ELSEWHERE]
)
def test_published_files_are_read_as_transformers_does(name):
    assert read(PUBLISHED[name]) == read(saved_by_transformers(PUBLISHED[name]))


@pytest.mark.parity
@pytest.mark.parametrize("name", BARE)
def test_missing_keys_are_read_as_transformers_does(name):
    values = {"model_type": name, **SIZES}
    assert read(values) == read(saved_by_transformers(values))


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", [n for n, spec in SPECS.items() if n not in ELSEWHERE and spec.is_decoder]
)
def test_varied_keys_agree_or_are_refused(name, tmp_path):
    """A sample of the variations in vary_keys.py."""
    tried = [*vary_keys.varied(SPECS[name], 0), *vary_keys.varied(SPECS[name], 2)]
    for i, (what, config) in enumerate(random.Random(name).sample(tried, 4)):
        (folder := tmp_path / str(i)).mkdir()
        assert vary_keys.outcome(folder, config) in ("equal", "refused", "ours alone"), what


@pytest.mark.parametrize(
    ("name", "fact", "value"),
    [
        ("LLaMA 7B, of early 2023", lambda c: (c.context, c.attention.kv_heads), (2048, 32)),
        ("Vicuna 7B v1.5 16k", lambda c: (c.context, c.layers[0].rope.scale), (16384, 0.25)),
        ("Qwen2.5 7B, stretched as its page says", lambda c: c.context, 131072),
        ("Mistral 7B v0.1", lambda c: {layer.window for layer in c.layers}, {4096}),
        ("Mistral Nemo", lambda c: (c.layers[0].window, c.attention.head_dim), (0, 128)),
        ("Gemma 2B", lambda c: (c.mlp.act, c.tied), ("gelu_pytorch_tanh", True)),
        ("Gemma 2 27B", lambda c: c.attention.scale, 1 / 12),
        ("Phi-3 mini 4k", lambda c: (c.layers[0].window, c.attention.fused), (2047, "rows")),
        (
            "Phi-4 mini",
            lambda c: (c.layers[0].rope.dims, c.layers[0].rope.original_context),
            (96, 4096),
        ),
        ("SmolLM3 3B", lambda c: [e.rope is None for e in c.layers[:5]], [0, 0, 0, 1, 0]),
        ("StableLM 2 12B", lambda c: (c.parallel, c.layers[0].rope.dims), (True, 40)),
        ("StarCoder2 3B", lambda c: (c.tied, c.mlp.gated), (True, False)),
        ("GPT-2", lambda c: (c.context, c.mlp.intermediate_size, c.tied), (1024, 3072, True)),
        ("Pythia 70M", lambda c: (c.layers[0].rope.dims, c.parallel), (16, True)),
        ("BLOOM 560M", lambda c: c.attention.slopes[::15], (2**-0.5, 2**-8)),
        ("XGLM 564M", lambda c: (c.embed_scale, c.position_offset), (32, 2)),
        ("ChatGLM-6B", lambda c: c.attention.prefix_token_ids, (130004, 130001, 130000)),
        ("ChatGLM3 6B", lambda c: (c.layers[0].rope.base, c.attention.kv_heads), (500000, 2)),
    ],
)
def test_facts_of_published_files(name, fact, value):
    assert fact(read(PUBLISHED[name])) == value


OLD = {  # keys that older versions of transformers wrote into every file
    "pruned_heads": {}, "add_cross_attention": False, "use_bfloat16": False, "eos_token_ids": 0,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "remove_invalid_values": False,
    "return_dict_in_generate": False, "output_scores": False, "encoder_no_repeat_ngram_size": 0,
    "tf_legacy_loss": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["LLaMA 7B, of early 2023", "GPT-2"])
def test_keys_of_older_versions_change_nothing(name):
    assert read({**PUBLISHED[name], **OLD}) == read(PUBLISHED[name])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Llama 3.2 1B", {"dual_chunk": True}, "does not know the key 'dual_chunk'"),
        ("Llama 3.2 1B", {"pruned_heads": {"0": [1]}}, r"pruned_heads = \{'0': \[1\]\} is not sup"),
        ("Llama 3.2 1B", {"add_cross_attention": True}, "add_cross_attention = True is not sup"),
        ("Llama 3.2 1B", {"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ("Llama 3.2 1B", {"rope_scaling": {"type": "ntk-parts"}}, "rope_type 'ntk-parts' is not"),
        ("Llama 3.2 1B", {"original_max_position_embeddings": 1}, "original_max_position_embed"),
        ("Mistral 7B v0.1", {"rope_scaling": {"type": "dynamic"}}, "factor = None is not a number"),
        ("Mistral 7B v0.1", {"layer_types": ["full_attention"]}, "not know the key 'layer_types'"),
        ("Qwen2.5 7B, stretched as its page says", {"layer_types": ["sliding_attention"] * 28},
         "layer_types has windows, but there is no sliding_window"),
        ("Gemma 3 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("Phi-4 mini", {"lm_head_bias": True}, "lm_head_bias = True is not supported"),
        ("Llama 3.2 1B", {"hidden_activation": "gelu"}, "not know the key 'hidden_activation'"),
        ("Llama 3.2 1B", {"rotary_dim": 32}, "does not know the key 'rotary_dim'"),
        ("Llama 3.2 1B", {"partial_rotary_factor": 0.5}, "0.5 is not supported by this"),
        ("Llama 3.2 1B", {"rope_scaling": None, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0}}}, "must not be given per"),
        ("Gemma 3 1B", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         "must be given per layer type"),
        ("Gemma 2B", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ("Mistral 7B v0.1", {"sliding_window": 0}, "sliding_window = 0 is not in"),
        ("Gemma 2 27B", {"sliding_window": 0}, "sliding_window = 0 is not in"),
        ("Phi-4 mini", {"partial_rotary_factor": 0.5}, "short_factor is not a list of 32"),
        ("StarCoder2 3B", {"norm_type": "rms_norm"}, "norm_type = 'rms_norm' is not supported"),
        ("SmolLM3 3B", {"no_rope_layers": [1, 0]}, "no_rope_layers is not a list of 36 flags"),
        ("Stable Code 3B", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor = 2.0 is not"),
        ("gpt-oss 20B", {"rope_scaling": None}, "rope_scaling is missing"),
        ("GPT-NeoX 20B", {"rotary_pct": None, "partial_rotary_factor": 1.0}, "without rotary_pct"),
        ("GPT-2", {"layer_norm_eps": 0.1}, "does not know the key 'layer_norm_eps'"),
        ("BLOOM 560M", {"layer_norm_eps": 0.1}, "does not know the key 'layer_norm_eps'"),
        ("GPT-2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("XGLM 564M", {"pad_token_id": 5}, "pad_token_id above 1 is not supported"),
        ("ChatGLM-6B", {"quantization_bit": 4}, "quantization_bit = 4 is not supported"),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused(name, change, words):
    with pytest.raises(ConfigError, match=words):
        read(PUBLISHED[name] | change)
