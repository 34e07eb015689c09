"""Small random models as GGUF files, with odd sizes, and the same weights for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf_files import finish

from graphllm.formats.quantization import quantise
from graphllm.graph.dtype import dtype

VOCAB = json.loads((Path(__file__).parents[1] / "golden" / "tiny_spm.json").read_text())
# dim, heads, kv heads, head width, hidden, layers: multiples of nothing in particular
DIM, HEADS, KV, WIDTH, HIDDEN, LAYERS = 60, 6, 2, 10, 52, 3


def llama_weights(seed: int = 0, tied: bool = False, bias: bool = False) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name, with q and k rows in Hugging Face's order.

    ``bias``: of q, k and v, as Qwen2 has them.
    """
    rng = np.random.default_rng(seed)
    count = len(VOCAB["pieces"])

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def near_one(width: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(count, DIM), "model.norm.weight": near_one(DIM)}
    if not tied:
        weights["lm_head.weight"] = matrix(count, DIM)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        weights |= {
            at + "input_layernorm.weight": near_one(DIM),
            at + "post_attention_layernorm.weight": near_one(DIM),
            at + "self_attn.q_proj.weight": matrix(HEADS * WIDTH, DIM),
            at + "self_attn.k_proj.weight": matrix(KV * WIDTH, DIM),
            at + "self_attn.v_proj.weight": matrix(KV * WIDTH, DIM),
            at + "self_attn.o_proj.weight": matrix(DIM, HEADS * WIDTH),
            at + "mlp.gate_proj.weight": matrix(HIDDEN, DIM),
            at + "mlp.up_proj.weight": matrix(HIDDEN, DIM),
            at + "mlp.down_proj.weight": matrix(DIM, HIDDEN),
        }
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)) if bias else ():
            weights[f"{at}self_attn.{name}_proj.bias"] = 0.3 * rng.standard_normal(
                heads * WIDTH
            ).astype(np.float32)
    return weights


def gemma3_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Gemma 3's: tied, with norms of queries and keys, and around attention and MLP."""
    rng, weights = np.random.default_rng([seed, 1]), llama_weights(seed, tied=True)
    for i in range(LAYERS):
        norms = {"self_attn.q_norm": WIDTH, "self_attn.k_norm": WIDTH}
        norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), DIM)
        for name, width in norms.items():
            values = 1 + 0.2 * rng.standard_normal(width)
            weights[f"model.layers.{i}.{name}.weight"] = values.astype(np.float32)
    return weights


def write_tiny(path: Path, arch: str, kind: str = "", context: int = 128) -> Path:
    """A small random model of ``arch``: llama, qwen2, or gemma3 with a window of 16 in two layers
    of three."""
    if arch != "gemma3":
        return write_llama(path, llama_weights(bias=arch == "qwen2"), arch, kind, context)
    return write_llama(path, gemma3_weights(), arch, kind, context)


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA3_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def _interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from halves to pairs, as GGUF stores llama's q and k."""
    half = w.reshape(heads, 2, -1, w.shape[1])
    return np.ascontiguousarray(half.swapaxes(1, 2)).reshape(w.shape)


def write_llama(
    path: Path, weights: dict[str, np.ndarray], arch: str = "llama", kind: str = "",
    context: int = 128, **extra: float,
) -> Path:  # fmt: skip
    """The weights as a GGUF file of ``arch`` (llama, qwen2 or gemma3), matrices in the block format
    ``kind`` or all as they are; ``extra`` keys are added."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(context)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch == "llama":
        writer.add_rope_dimension_count(WIDTH)
    if arch == "gemma3":
        writer.add_key_length(WIDTH)
        writer.add_value_length(WIDTH)
        writer.add_sliding_window(16)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    for key, value in extra.items():
        writer.add_float32(f"{arch}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.encode() for piece in VOCAB["pieces"]])
    writer.add_token_scores(VOCAB["scores"])
    writer.add_token_types(VOCAB["types"])
    for name, value in weights.items():
        value = _permuted(name, value) if arch == "llama" else value
        form = None
        if kind and value.ndim == 2:
            value, form = quantise(value, dtype(kind)), gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(stored_name(name, arch), value, raw_dtype=form)
    return finish(writer, path)


def stored_name(name: str, arch: str = "llama") -> str:
    """What GGUF calls a weight."""
    names = GEMMA3_NAMES if arch == "gemma3" else NAMES
    path, kind = name.rsplit(".", 1)
    parts = path.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{names['.'.join(parts[3:])]}.{kind}"
    return f"{names[path]}.{kind}"


def _permuted(name: str, value: np.ndarray) -> np.ndarray:
    if name.endswith("q_proj.weight"):
        return _interleaved(value, HEADS)
    return _interleaved(value, KV) if name.endswith("k_proj.weight") else value


def hf_model(arch: str, weights: dict[str, np.ndarray]):
    """transformers' Llama or Qwen2 with the same weights, float32, eager attention."""
    import torch
    import transformers as hf

    config_class, model_class = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
    }[arch]
    tied = "lm_head.weight" not in weights
    config = config_class(
        vocab_size=len(VOCAB["pieces"]), hidden_size=DIM, intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
        head_dim=WIDTH, rms_norm_eps=1e-5, max_position_embeddings=128, tie_word_embeddings=tied,
        attn_implementation="eager",
    )  # fmt: skip
    model = model_class(config).eval()
    state = {name: torch.from_numpy(value) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    model.tie_weights()
    return model
