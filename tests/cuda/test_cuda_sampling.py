"""Sampling on the GPU returns the ids of the reference, whichever kernel samples."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import need_gpu

from graphllm import ops
from graphllm.graph.tensor import Var, feed
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor

pytestmark = pytest.mark.cuda
ROWS = 18
WIDTHS = (1, 31, 2049, 33_333, 128_256, 262_144)  # within one chunk, and of many chunks
SETTINGS = {
    "temperature": ([0.8, 1.0, 2.5, 0.3], "f32"),
    "top_k": ([0], "i32"),
    "top_p": ([0.95, 1.0, 0.5, 0.9, 0.0, 0.999, 1e-9], "f32"),
    "min_p": ([0.0, 0.05, 0.0, 0.001, 1.0], "f32"),
    "seed": (range(-1, 1 << 40, (1 << 40) // ROWS), "i64"),
    "count": (range(ROWS), "i32"),
    "sample_index": ([0, 0, 1, 7], "i32"),
}
TOP_K = [0, 40, 64, 255, 256, 257, 1, 1024, 30_000, 128_255, 128_256, 10**6]


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def masked(x: np.ndarray) -> np.ndarray:
    """With -inf for some ids, and in some rows for all ids but the last."""
    x[:, ::3], x[::4, :-1] = -np.inf, -np.inf
    x[:, -1] = 0.5
    return x


def faulty(x: np.ndarray) -> np.ndarray:
    """With one NaN of either sign, one +inf, or only -inf, in five rows of six."""
    middle = x.shape[1] // 2
    x[::6, middle], x[1::6, 0], x[2::6, -1] = np.nan, -np.float32(np.nan), np.inf
    x[3::6], x[4::6] = -np.inf, np.nan
    return x


LOGITS = {
    "usual": lambda x: 3 * x,
    "flat": lambda x: 0.05 * x,
    "steep": lambda x: 30 * x,
    "in steps": lambda x: np.round(2 * x),
    "masked": masked,
    "faulty": faulty,
    "equal": lambda x: 0 * x + 1.5,
    "nothing": lambda x: np.full_like(x, np.nan),
}


def wrong(width: int, make, changed: dict | None = None) -> list[int]:
    """Rows whose id differs from the reference, in three runs, the last of which are replayed."""
    n = Var("N", 1, ROWS)
    leaves, feeds = [], {}
    for name, (values, kind) in {**SETTINGS, **(changed or {})}.items():
        leaves.append(feed(name, (n,), kind))
        feeds[name] = np.resize(np.array(values), ROWS).astype(leaves[-1].dtype.numpy)
    x = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32)
    logits = make(x).astype(np.float32)
    want = ops.get("sample").reference(logits, *feeds.values())
    executor = GuardedExecutor(backends=("cuda",))
    plan = executor.compile({"y": ops.sample(feed("logits", (n, width), "f32"), *leaves)})
    got = [executor.run(plan, {**feeds, "logits": logits})["y"] for _ in range(3)]
    return [int(row) for y in got for row in np.flatnonzero(y != want)]


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_top_k(width, kind):
    assert not wrong(width, LOGITS[kind])


@pytest.mark.parametrize("kind", ["usual", "in steps", "equal", "masked", "faulty"])
@pytest.mark.parametrize("width", WIDTHS)
def test_mixed_rows(width, kind):
    """Rows with few, many and all candidates, and greedy rows."""
    changed = {"top_k": (TOP_K, "i32"), "temperature": ([0.8, 1.0, 0.0, 2.0, -1.0], "f32")}
    assert not wrong(width, LOGITS[kind], changed)


def test_a_row_without_a_finite_maximum_gives_no_id():
    """Whichever kernel would sample, and whatever the other rows are."""
    n, width = Var("N", 1, ROWS), 40_001
    x = faulty(np.random.default_rng(1).standard_normal((ROWS, width)).astype(np.float32))
    settings = {
        "temperature": [0.0, 0.8], "top_k": [0, 0, 40, 1024], "top_p": [0.9, 0.9, 1.0],
        "min_p": [0.0, 0.1], "seed": [3], "count": [1], "sample_index": [0],
    }  # fmt: skip
    leaves = {name: feed(name, (n,), SETTINGS[name][1]) for name in settings}
    feeds = {name: np.resize(np.array(settings[name]), ROWS) for name in settings}
    feeds = {name: feeds[name].astype(leaf.dtype.numpy) for name, leaf in leaves.items()}
    plan = (executor := Executor(backends=("cuda",))).compile(
        {"y": ops.sample(feed("logits", (n, width), "f32"), *leaves.values())}
    )
    got = executor.run(plan, {**feeds, "logits": x})["y"]
    assert ((got == -1) == (np.arange(ROWS) % 6 != 5)).all()
