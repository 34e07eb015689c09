"""Encoders and encoder-decoders on a GPU, in f16, compared with torch and transformers.

    pip install torch transformers
    python benchmarks/embed_cuda.py bert        # embeddings of ragged sequences
    python benchmarks/embed_cuda.py t5          # beam search
    python benchmarks/embed_cuda.py profile     # time of each op of a batch of BERT

``bert``: BERT-base's shape with random weights, sequences of 1 to 127 tokens (64 on average), mean
pooling, token ids given. The peer is transformers with scaled-dot-product attention in f16, on
padded batches: of sequences in their given order, and sorted by length. The best of several batch
sizes counts. ``t5``: T5-base's shape, 64 sources of 1 to 127 tokens, 4 beams, 64 new tokens each.

Rounds are interleaved; rates are medians, ratios those of one round, with the smallest and largest.
The limit of ``bert`` is the time of its FLOPs at the rate of the tensor cores: 24 layers' matrices
of a token, and 4 x 768 operations for each pair of tokens of a sequence and layer.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_shared import measure_ceilings

import graphllm
from graphllm.profiler.record import Recorder

LAYERS, DIM, HIDDEN, HEADS = 12, 768, 3072, 12
PEER_BATCHES = (64, 256, 1024)  # sequences
Ids = list[list[int]]


def ragged(count: int, vocab: int) -> Ids:
    """Sequences of 1 to 127 random token ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, vocab, n).tolist() for n in rng.integers(1, 128, count)]


def bert_flops(sequences: Ids) -> float:
    """Operations of the layers: products with matrices, and attention."""
    tokens, pairs = sum(map(len, sequences)), sum(len(ids) ** 2 for ids in sequences)
    return 2.0 * LAYERS * (tokens * (4 * DIM**2 + 2 * DIM * HIDDEN) + 2 * DIM * pairs)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    words = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"))}
    made = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    made.normalizer, made.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(words))
    made.save(str(folder / "tokenizer.json"))


