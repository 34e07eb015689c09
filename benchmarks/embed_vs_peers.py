"""Compare embeddings with sentence-transformers and ONNX Runtime, interleaved in one process.

    pip install sentence-transformers onnxruntime
    python benchmarks/embed_vs_peers.py minilm -t 2 -r 5
    python benchmarks/embed_vs_peers.py minilm --type q8_0 --onnx model.onnx

The texts are as ragged as those of a search index: 1 to 60 words, random ones of the vocabulary.
Rates are texts per second, medians of the rounds after a first one that warms up; ratios are those
of the same round, with the smallest and largest. ``padded``: this project's own encoder on texts of
one length, the longest, which is what padding would compute.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.embedding.embedding_model import EmbeddingModel
from graphllm.profiler.roofline import cpu_name

_PEER_BATCH = 32  # texts; the default of sentence-transformers
Embed = Callable[[list[str]], np.ndarray]


def ragged_texts(model: EmbeddingModel, count: int) -> list[str]:
    """Texts of 1 to 60 whole words of the vocabulary."""
    pieces = [model.tokenizer.piece(i).decode("utf-8", "replace") for i in range(2000, 20000)]
    words, rng = [p.strip() for p in pieces if p.strip().isalpha()], random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(count)]


def sentence_transformers(path: Path, threads: int) -> Embed:
    """The peer on torch, in float32."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    peer = SentenceTransformer(str(path), device="cpu")
    return lambda texts: peer.encode(
        texts, batch_size=_PEER_BATCH, normalize_embeddings=True, show_progress_bar=False
    )


def onnx_runtime(path: Path, directory: Path, threads: int) -> Embed:
    """The peer on ONNX Runtime, in batches of texts of similar length."""
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(order), _PEER_BATCH):
            part = order[first : first + _PEER_BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in part])
            ids = np.array([each.ids for each in encoded], np.int64)
            mask = np.array([each.attention_mask for each in encoded], np.int64)
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
            hidden = session.run(None, {n: v for n, v in feeds.items() if n in names})[0]
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
            found |= dict(zip(part, mean / np.linalg.norm(mean, axis=1, keepdims=True)))
        return np.stack([found[i] for i in range(len(texts))])

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--type", help="Block format of the weights.")
    parser.add_argument("--onnx", type=Path, help="The same model as ONNX file.")
    parser.add_argument("-n", "--texts", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    opts = parser.parse_args()
    path = checkpoint_path(opts.model)
    model = graphllm.EmbeddingModel.load(opts.model, type=opts.type, threads=opts.threads)
    texts = ragged_texts(model, opts.texts)
    longest = max(texts, key=lambda text: len(model.tokenizer.encode(text)))
    sides: dict[str, tuple[Embed, list[str]]] = {
        "graphllm": (model.embed, texts),
        "padded": (model.embed, [longest] * len(texts)),
        "sentence-transformers": (sentence_transformers(path, opts.threads), texts),
    }
    if opts.onnx:
        sides["onnxruntime"] = onnx_runtime(opts.onnx, path, opts.threads), texts
    print(
        f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.texts} texts, {opts.type or 'f32'}"
    )
    rates: dict[str, list[float]] = {name: [] for name in sides}
    found = {}
    for _ in range(opts.rounds + 1):
        for name, (embed, own) in sides.items():
            start = time.perf_counter()
            found[name] = embed(own)
            rates[name].append(len(own) / (time.perf_counter() - start))
    own = rates["graphllm"][1:]
    for name, all_rates in rates.items():
        ratios = [a / b for a, b in zip(own, all_rates[1:])]
        cosine = "" if name == "padded" else f"{(found[name] * found['graphllm']).sum(1).min():.6f}"
        print(
            f"{name:<22} {median(all_rates[1:]):8.1f} texts/s   "
            f"{median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})   {cosine}"
        )


if __name__ == "__main__":
    main()
