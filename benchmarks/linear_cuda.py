"""Matrix products on this machine's GPU: cuBLASLt choices, kernel crossover, and steps of a layer.

    python benchmarks/linear_cuda.py                      # all parts
    python benchmarks/linear_cuda.py layers --type q8_0   # one

``products``: the products of a Mistral-7B layer by the first choice of cuBLASLt and by the fastest
of eight, over more weights than the caches hold. ``counts``: a linear of few tokens by graphllm's
kernels and by cuBLASLt. ``batches``: the linears of a layer in quantised formats, by number of
tokens; "1 f16" is one token of block formats by the kernel for several. ``layers``: prefill time by
step, in a model of four such layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from gpu import ROUNDS, run_time
from gpu_shared import cuda

from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cuda.kernels import gemm, small_batch
from graphllm.backends.cuda.kernels.matrices import MAX_TOKENS
from graphllm.backends.cuda.runtime import cublaslt
from graphllm.checkpoints.model_shapes import SHAPES
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.formats import ROW_FORMATS, activation_of
from graphllm.formats.quantization import Blocks, quantise
from graphllm.graph.dtype import F16, F32, dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.profiler import bench
from graphllm.profiler.record import Recorder, totals
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

BYTES = 512 << 20  # bytes of weights per measurement
# rows, depth, matrices at a time, result, added: a layer as gemm splits it
SHAPES_OF_A_LAYER: dict[str, tuple[int, int, int, Any, bool]] = {
    "q": (4096, 4096, 1, F32, False),
    "k, v": (1024, 4096, 2, F32, False),
    "o + residual": (4096, 4096, 1, F32, True),
    "gate, up": (14336, 4096, 2, F16, False),
    "down + residual": (4096, 14336, 1, F32, True),
}


def products(given: argparse.Namespace) -> Iterator[str]:
    """Microseconds per product, by the first and by the fastest choice of cuBLASLt."""
    device = cuda().open_device(Options())
    own = cublaslt.instance(device)
    room = [device.alloc(n) for n in (BYTES, 64 << 20, 128 << 20, 128 << 20)]
    yield f"{'product':<16} {'first, us':>10} {'TFLOP/s':>8} {'fastest, us':>12} {'choice':>7}"
    sums = [0.0, 0.0]
    for name, (rows, depth, count, result, added) in SHAPES_OF_A_LAYER.items():
        size, row_nbytes = 2 * rows * depth, result.nbytes * rows * count
        p = cublaslt.Matmul(
            F16, result, rows, depth, room[1].address, 2 * depth, room[0].address,
            room[2].address, row_nbytes,
            residual=room[3].address if added else 0, residual_stride=row_nbytes if added else 0,
            batch=count, w_batch_stride=size if count > 1 else 0,
            y_batch_stride=row_nbytes // count if count > 1 else 0,
        )  # fmt: skip
        each = [replace(p, w=p.w + i * size * count) for i in range(BYTES // (size * count))]
        times = [
            1e6 * median(device.gpu.time_runs(partial(run, own, each, way), ROUNDS)) / len(each)
            for way in own.candidates(p, given.tokens, 8)
        ]
        rate = 2e-6 * count * rows * depth * given.tokens / times[0]
        best = min(times)
        yield f"{name:<16} {times[0]:10.1f} {rate:8.0f} {best:12.1f} {times.index(best):>7}"
        sums = [sums[0] + times[0], sums[1] + best]
    yield f"{'a layer':<16} {sums[0]:10.1f} {'':>8} {sums[1]:12.1f}"


def run(own: cublaslt.CublasLt, each: Sequence[cublaslt.Matmul], way: cublaslt.MatmulPlan) -> None:
    for p in each:
        own.launch(p, way)


def counts(given: argparse.Namespace) -> Iterator[str]:
    """Microseconds of a linear [14336, 4096] of few tokens, by own kernels and by cuBLASLt."""
    yield f"{'format':<8} {'tokens':>6} {'own, us':>9} {'library, us':>12}"
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((14336, 4096), np.float32).astype(np.float16)
    for count in (2, 4, 8, 16, 32, 64, 128, 256):
        own = linear_time(plain, count, MAX_TOKENS)
        yield f"{'f16':<8} {count:>6} {own:9.1f} {linear_time(plain, count, 0):12.1f}"


def linear_time(matrix: np.ndarray, count: int, most: int) -> float:
    """With own kernels for at most this number of tokens."""
    kept = small_batch.max_tokens
    small_batch.max_tokens = lambda ctx: most
    try:
        t, (_, depth) = Var("T", count, count), matrix.shape
        weights = {f"w{i}": matrix for i in range(8)}
        x = ops.quantise_act(feed("x", (t, depth), "f32"), dtype="f16")
        made = {n: ops.linear(x, weight(n, matrix.shape, "f16")) for n in weights}
        feeds = {"x": np.ones((count, depth), np.float32)}
        return run_time(made, feeds, weights, {"T": count})[0] / len(weights)
    finally:
        small_batch.max_tokens = kept


# rows of each matrix of a launch, depth, gated
LAUNCHES_OF_A_LAYER: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "gate, up": ((14336, 14336), 4096, True),
    "down": ((4096,), 14336, False),
    "q, k, v": ((4096, 1024, 1024), 4096, False),
    "o": ((4096,), 4096, False),
}


def batches(given: argparse.Namespace) -> Iterator[str]:
    """Microseconds of the linears of a layer by format, and share of the read bandwidth."""
    names = [f"{name:>9}" for name in LAUNCHES_OF_A_LAYER]
    yield f"{'format':<8} {'tokens':>6} {' '.join(names)} {'layer':>8} {'limit':>6} {'share':>6}"
    for kind in given.type.split(","):
        found: dict[str, list[float]] = {}
        nbytes = 0.0
        for rows, depth, gated in LAUNCHES_OF_A_LAYER.values():
            nbytes += dtype(kind).row_nbytes(depth) * sum(rows)
            for label, us in launch_times(kind, rows, depth, gated, given.counts).items():
                found.setdefault(label, []).append(us)
        limit = nbytes / 4.53e6
        for label, times in found.items():
            each = " ".join(f"{us:9.1f}" for us in times)
            total = sum(times)
            yield f"{kind:<8} {label:>6} {each} {total:8.1f} {limit:6.1f} {limit / total:6.1%}"


def launch_times(
    kind: str, rows: tuple[int, ...], depth: int, gated: bool, counts: Sequence[int]
) -> dict[str, float]:
    """Microseconds of a launch by number of tokens, over weights that the caches do not hold."""
    copies = max(2, (BYTES // 2) // (dtype(kind).row_nbytes(depth) * sum(rows)))
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {}
    for i, count in enumerate(rows):
        part = quantise(rng.standard_normal((64, depth)).astype(np.float32) / 64, dtype(kind))
        raw = np.tile(np.asarray(part, np.uint8).reshape(64, -1), (count // 64, 1))
        stored |= {f"w{i}.{n}": Blocks(raw, dtype(kind), depth) for n in range(copies)}
    executor = Executor(Arrays(stored), ("cuda", "reference"))
    found = {}
    x = feed("x", (Var("T", 1, max(counts)), depth), "f32")
    for count in counts:
        labels = {str(count): x}
        if count == 1 and kind not in ROW_FORMATS:
            labels["1 f16"] = ops.quantise_act(x, dtype="f16")
        for label, own in labels.items():
            made = {}
            for n in range(copies):
                leaves = [weight(f"w{i}.{n}", (r, depth), kind) for i, r in enumerate(rows)]
                each = [ops.linear(own, w) for w in leaves]
                if gated:
                    each = [ops.mul(ops.silu(each[0]), each[1])]
                    if label != "1" or kind in ROW_FORMATS:
                        form = activation_of(dtype(kind)).name if kind in ROW_FORMATS else "f16"
                        each = [ops.quantise_act(each[0], dtype=form)]
                made |= {f"y{i}.{n}": y for i, y in enumerate(each)}
            plan = executor.compile(made, {"T": (1, count)})
            x_values = rng.standard_normal((count, depth)).astype(np.float32)
            for _ in range(2):
                executor.run(plan, {"x": x_values}, fetch=())
            ((segment, _),) = executor.segments(plan)
            gpu = executor.devices["cuda"].gpu
            times = gpu.time_runs(partial(segment.run, None), ROUNDS)
            found[label] = 1e6 * median(times) / copies
    return found


def layers(given: argparse.Namespace) -> Iterator[str]:
    """Microseconds of each step of a layer during prefill, and of the layer."""
    count, tokens, kind, depth = 4, given.tokens, given.type, given.depth
    file = RandomCheckpoint(replace(SHAPES["mistral-7b"], layers=count), kind)
    limits = Limits(context=depth + tokens + 64)
    llm = LLM(file, build_decoder(file), {"backends": ("cuda", "reference")}, limits)
    test = bench.Test(tokens, 0, depth)
    result = bench.run(llm, test, ROUNDS, lambda done: None)
    ids, rows = bench.filler_tokens(depth + tokens, llm.decoder.cfg.vocab), []
    for number in range(5):
        recorder = Recorder()
        rest = [(token + 7 + number) % llm.decoder.cfg.vocab for token in ids[depth:]]
        prompt = ids[:depth] + rest  # the rest is not in the cache
        sampled = llm.engine.generate(prompt, bench.GREEDY, [], None, (recorder, recorder))
        next(sampled)
        sampled.close()
        rows = [r for r in recorder.rows if ".layers." in r.scope]
    yield f"{kind}, {tokens} tokens after {depth}: {median(result.rates):.0f} tok/s in total"
    yield f"{'step':<28} {'calls':>5} {'us each':>9} {'us a layer':>11} {'GB/s':>6} {'TFLOP/s':>8}"
    total = 0.0
    for name, t in totals(rows).items():
        total += t.ns / 1e3 / count
        yield (
            f"{name:<28} {t.calls:>5} {t.ns / 1e3 / t.calls:9.1f} {t.ns / 1e3 / count:11.1f} "
            f"{t.gb_s:6.0f} {t.gflop_s / 1e3:8.0f}"
        )
    yield f"{'a layer':<28} {'':>5} {'':>9} {total:11.1f}"


PARTS = {"products": products, "counts": counts, "batches": batches, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"Parts to run: {', '.join(PARTS)}."
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, default=0, help="Cached tokens (layers).")
    parser.add_argument("--type", default="f16", help="Weight format; batches: several.")
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128],
        help="Numbers of tokens (batches).",
    )  # fmt: skip
    parser.add_argument(
        "--tile", type=int, help="MB of quantized weights expanded at a time (layers)."
    )
    given = parser.parse_args()
    gemm._TILE = given.tile << 20 if given.tile else gemm._TILE
    chosen = given.parts or list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    for part in chosen:
        print(f"\n## {part}: {(PARTS[part].__doc__ or '').splitlines()[0]}")
        for line in PARTS[part](given):
            print(line, flush=True)


if __name__ == "__main__":
    main()
