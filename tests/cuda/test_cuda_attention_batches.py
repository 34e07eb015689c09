"""Attention of a token gives the same bits in every step: alone or with others, in any chunk."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cuda_cases import need_gpu

from graphllm import ops
from graphllm.formats.quantization import quantise
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.profiler.record import Recorder
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
BLOCK, SLOTS, COLUMNS = 64, 1 << 15, 160
LENGTHS = (1, 63, 64, 65, 255, 257, 700, 2100, 4500, 9000)  # of the sequences
Part = tuple[int, int, int]  # sequence, first query, end of the queries


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


class Cache:
    """Random queries, keys and values of all sequences, and steps that attend to them."""

    def __init__(self, heads, depth, kind, block=BLOCK, **attrs) -> None:
        rng = np.random.default_rng(5)
        self.heads, self.depth, self.kind, self.block = heads, depth, kind, block
        self.attrs = {"scale": depth**-0.5, "block": block, **attrs}
        self.q = [rng.standard_normal((n, heads[0], depth)).astype(np.float32) for n in LENGTHS]
        self.sinks = rng.standard_normal(heads[0]).astype(np.float32)
        free = rng.permutation(SLOTS // block)
        self.tables = np.zeros((len(LENGTHS), COLUMNS * BLOCK // block), np.int32)
        for s, length in enumerate(LENGTHS):
            count = -(-length // block)
            self.tables[s, :count], free = free[:count], free[count:]
        self.pools = {name: self._pool(rng) for name in "kv"}

    def _pool(self, rng) -> np.ndarray:
        shape, kind = (SLOTS, self.heads[1], self.depth), dtype(self.kind)
        if not kind.quantised:
            return rng.standard_normal(shape).astype(kind.numpy)
        some = quantise(rng.standard_normal((512, self.depth)).astype(np.float32), kind)
        return some[rng.integers(0, len(some), SLOTS * self.heads[1])].reshape(SLOTS, -1)

    def run(
        self, parts: list[Part], tokens: int, sequences: int, recorder: Recorder | None = None
    ) -> dict[tuple[int, int], bytes]:
        """Bits of the results by (sequence, position), from a plan with these bounds."""
        t, s, q = (
            Var(n, 0, size) for n, size in (("T", tokens), ("S", sequences), ("Q", sequences + 1))
        )
        shape = (SLOTS, self.heads[1], self.depth)
        node = ops.attention(
            feed("q", (t, self.heads[0], self.depth), "f32"),
            *(state(name, shape, self.kind) for name in "kv"),
            feed("q_start", (q,), "i32"), feed("kv_len", (s,), "i32"),
            feed("table", (s, self.tables.shape[1]), "i32"),
            weight("sinks", self.sinks.shape, "f32"), None, None, **self.attrs,
        )  # fmt: skip
        executor = Executor(Arrays({"sinks": self.sinks}), ("cuda", "reference"))
        plan = executor.compile({"y": node})
        executor.bind(plan)
        for name, pool in self.pools.items():
            executor.set_state(name, pool)
        counts = [stop - start for _, start, stop in parts]
        feeds = {
            "q": np.concatenate([self.q[s][start:stop] for s, start, stop in parts]),
            "q_start": np.cumsum([0, *counts]).astype(np.int32),
            "kv_len": np.array([stop for *_, stop in parts], np.int32),
            "table": self.tables[[s for s, *_ in parts]],
        }
        env = {"T": sum(counts), "S": len(parts), "Q": len(parts) + 1}
        y = executor.run(plan, feeds, env, recorder)["y"]
        places = itertools.chain(*([(s, p) for p in range(a, b)] for s, a, b in parts))
        return {place: row.tobytes() for place, row in zip(places, y, strict=True)}


def last(s: int) -> Part:
    return (s, LENGTHS[s] - 1, LENGTHS[s])


CASES = {
    "f16": ((8, 2), 128, "f16", {}),
    "f16, one head per key": ((3, 3), 64, "f16", {}),
    "f16, 12 heads per key": ((12, 1), 64, "f16", {"block": 16}),
    "f16, depth 96": ((4, 2), 96, "f16", {"softcap": 5.0}),
    "f16, depth 256": ((4, 1), 256, "f16", {"window": 1000}),
    "f16, window of many tiles": ((2, 1), 64, "f16", {"window": 3000}),
    "q8_0": ((8, 2), 128, "q8_0", {}),
    "q8_0, depth 256": ((2, 1), 256, "q8_0", {"window": 100}),
    "q8_0, slots of 34 words": ((3, 1), 128, "q8_0", {}),
    "q4_0": ((8, 2), 128, "q4_0", {}),
    "q4_0, depth 64": ((7, 1), 64, "q4_0", {"block": 16}),
    "fp8": ((8, 4), 128, "fp8", {}),
    "fp8, depth 256": ((4, 1), 256, "fp8", {"window": 100}),
    "fp8, depth 96": ((4, 2), 96, "fp8", {"softcap": 5.0}),
    "f32": ((4, 2), 64, "f32", {}),
    "f16, other shape": ((4, 2), 80, "f16", {"window": 300}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_in_every_step(case):
    heads, depth, kind, more = CASES[case]
    cache, every = Cache(heads, depth, kind, **more), range(len(LENGTHS))
    alone: dict[tuple[int, int], bytes] = {}
    for s in every:
        alone |= cache.run([last(s)], 1, 1)
    # Each step gets all the same bits: (what, parts, tokens, sequences).
    chunks = [(s, max(0, n - 70), n) for s, n in enumerate(LENGTHS)]
    singles = [last(s) if s % 2 else chunks[s] for s in every]
    steps = {
        "few": ([last(s) for s in every], 16, 16),
        "bucket of 64": ([last(s) for s in every], 64, 64),
        "reversed": ([last(s) for s in reversed(every)], 64, 64),
        "large bound": ([last(s) for s in every], 512, 16),
        "few queries": ([(s, max(0, n - 3), n) for s, n in enumerate(LENGTHS[:5])], 16, 5),
        "chunks": (chunks, 1024, 16),
        "mixed": (singles, 1024, 16),
        "prompt": ([(6, 0, LENGTHS[6])], 1024, 1),
        "end of a prompt": ([(8, 3990, LENGTHS[8])], 1024, 1),
        **{f"few of {s}": ([(s, max(0, LENGTHS[s] - n), LENGTHS[s])], 16, 1)
           for s, n in ((1, 2), (3, 16), (5, 7), (6, 3), (9, 9))},
        "many of one": ([last(8)] * 100 + [last(9)], 128, 128),
    }  # fmt: skip
    wrong, seen = [], dict(alone)
    for name, (parts, tokens, sequences) in steps.items():
        for place, bits in cache.run(parts, tokens, sequences).items():
            if seen.setdefault(place, bits) != bits:
                have, want = np.frombuffer(bits, "f4"), np.frombuffer(seen[place], "f4")
                wrong.append(f"{name}: {place}: {np.abs(have - want).max():.2g}")
    timed = cache.run(singles, 1024, 16, Recorder())
    wrong += [f"timed build: {place}" for place, bits in timed.items() if seen[place] != bits]
    assert not wrong, "\n".join([f"{len(wrong)} tokens differ", *wrong[:30]])
