"""Speed of the experts of a Mixtral 8x7B, or of another shape, on this machine's GPU.

    python benchmarks/experts_cuda.py [--formats f16,q8_0,q4_k] [--tokens 1,2,4,8,64,512]
    python benchmarks/experts_cuda.py --shape qwen3-30b-a3b --formats q4_k,q6_k --tokens 16,64

``mixture``: a chain of layers of a router, experts and the residual: microseconds per layer, GB/s
of the selected weights, their share of the read bandwidth, TFLOP/s. Tokens and weights are random;
one token is a replayed CUDA graph; the weights exceed the caches. ``steps``: decode time by kind of
step, from the kernels' timestamps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import numpy as np
from gpu_shared import ORDER, share

from graphllm import ops
from graphllm.checkpoints.random_weights import random_bytes
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Tensor, Var, feed, weight
from graphllm.profiler.record import Recorder, totals
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

BYTES = 4 << 30  # approximate bytes of weights per measurement
ROUNDS = 10
# Experts, experts per token, rows of gate and up, columns.
SHAPES = {"mixtral-8x7b": (8, 2, 14336, 4096), "qwen3-30b-a3b": (128, 8, 768, 2048)}


class Layers:
    """A chain of MoE layers of one format, of `BYTES` in total."""

    def __init__(self, kind: str, shape: str) -> None:
        form = dtype(kind)
        self.experts, self.each, self.hidden, self.dim = experts, _, hidden, dim = SHAPES[shape]
        self.matrices = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
        one = 3 * experts * hidden * form.row_nbytes(dim)
        self.kind, self.one, self.count = kind, one, max(2, BYTES // one)
        rng, held, pattern = np.random.default_rng(0), {}, random_bytes(form)
        for name, (rows, depth) in self.matrices.items():
            raw = np.resize(pattern, experts * rows * form.row_nbytes(depth))
            stored = raw.reshape(experts, rows, -1)
            plain = form.numpy is not None
            held[name] = stored.view(form.numpy) if plain else Blocks(stored, form, depth)
        held["router"] = rng.standard_normal((experts, dim)).astype(np.float32)
        arrays = {f"{i}.{name}": w for i in range(self.count) for name, w in held.items()}
        self.executor = Executor(Arrays(arrays), ORDER)
        x = feed("x", (Var("T", 1, 1 << 16), dim), "f32")
        self.ids = {}
        for i in range(self.count):
            y, self.ids[f"ids{i}"] = self._mixture(x, i)
            x = ops.add(x, y)
        self.outputs = {"x": x}

    def _mixture(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Apply layer ``i`` to x [T, DIM]; return the result [T, DIM] and the selected experts."""
        scores = ops.softmax(ops.linear(x, weight(f"{i}.router", (self.experts, self.dim), "f32")))
        ids = ops.top_k(scores, k=self.each)
        weights = ops.sum_norm(ops.pick(scores, ids))

        def product(x: Tensor, name: str) -> Tensor:
            return ops.expert_linear(
                x, weight(f"{i}.{name}", (self.experts, *self.matrices[name]), self.kind), ids
            )

        h = ops.mul(ops.silu(product(x, "gate")), product(x, "up"))
        return ops.combine(product(h, "down"), weights), ids

    def run(self, tokens: int, recorder: Recorder | None = None) -> tuple[float, float]:
        """Return the seconds of a layer, and the mean number of distinct experts."""
        x = np.random.default_rng(tokens).standard_normal((tokens, self.dim)).astype(np.float32)
        bounds = {"T": (1, tokens)}
        found = self.executor.run(self.executor.compile(self.ids, bounds), {"x": x})
        distinct = float(np.mean([len(np.unique(ids)) for ids in found.values()]))
        plan = self.executor.compile(self.outputs, bounds)
        assert {step.backend.name for step in plan.steps} == {"cuda"}
        env = {"T": tokens, "experts": round(distinct)}
        for _ in range(2):
            self.executor.run(plan, {"x": x}, env, fetch=())
        if recorder:
            for _ in range(ROUNDS):
                self.executor.run(plan, {"x": x}, env, profile=recorder, fetch=())
        ((segment, _),) = self.executor.segments(plan)
        gpu = self.executor.devices["cuda"].gpu
        times = gpu.time_runs(lambda: segment.run(None), ROUNDS)
        return median(times) / self.count, distinct

    def moe(self, counts: list[int]) -> Iterator[str]:
        """Yield a line for each number of tokens."""
        for tokens in counts:
            seconds, distinct = self.run(tokens)
            rate = self.one * distinct / self.experts / seconds
            flops = 2 * 3 * self.each * tokens * self.hidden * self.dim / seconds
            yield (
                f"{self.kind:<6} {tokens:>6} {distinct:8.1f} {1e6 * seconds:10.1f} "
                f"{share(rate):>20} {flops / 1e12:8.1f}"
            )

    def steps(self) -> Iterator[str]:
        """Yield a line for each kind of decode step."""
        recorder = Recorder()
        self.run(1, recorder)
        for name, total in totals(recorder.rows).items():
            calls = total.calls // ROUNDS // self.count
            us = total.ns / 1e3 / total.calls
            yield f"{name:<24} {calls:>6} {us:9.2f} {total.gb_s:7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default="f16,q8_0,q4_k")
    parser.add_argument("--tokens", default="1,2,4,8,64,512")
    parser.add_argument("--shape", default="mixtral-8x7b", choices=SHAPES)
    given = parser.parse_args()
    counts = [int(n) for n in given.tokens.split(",")]
    for kind in given.formats.split(","):
        layers = Layers(kind, given.shape)
        print(f"\n## mixture: {layers.count} layers of {layers.one / 1e9:.2f} GB")
        print("format tokens  experts us a layer     GB/s, of the best  TFLOP/s")
        for line in layers.moe(counts):
            print(line, flush=True)
        print(
            f"\n## steps: {kind}, one token\n{'step':<24} {'calls':>6} {'us each':>9} {'GB/s':>7}"
        )
        for line in layers.steps():
            print(line, flush=True)
        del layers


if __name__ == "__main__":
    main()
