"""Compare embeddings with sentence-transformers and ONNX Runtime, in pairs, in one process.

    pip install sentence-transformers onnxruntime onnx
    python benchmarks/embed_vs_peers.py minilm -t 2 -r 5
    python benchmarks/embed_vs_peers.py minilm --type q8_0
    python benchmarks/embed_vs_peers.py minilm --padded

The texts are as ragged as those of a search index: 1 to 60 words, random ones of the vocabulary.
Rates are texts per second, tokenisation and pooling included; see `paired_rounds` for pairs and
ratios. Peers get what makes them fastest: sentence-transformers sorts texts by length itself; for
ONNX Runtime they are sorted by their number of tokens, the graph has the fused operators of its own
optimizer for BERT, and int8 is its own dynamic quantisation. The fastest of several batch sizes
counts for each.

``--padded``: this project's encoder on sequences of 1 to 128 tokens, and on as many of 128 tokens,
which is what padding would compute.

AVX2 alone: NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= for this project, ATEN_CPU_CAPABILITY=avx2,
ONEDNN_MAX_CPU_ISA=AVX2 and MKL_ENABLE_INSTRUCTIONS=AVX2 for torch. ONNX Runtime cannot be limited.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from paired_rounds import measure, report, seconds_of

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.embedding.embedding_model import EmbeddingModel
from graphllm.profiler.roofline import cpu_name

PEER_BATCHES = (8, 16, 32)  # texts; 32 is the default of sentence-transformers
LONGEST = 128  # tokens of the sequences of --padded
Embed = Callable[[list[str]], np.ndarray]


def ragged_texts(model: EmbeddingModel, count: int) -> list[str]:
    """Texts of 1 to 60 whole words of the vocabulary."""
    pieces = [model.tokenizer.piece(i).decode("utf-8", "replace") for i in range(2000, 20000)]
    words, rng = [p.strip() for p in pieces if p.strip().isalpha()], random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(count)]


def fastest(name: str, by_batch: Mapping[int, Embed], texts: list[str]) -> Embed:
    """The function of the batch size with the smallest of two times."""
    seconds = {
        size: min(seconds_of(lambda embed=embed: embed(texts)) for _ in range(2))
        for size, embed in by_batch.items()
    }
    best = min(seconds, key=lambda size: seconds[size])
    tried = ", ".join(f"{size}: {len(texts) / s:.0f}" for size, s in seconds.items())
    print(f"{name}: batches of {best} (texts/s by size: {tried})", flush=True)
    return by_batch[best]


# ------------------------------------------------------------------------------------------- peers


def sentence_transformers(path: Path, threads: int) -> dict[int, Embed]:
    """The peer on torch, in float32."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    peer = SentenceTransformer(str(path), device="cpu")

    def embed(texts: list[str], size: int) -> np.ndarray:
        return peer.encode(
            texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False
        )

    return {size: lambda texts, size=size: embed(texts, size) for size in PEER_BATCHES}


def export_onnx(path: Path, target: Path) -> None:
    """Write the encoder as ONNX file, with the fused operators of ONNX Runtime's optimizer."""
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    class HiddenStates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            token_type_ids: torch.Tensor,
        ) -> torch.Tensor:
            return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

    ids, names = (
        torch.ones(2, 8, dtype=torch.long),
        ["input_ids", "attention_mask", "token_type_ids"],
    )
    encoder, sizes = HiddenStates(), {0: "batch", 1: "tokens"}
    torch.onnx.export(
        encoder, (ids, ids, 0 * ids), str(target), dynamo=False, opset_version=17,
        input_names=names, output_names=["hidden"],
        dynamic_axes=dict.fromkeys((*names, "hidden"), sizes),
    )  # fmt: skip
    config = encoder.model.config
    optimizer.optimize_model(
        str(target), "bert", config.num_attention_heads, config.hidden_size, opt_level=0
    ).save_model_to_file(str(target))


def quantise_onnx(source: Path, target: Path) -> None:
    """Write the file with int8 weights, for activations that are quantised while it runs."""
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source, target, weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},
    )  # fmt: skip


def onnx_runtime(path: Path, directory: Path, threads: int) -> dict[int, Embed]:
    """The peer on ONNX Runtime, in batches of texts with similar numbers of tokens."""
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.no_padding()

    def embed(texts: list[str], size: int) -> np.ndarray:
        sequences = [each.ids for each in tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda i: -len(sequences[i]))
        found: dict[int, np.ndarray] = {}
        for first in range(0, len(order), size):
            part = order[first : first + size]
            ids = np.zeros((len(part), len(sequences[part[0]])), np.int64)
            mask = 0 * ids
            for row, i in enumerate(part):
                ids[row, : len(sequences[i])] = sequences[i]
                mask[row, : len(sequences[i])] = 1
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
            hidden = session.run(None, feeds)[0]
            mean = (hidden * mask[..., None].astype(np.float32)).sum(1)  # normalised below
            found |= dict(zip(part, mean / np.linalg.norm(mean, axis=1, keepdims=True)))
        return np.stack([found[i] for i in range(len(texts))])

    return {size: lambda texts, size=size: embed(texts, size) for size in PEER_BATCHES}


def compare_with_peers(model: EmbeddingModel, path: Path, opts: argparse.Namespace) -> None:
    texts = ragged_texts(model, opts.texts)
    with tempfile.TemporaryDirectory() as folder:
        onnx, int8 = Path(folder, "model.onnx"), Path(folder, "int8.onnx")
        export_onnx(path, onnx)
        sides: dict[str, dict[int, Embed]] = {}
        if opts.type is None:
            sides["sentence-transformers"] = sentence_transformers(path, opts.threads)
            sides["ONNX Runtime f32"] = onnx_runtime(onnx, path, opts.threads)
        else:
            quantise_onnx(onnx, int8)
            sides["ONNX Runtime int8"] = onnx_runtime(int8, path, opts.threads)
    chosen = {name: fastest(name, each, texts) for name, each in sides.items()}
    own = model.embed(texts)
    cosines = {name: (embed(texts) * own).sum(1).min() for name, embed in chosen.items()}
    peers = {name: lambda embed=embed: embed(texts) for name, embed in chosen.items()}
    for name, pairs in measure(lambda: model.embed(texts), peers, opts.rounds).items():
        report(name, pairs, len(texts), "texts/s", f"least cosine {cosines[name]:.6f}")


# ------------------------------------------------------------------------------------------ padded


def compare_with_padded(model: EmbeddingModel, opts: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST + 1, opts.texts).tolist()
    ragged = [rng.integers(1000, 20000, n).tolist() for n in lengths]
    padded = [rng.integers(1000, 20000, LONGEST).tolist() for _ in lengths]
    peers = {"padded": lambda: model.embed(padded)}
    for name, pairs in measure(lambda: model.embed(ragged), peers, opts.rounds).items():
        tokens = f"{sum(lengths)} tokens, padded {LONGEST * len(lengths)}"
        report(name, pairs, len(ragged), "texts/s", tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="minilm")
    parser.add_argument("--type", help="Block format of the weights.")
    parser.add_argument("--padded", action="store_true", help="Compare with padded sequences.")
    parser.add_argument("-n", "--texts", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    opts = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    logging.disable(logging.WARNING)
    model = graphllm.EmbeddingModel.load(opts.model, type=opts.type, threads=opts.threads)
    kind = opts.type or "f32"
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.texts} texts, {kind}", flush=True)
    if opts.padded:
        compare_with_padded(model, opts)
    else:
        compare_with_peers(model, checkpoint_path(opts.model), opts)


if __name__ == "__main__":
    main()
