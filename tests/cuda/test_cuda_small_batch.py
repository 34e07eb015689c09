"""Launches of linears of 2 to 256 tokens. No GPU is needed: nothing runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from paper_cuda import paper_fixture  # noqa: F401

from graphllm import ops
from graphllm.backends.cuda.kernels.matrices import splits
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

SHARED = {(9, 0): 227 << 10, (8, 0): 99 << 10, (12, 0): 99 << 10}  # of a block, at most
ROWS, DEPTH = 4096, 2048


def test_a_depth_has_one_part_or_pairs_of_parts():
    rng = random.Random(0)
    for _ in range(300):
        rows = [rng.randint(1, 1 << 17) for _ in range(rng.randint(1, 3))]
        depth, processors = rng.randint(1, 1 << 15), rng.choice([10, 72, 132])
        count = splits(rows, depth, processors)
        assert count in (1, 2, 4, 6, 8) and count <= -(-depth // 256)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "q8_0", "f16"])
def test_the_number_of_tokens_does_not_decide_the_order_of_sums(kind, capability, paper):
    """The parts of the depth are the same in all plans, and kernels fit the GPU."""
    device, form, found = paper(capability), dtype(kind), set()
    raw = np.zeros((ROWS, form.row_nbytes(DEPTH)), np.uint8)
    stored = Blocks(raw, form, DEPTH) if form.quantised else raw.view(form.numpy)
    for most in (1, 2, 9, 17, 33, 100, 256):
        if kind == "f16" and most > 16 and capability != (9, 0):
            continue  # cuBLASLt
        x = ops.quantise_act(feed("x", (Var("T", 1, most), DEPTH), "f32"), dtype="f16")
        executor = Executor(Arrays({"w": stored}), ("cuda",))
        executor.bind(executor.compile({"y": ops.linear(x, weight("w", (ROWS, DEPTH), kind))}))
        (_, work) = device.built[-1]
        (launch,) = (
            w for part in work for w in part
            if isinstance(w, Launch) and w.function.module.file.startswith("small_batch")
        )  # fmt: skip
        assert launch.shared <= SHARED[capability]
        assert launch.grid[2] == launch.cluster and launch.grid[0] >= most / 128
        found.add(launch.args[5])
        assert launch.cluster == (1 if capability < (9, 0) else max(found))
    assert len(found) == 1


@pytest.mark.parametrize("most", [16, 100])
def test_launches_of_one_activation_run_beside_each_other(most, paper):
    """Large clusters lead; each order of the activation has a copy of its own."""
    device, kinds = paper((9, 0)), {"q4_k": 1024, "q8_0": 256, "q6_k": 256}
    x = ops.quantise_act(feed("x", (Var("T", 1, most), DEPTH), "f32"), dtype="f16")
    stored = {
        name: Blocks(np.zeros((rows, dtype(name).row_nbytes(DEPTH)), np.uint8), dtype(name), DEPTH)
        for name, rows in kinds.items()
    }
    products = {
        name: ops.linear(x, weight(name, (rows, DEPTH), name)) for name, rows in kinds.items()
    }
    executor = Executor(Arrays(stored), ("cuda",))
    executor.bind(executor.compile(products))
    launches = [each for part in device.built[-1][1] for each in part]
    copies = {w.args[4] for w in launches if w.function.name == "permute"}
    products = [w for w in launches if w.function.name == "small_batch"]
    assert [w.args[-1] for w in products] == [1, 2, 2]  # LEADS, FOLLOWS
    assert [w.triggers_after_wait for w in products] == [True, False, False]
    assert [w.cluster for w in products] == sorted((w.cluster for w in products), reverse=True)
    read = {w.args[0] for w in products}
    if most < 33:
        assert len(read) == 1 and not copies
    else:
        assert read == copies and len(copies) == 2  # q6_k and q8_0 read the same order
        assert max(copies) - min(copies) >= 2 * 128 * DEPTH
