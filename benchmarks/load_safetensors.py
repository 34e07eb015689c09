"""Time to open a directory of safetensors in the page cache: a random llama in bf16.

    python benchmarks/load_safetensors.py FOLDER [--shape llama-1b] [--layers 20] [--shards 2]

Llama 3.2 1B with 20 layers instead of 16 has 3.0 GB. The directory FOLDER/<shape>-<layers> is
created once, with its `config.json`, and reused. Each figure is the best of five: opening the
files, which reads their headers; a view of each tensor; and, as an upper bound, the rate at which
one thread reads all bytes. Then `graphllm.load` runs on the CPU in separate processes that report
their peak memory: with the stored weights, and quantized to ``--type``.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from graphllm.checkpoints.model_shapes import SHAPES, ModelShape
from graphllm.checkpoints.random_weights import random_bytes
from graphllm.graph.dtype import BF16
from graphllm.weights.safetensors import Safetensors

_ROUNDS = 5
Tensors = dict[str, tuple[int, ...]]


def tensors(shape: ModelShape) -> Tensors:
    """Return the names and shapes of a llama in Hugging Face's layout."""
    dim, width = shape.dim, shape.head_width
    q, kv = shape.heads * width, shape.kv_heads * width
    found: Tensors = {"model.embed_tokens.weight": (shape.vocab, dim)}
    for i in range(shape.layers):
        found |= {
            f"model.layers.{i}.{name}.weight": axes
            for name, axes in (
                ("input_layernorm", (dim,)),
                ("self_attn.q_proj", (q, dim)),
                ("self_attn.k_proj", (kv, dim)),
                ("self_attn.v_proj", (kv, dim)),
                ("self_attn.o_proj", (dim, q)),
                ("post_attention_layernorm", (dim,)),
                ("mlp.gate_proj", (shape.intermediate_size, dim)),
                ("mlp.up_proj", (shape.intermediate_size, dim)),
                ("mlp.down_proj", (dim, shape.intermediate_size)),
            )
        }
    found["model.norm.weight"] = (dim,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab, dim)
    return found


def config(shape: ModelShape) -> dict[str, object]:
    """Return the keys of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.dim,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_base,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_file(path: Path, named: Tensors) -> None:
    """Write a safetensors file; norms are 1, matrices repeat a pattern of normal numbers."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, axes in named.items():
        start, end = end, end + math.prod(axes) * BF16.nbytes
        header[name] = {"dtype": "BF16", "shape": axes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pattern = random_bytes(BF16)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for axes in named.values():
            nbytes = math.prod(axes) * BF16.nbytes
            if len(axes) == 1:
                file.write(np.ones(axes, BF16.numpy).tobytes())
            else:
                for start in range(0, nbytes, len(pattern)):
                    file.write(pattern[: nbytes - start].data)


def write(folder: Path, shape: ModelShape, shards: int) -> None:
    """Write the directory. The index, or the single file, comes last and marks it complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1))
    parts: list[Tensors] = [{} for _ in range(shards)]
    named = tensors(shape)
    whole, before = sum(map(math.prod, named.values())), 0
    for name, axes in named.items():
        parts[before * shards // whole][name] = axes
        before += math.prod(axes)
    if shards == 1:
        write_file(folder / "partial", parts[0])
        (folder / "partial").rename(folder / "model.safetensors")
        return
    homes = {}
    for number, part in enumerate(parts, 1):
        shard = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_file(folder / shard, part)
        homes |= dict.fromkeys(part, shard)
    text = json.dumps({"metadata": {"total_size": BF16.nbytes * whole}, "weight_map": homes})
    (folder / "model.safetensors.index.json").write_text(text)


def best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run."""

    def times() -> Iterator[float]:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            work()
            yield time.perf_counter() - start

    return min(times())


def views(file: Safetensors) -> int:
    """Return the bytes of all tensors without reading them."""
    return sum(file.raw(name).nbytes for name in file.tensors)


def read(file: Safetensors) -> int:
    """Read all bytes; return a checksum."""
    words = (file.raw(name).reshape(-1).view(np.uint64) for name in file.tensors)
    return sum(int(each.max()) for each in words)


# Script of the separate process: load, compute one token, print load time and peak resident bytes.
_LOAD = """
import resource, sys, graphllm
llm = graphllm.load(sys.argv[1], type=sys.argv[2] or None, device="cpu", context=512)
llm.logits([1])
print(llm.load_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def loaded(folder: Path, kind: str) -> tuple[float, float]:
    """Return seconds and peak bytes of the fastest of three processes that load the directory."""
    words = [sys.executable, "-c", _LOAD, str(folder), kind]
    runs = [subprocess.run(words, capture_output=True, text=True, check=True) for _ in range(3)]
    seconds, nbytes = min(tuple(map(float, run.stdout.split())) for run in runs)
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--type", default="q8_0")
    a = parser.parse_args()
    shape = replace(SHAPES[a.shape], layers=a.layers)
    folder = a.folder / f"{a.shape}-{a.layers}"
    if not any(folder.glob("model.safetensors*")):
        print(f"writing {folder} ...", flush=True)
        write(folder, shape, a.shards)
    with Safetensors(folder) as file:
        nbytes = views(file)
        print(f"{folder}: {len(file.tensors)} tensors, {nbytes / 1e9:.2f} GB, bf16")
        print(f"open, headers read  {best(lambda: Safetensors(folder).close()) * 1e3:8.2f} ms")
        print(f"a view of each      {best(lambda: views(file)) * 1e3:8.2f} ms")
        seconds = best(lambda: read(file))
        print(f"all bytes read      {seconds * 1e3:8.2f} ms   {nbytes / seconds / 1e9:.1f} GB/s")
    for kind in ("", a.type):
        seconds, most = loaded(folder, kind)
        share = f"{most / 1e6:.0f} MB peak, {most / nbytes:.2f} of the file"
        print(f"load, {kind or 'as stored':<12}  {seconds * 1e3:8.0f} ms   {share}")


if __name__ == "__main__":
    main()
