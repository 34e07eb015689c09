"""Writes a GGUF file of a real model's shape with random weights: for speed, not for sense.

    pip install 'graphllm[test]'
    python benchmarks/make_random_gguf.py qwen2-1.5b q4_k_m /tmp/qwen2-1.5b-q4_k_m.gguf

q4_k_m is llama.cpp's usual mix: Q4_K, with Q6_K for the head and for the value and down projections
of the layers that its quantiser gives more bits.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from graphllm.dtype import dtype


@dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    bias: bool = False


SHAPES = {
    "qwen2-1.5b": Shape("qwen2", 28, 1536, 12, 2, 8960, 151_936, bias=True),
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128_256),
    "mistral-7b": Shape("llama", 32, 4096, 32, 8, 14336, 32_000),
}
TYPES = ("q4_k_m", "q8_0", "q4_0", "f16")
# Bytes of a block that hold float16 scales: they must be small finite numbers.
SCALES = {"q4_k": (0, 2), "q6_k": (208,), "q8_0": (0,), "q4_0": (0,)}


def random_rows(rng: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """Random stored bytes [rows, row_bytes] of a format, or float16 values."""
    if kind == "f16":
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return (values / columns**0.5).astype(np.float16)
    form = dtype(kind)
    blocks = rng.integers(0, 256, (rows, columns // form.block, form.nbytes), dtype=np.uint8)
    scale = np.float16(2e-3 / columns**0.5).tobytes()
    for at in SCALES[kind]:
        blocks[..., at : at + 2] = np.frombuffer(scale, np.uint8)
    return blocks.reshape(rows, -1)


def kind_of(name: str, layer: int, layers: int, mix: str) -> str:
    """The format of a matrix in this mix."""
    if mix != "q4_k_m":
        return mix
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    rich = name == "head" or (name in ("attn_v", "ffn_down") and more)
    return "q6_k" if rich else "q4_k"


def write(shape: Shape, mix: str, path: Path) -> None:
    writer, rng = gguf.GGUFWriter(path, shape.arch), np.random.default_rng(0)
    head_dim = shape.dim // shape.heads
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    special, numbered = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    words = [f"w{i}" for i in range(shape.vocab - len(special) - len(numbered))]
    writer.add_token_list([*special, *numbered, *words])
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))

    def matrix(name: str, rows: int, columns: int, kind: str) -> None:
        raw = None if kind == "f16" else gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(name, random_rows(rng, rows, columns, kind), raw_dtype=raw)

    def vector(name: str, width: int, value: float) -> None:
        writer.add_tensor(name, np.full(width, value, np.float32))

    matrix("token_embd.weight", shape.vocab, shape.dim, kind_of("head", 0, shape.layers, mix))
    vector("output_norm.weight", shape.dim, 1.0)
    kv = shape.kv_heads * head_dim
    for i in range(shape.layers):
        vector(f"blk.{i}.attn_norm.weight", shape.dim, 1.0)
        vector(f"blk.{i}.ffn_norm.weight", shape.dim, 1.0)
        for name, rows, columns in (
            ("attn_q", shape.dim, shape.dim),
            ("attn_k", kv, shape.dim),
            ("attn_v", kv, shape.dim),
            ("attn_output", shape.dim, shape.dim),
            ("ffn_gate", shape.hidden, shape.dim),
            ("ffn_up", shape.hidden, shape.dim),
            ("ffn_down", shape.dim, shape.hidden),
        ):
            kind = kind_of(name, i, shape.layers, mix)
            matrix(f"blk.{i}.{name}.weight", rows, columns, kind)
            if shape.bias and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"blk.{i}.{name}.bias", rows, 0.01)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("path", type=Path)
    a = parser.parse_args()
    write(SHAPES[a.shape], a.type, a.path)


if __name__ == "__main__":
    main()
