"""Embedding tables on the GPU: exact rows, and tied embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from block_cases import KINDS, ROWS, dequantised, make_blocks
from cuda_cases import need_gpu
from linear_cases import BLOCKS

from graphllm import ops
from graphllm.backends import Options
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Tensor, Var, feed, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
IDS = np.array([ROWS - 1, 0, 1, 7, 7], np.int32)


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def leaf(name: str, blocks: int) -> Tensor:
    return weight("w", (ROWS, blocks * dtype(name).block), name)


def run(y: Tensor, raw: np.ndarray, w: Tensor, count: int) -> np.ndarray:
    """The result for the first ids, in a plan for that many."""
    stored = Blocks(raw, w.dtype, int(w.shape[1]))
    executor = GuardedExecutor(Arrays({"w": stored}), ("cuda",), Options(linear="float"))
    plan = executor.compile({"y": y}, {"T": (0, count)})
    return executor.run(plan, {"ids": IDS[:count]})["y"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_rows(name, kind):
    """Random and extreme blocks, against the gguf package."""
    for blocks in (1, 3):
        w, raw = leaf(name, blocks), make_blocks(dtype(name), kind, blocks)
        y = ops.embedding(feed("ids", (Var("T", 0, 99),), "i32"), w)
        want = dequantised(dtype(name), raw)[IDS].astype(np.float32)
        assert np.array_equal(run(y, raw, w, 99), want)


@pytest.mark.parametrize("name", BLOCKS)
def test_tied_embedding(name):
    w, raw = leaf(name, 3), make_blocks(dtype(name), "random", 3)
    y = ops.linear(ops.embedding(feed("ids", (Var("T", 0, 99),), "i32"), w), w)
    values = dequantised(dtype(name), raw)
    want = (values @ values.T)[IDS]
    most = np.abs(want).max()
    for count, tolerance in ((1, 1e-5), (5, 1e-5), (99, 4e-3)):  # many tokens use half precision
        got = run(y, raw, w, count)
        assert np.abs(got - want[: len(got)]).max() <= tolerance * most