def interleave(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one that warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def report(seconds: dict[str, list[float]], work: float, unit: str) -> None:
    """Print the rate of each side, and its time relative to that of the first side."""
    own = next(iter(seconds.values()))
    for name, each in seconds.items():
        ratios = [b / a for a, b in zip(own, each)]
        print(
            f"{name:<40} {work / median(each):10.1f} {unit}   {median(each) * 1e3:8.1f} ms   "
            f"{median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )


# ------------------------------------------------------------------------------------------- bert


def bert(folder: Path) -> Any:
    """Write a directory of BERT-base's shape; return transformers' model on the GPU."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(attn_implementation="sdpa")
    model = BertModel(config, add_pooling_layer=False).half().eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.cuda()


def padded_means(model: Any, sequences: Ids, size: int) -> np.ndarray:
    """Means of hidden states of padded batches of ``size`` sequences."""
    import torch

    found = []
    with torch.inference_mode():
        for at in range(0, len(sequences), size):
            some = sequences[at : at + size]
            lengths = np.array([*map(len, some)])
            ids = np.zeros((len(some), lengths.max()), np.int64)
            inside = np.arange(lengths.max()) < lengths[:, None]
            ids[inside] = np.concatenate(some)
            mask = torch.from_numpy(inside.astype(np.int64)).cuda()
            hidden = model(input_ids=torch.from_numpy(ids).cuda(), attention_mask=mask)
            means = (hidden.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1)[:, None]
            found.append(means.float())
        return torch.cat(found).cpu().numpy()


def compare_bert(count: int, rounds: int) -> None:
    folder = Path(tempfile.mkdtemp())
    peer, sequences = bert(folder), ragged(count, 30000)
    by_length = sorted(sequences, key=len)
    peaks = measure_ceilings(1 << 28).peaks
    model = graphllm.EmbeddingModel.load(folder, device="cuda")
    print(f"misses: {model.misses()}")
    sides: dict[str, Callable[[], Any]] = {
        "graphllm": lambda: model._pooled(("mean",), sequences),
    }
    for size in PEER_BATCHES:
        sides[f"torch, batches of {size}"] = lambda size=size: padded_means(peer, sequences, size)
        name = f"torch, sorted, batches of {size}"
        sides[name] = lambda size=size: padded_means(peer, by_length, size)
    own, other = sides["graphllm"](), padded_means(peer, sequences, 256)
    cosine = (own * other).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(other, axis=1)
    print(f"least cosine with torch: {cosine.min():.6f}")
    seconds, flops = interleave(sides, rounds), bert_flops(sequences)
    report(seconds, count, "sequences/s")
    rate, ceiling = flops / median(seconds["graphllm"]), max(peaks["f16"].values())
    print(
        f"{flops / 1e12:.2f} TFLOP, {sum(map(len, sequences))} tokens: {rate / 1e12:.0f} TFLOP/s,"
    )
    print(f"{rate / ceiling:.1%} of {ceiling / 1e12:.0f}; limit: {flops / ceiling * 1e3:.1f} ms")


def profile_bert(tokens: int) -> None:
    """Print microseconds by op of one batch, of all layers."""
    folder = Path(tempfile.mkdtemp())
    bert(folder)
    model = graphllm.EmbeddingModel.load(folder, device="cuda")
    sequences, total = ragged(4096, 30000), 0
    some: Ids = []
    while total + len(sequences[0]) <= tokens:
        some.append(sequences.pop(0))
        total += len(some[-1])
    for _ in range(3):
        start = time.perf_counter()
        model._pooled(("mean",), some)
        print(f"{(time.perf_counter() - start) * 1e3:.2f} ms of a batch")
    model.engine.recorder = recorder = Recorder()
    for _ in range(5):
        model._pooled(("mean",), some)
    rows: dict[str, list[float]] = {}
    for row in recorder.rows:
        best = row.fastest
        name = f"{row.op} {row.shape} {row.scope.split('.')[-1]}"
        old = rows.setdefault(name, [0, 0.0, 0.0, 0.0])
        rows[name] = [old[0] + 1, old[1] + best.ns, old[2] + best.bytes, old[3] + best.flops]
    print(f"{len(some)} sequences, {total} tokens")
    for name, (calls, ns, moved, flops) in sorted(rows.items(), key=lambda item: -item[1][1]):
        rates = f"{moved / ns:7.0f} GB/s {flops / ns / 1e3:7.1f} TFLOP/s"
        print(f"{calls:4.0f} {ns / 1e3:9.1f} us {rates}  {name}")
    whole = sum(ns for _, ns, *_ in rows.values())
    print(f"     {whole / 1e3:9.1f} us, {bert_flops(some) / whole / 1e3:.1f} TFLOP/s", flush=True)


# --------------------------------------------------------------------------------------------- t5


def compare_t5(sources: int, beams: int, new: int, rounds: int) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=DIM, d_ff=HIDDEN, num_layers=LAYERS, num_heads=HEADS,
                      decoder_start_token_id=0)  # fmt: skip
    peer, folder = T5ForConditionalGeneration(config).half().eval(), Path(tempfile.mkdtemp())
    peer.save_pretrained(folder)
    peer, given = peer.cuda(), ragged(sources, 32000)
    width = max(map(len, given))
    ids = torch.tensor([each + [0] * (width - len(each)) for each in given]).cuda()
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in given]).cuda()

    def transformers_beams() -> Any:
        options = {"num_beams": beams, "do_sample": False, "max_new_tokens": new}
        return peer.generate(ids, attention_mask=mask, min_new_tokens=new, **options).cpu()

    llm = graphllm.load(folder, device="cuda", context=512, max_sequences=sources * beams)
    print(f"misses: {llm.misses()}")

    def own() -> Any:
        return llm.generate(given, beams=beams, max_tokens=new, ignore_eos=True)

    gc.collect()
    gc.freeze()  # a collection scans torch's objects, too: 0.1 to 0.3 s in a round of either side
    seconds = interleave({"graphllm": own, "transformers": transformers_beams}, rounds)
    report(seconds, sources * new, "tokens/s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=("bert", "t5", "profile"))
    parser.add_argument("-n", "--sequences", type=int, default=4096)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384, help="Tokens of the profiled batch.")
    opts = parser.parse_args(arguments)
    if "profile" in opts.parts:
        profile_bert(opts.tokens)
    if "bert" in opts.parts:
        compare_bert(opts.sequences, opts.rounds)
    if "t5" in opts.parts:
        compare_t5(64, 4, 64, opts.rounds)


if __name__ == "__main__":
    main()
