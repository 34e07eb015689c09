"""Write a GGUF file with the shape of a real model and random weights, for speed measurements.

    pip install 'graphllm[test]'
    python benchmarks/make_random_gguf.py qwen2-1.5b q4_k_m /tmp/qwen2-1.5b-q4_k_m.gguf

The tensors are those of `graphllm bench --random`; an artificial vocabulary lets llama.cpp load the
file, too. All matrices have one format (llama.cpp's own files use more bits for the head), except
for q4_k_m, which is llama.cpp's mix of Q4_K and Q6_K.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from graphllm.checkpoints.model_shapes import SHAPES, TYPES
from graphllm.checkpoints.random_weights import RandomCheckpoint


def add_keys(writer: gguf.GGUFWriter, file: RandomCheckpoint) -> None:
    """Write the metadata, except for the architecture, which the writer has."""
    for key, value in file.metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write a SentencePiece vocabulary: three special tokens, all bytes, and artificial words."""
    special, numbered = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    words = [f"w{i}" for i in range(size - len(special) - len(numbered))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *numbered, *words])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))


def write(file: RandomCheckpoint, path: Path) -> None:
    """Write metadata, vocabulary and tensors."""
    writer = gguf.GGUFWriter(path, file.architecture)
    add_keys(writer, file)
    add_vocabulary(writer, file.tensors["token_embd.weight"].shape[0])
    for name, info in file.tensors.items():
        raw = file.raw(name)
        if len(info.shape) == 1:
            writer.add_tensor(name, raw.reshape(-1).view(np.float32))
        else:
            raw = raw.reshape(*info.shape[:-1], -1)  # experts are a tensor of three axes
            writer.add_tensor(
                name, raw, raw_dtype=gguf.GGMLQuantizationType[str(info.dtype).upper()]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("path", type=Path)
    a = parser.parse_args()
    write(RandomCheckpoint(a.shape, a.type), a.path)


if __name__ == "__main__":
    main()
