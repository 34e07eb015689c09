"""Short-lived random graphs: built, compiled, run, compared with NumPy, and dropped.

    python tests/fuzz/short_graphs.py 20000

prints the number of wrong results, of table entries left in the executor, and the memory growth.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphllm import ops
from graphllm.graph.tensor import Tensor, feed, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

WIDTH, WARM = 48, 200  # columns; number of graphs after which the process must not grow
ROWS = np.random.default_rng(7).standard_normal((2, 3, WIDTH)).astype(np.float32)
WEIGHTS = {f"w{i}": np.full((3, WIDTH), i + 0.5, np.float32) for i in range(4)}
FEEDS = {"x": ROWS[0], "y": ROWS[1]}


@dataclass
class Found:
    """Result of a campaign: wrong results, table entries left, growth of the process in bytes."""

    wrong: int
    held: int
    grown: int


def campaign(count: int, backends: tuple[str, ...] = ("cpu", "reference")) -> Found:
    """Run ``count`` graphs in one executor."""
    executor, rng, wrong, start = Executor(Arrays(WEIGHTS), backends), random.Random(5), 0, 0
    for index in range(count):
        wrong += not _right(executor, rng, index)
        if index == min(WARM, count // 2):
            start = resident()
    return Found(wrong, held(executor), resident() - start)


def held(executor: Executor) -> int:
    """Return the number of table entries that belong to graphs."""
    return sum(executor.cache_sizes().values())


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def _right(executor: Executor, rng: random.Random, index: int) -> bool:
    """Whether a graph of adds and muls, many of them equal, agrees with NumPy."""
    zeros = np.zeros((3, WIDTH), np.float32)
    leaves = [(feed(name, (3, WIDTH), "f32"), data) for name, data in FEEDS.items()]
    leaves += [(weight(name, (3, WIDTH), "f32"), data) for name, data in WEIGHTS.items()]
    leaves.append((state(f"kept {index}", (3, WIDTH), "f32"), zeros))
    pairs: list[tuple[Tensor, np.ndarray]] = rng.choices(leaves, k=4)
    for _ in range(rng.randrange(1, 6)):
        (a, left), (b, right) = rng.choice(pairs), rng.choice(pairs)
        pairs.append(rng.choice([(ops.add(a, b), left + right), (ops.mul(a, b), left * right)]))
    chosen = {f"out {i}": pair for i, pair in enumerate(rng.sample(pairs[4:], 1) + pairs[-1:])}
    plan = executor.compile({name: node for name, (node, _) in chosen.items()})
    got = executor.run(plan, FEEDS)
    return all(np.allclose(got[name], want, 1e-5) for name, (_, want) in chosen.items())


if __name__ == "__main__":
    found = campaign(int(sys.argv[1]))
    print(f"{found.wrong} wrong, {found.held} entries held, {found.grown / 1e6:+.1f} MB")
