"""Small random ChatGLM models of both generations, as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from chatglm_oracle import Weights, is_first
from gguf_files import finish

VOCAB = json.loads((Path(__file__).parents[1] / "golden" / "tiny_spm.json").read_text())


def shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    return _first_shapes(c) if is_first(c) else _second_shapes(c)


def _first_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, inner = c["hidden_size"], c["inner_hidden_size"]
    found: dict[str, tuple[int, ...]] = {
        "transformer.word_embeddings.weight": (c["vocab_size"], dim)
    }
    if not c.get("tie_word_embeddings"):
        found["lm_head.weight"] = (c["vocab_size"], dim)
    linears = {
        "attention.query_key_value": (3 * dim, dim),
        "attention.dense": (dim, dim),
        "mlp.dense_h_to_4h": (inner, dim),
        "mlp.dense_4h_to_h": (dim, inner),
    }
    for i in range(c["num_layers"]):
        at = f"transformer.layers.{i}."
        for name, shape in linears.items():
            found |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{at}{name}.weight": (dim,), f"{at}{name}.bias": (dim,)}
        found[f"{at}attention.rotary_emb.inv_freq"] = (dim // c["num_attention_heads"] // 4,)
    return found | {f"transformer.final_layernorm.{kind}": (dim,) for kind in ("weight", "bias")}


def _second_shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn, width = c["hidden_size"], c["ffn_hidden_size"], c["kv_channels"]
    queries = c["num_attention_heads"] * width
    keys = c["multi_query_group_num"] * width if c["multi_query_attention"] else queries
    every = c.get("add_bias_linear", False)
    linears = {
        "self_attention.query_key_value": (queries + 2 * keys, dim, every or c["add_qkv_bias"]),
        "self_attention.dense": (dim, queries, every),
        "mlp.dense_h_to_4h": (2 * ffn, dim, every),
        "mlp.dense_4h_to_h": (dim, ffn, every),
    }
    kinds = ("weight",) if c.get("rmsnorm", True) else ("weight", "bias")
    vocab = c["padded_vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (vocab, dim),
        "transformer.rotary_pos_emb.inv_freq": (width // 4,),
    }
    if not c.get("tie_word_embeddings"):
        found["transformer.output_layer.weight"] = (vocab, dim)
    for i in range(c["num_layers"]):
        at = f"transformer.encoder.layers.{i}."
        for name, (rows, columns, biased) in linears.items():
            found[f"{at}{name}.weight"] = (rows, columns)
            if biased:
                found[f"{at}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found |= {f"{at}{name}.{kind}": (dim,) for kind in kinds}
    if c.get("post_layer_norm", True):
        found |= {f"transformer.encoder.final_layernorm.{kind}": (dim,) for kind in kinds}
    return found


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape) / (shape[-1] ** 0.5 if len(shape) > 1 else 5)
        found[name] = (values + name.endswith("norm.weight")).astype(np.float32)
    return found


def write(folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A directory with random weights, which it returns."""
    weights = random_weights(config)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "chatglm", **config}))
    return weights


def write_gguf(path: Path, c: Mapping[str, Any], weights: Weights) -> Path:
    """A model of the second generation as a GGUF file, which llama.cpp loads, too."""
    writer = gguf.GGUFWriter(path, "chatglm")
    writer.add_context_length(c["seq_length"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["ffn_hidden_size"])
    writer.add_block_count(c["num_layers"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["multi_query_group_num"])
    writer.add_layer_norm_rms_eps(c["layernorm_epsilon"])
    writer.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"] // 2)
    writer.add_rope_freq_base(10_000.0 * c.get("rope_ratio", 1.0))
    count = c["padded_vocab_size"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.encode() for piece in VOCAB["pieces"][:count]])
    writer.add_token_scores(VOCAB["scores"][:count])
    writer.add_token_types(VOCAB["types"][:count])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.CHATGLM, c["num_layers"])
    for name, value in weights.items():
        if "inv_freq" not in name:
            plain = name.removeprefix("transformer.")
            writer.add_tensor(names.get_name(plain, (".weight", ".bias")), value)
    return finish(writer, path)
