"""Attention of packed sequences: the bits of a sequence are its own, whatever is packed with it."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import need_gpu
from op_runs import report, run_all

from graphllm import ops
from graphllm.backends import Options
from graphllm.graph.dtype import F32
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
LENGTHS = (1, 3, 16, 17, 64, 100, 7, 300, 2, 33, 1, 1, 128, 31)
CASES = {
    "f16": ((4, 4), (64, 64), "f16", {}),
    "f16, window": ((4, 2), (128, 128), "f16", {"window": 20}),
    "f16, depth 32, biases": ((3, 3), (32, 32), "f16", {"biased": True}),
    "f32": ((2, 1), (64, 64), "f32", {}),
    "f32, depth 96, biases and window": ((2, 2), (96, 96), "f32", {"biased": True, "window": 9}),
    "other shape": ((2, 1), (20, 12), "f32", {"window": 40}),
}


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


class Attention:
    """A plan of one op, and random queries, keys and values of all sequences."""

    def __init__(self, heads, depths, kind, window=0, biased=False) -> None:
        rng, t, q = np.random.default_rng(7), Var("T", 0, 1024), Var("Q", 1, 64)
        shapes = ((heads[0], depths[0]), (heads[1], depths[0]), (heads[1], depths[1]))
        dtype = {"f32": np.float32, "f16": np.float16}[kind]
        self.rows = [
            [rng.standard_normal((n, *shape)).astype(dtype) for n in LENGTHS] for shape in shapes
        ]
        bias = {"bias": rng.standard_normal((heads[0], 41)).astype(np.float32)} if biased else {}
        leaves = [feed(name, (t, *shape), kind) for name, shape in zip("qkv", shapes)]
        node = ops.packed_attention(
            *leaves, feed("q_start", (q,), "i32"),
            weight("bias", (heads[0], 41), "f32") if biased else None,
            scale=depths[0] ** -0.5, window=window,
        )  # fmt: skip
        self.executor = Executor(Arrays(bias), ("cuda",))
        self.plan = self.executor.compile({"y": node})

    def run(self, which) -> list[bytes]:
        """Bits of the results of some sequences, packed in this order."""
        lengths = [LENGTHS[i] for i in which]
        parts = [np.concatenate([rows[i] for i in which]) for rows in self.rows]
        feeds = dict(zip("qkv", parts)) | {"q_start": np.cumsum([0, *lengths]).astype(np.int32)}
        found = self.executor.run(self.plan, feeds, {"T": sum(lengths), "Q": len(lengths) + 1})["y"]
        return [part.tobytes() for part in np.split(found, np.cumsum(lengths)[:-1])]


def test_float32_has_its_own_precision():
    wrong = run_all(
        "packed_attention", ("cuda",), Options(), select=lambda group: group.args[0].dtype == F32
    )
    assert not wrong, report(wrong)


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(case):
    heads, depths, kind, more = CASES[case]
    made, order = Attention(heads, depths, kind, **more), list(range(len(LENGTHS)))
    alone = [made.run([i])[0] for i in order]
    assert made.run(order) == alone
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(order).tolist()
        assert made.run(shuffled) == [alone[i] for i in shuffled]


@pytest.mark.parametrize("case", ["f16", "f32", "other shape"])
def test_values_that_are_not_finite_stay_in_their_sequence(case):
    heads, depths, kind, more = CASES[case]
    made, order = Attention(heads, depths, kind, **more), list(range(len(LENGTHS)))
    alone = [made.run([i])[0] for i in order]
    for rows, value in zip(made.rows, (np.nan, np.inf, np.nan)):
        rows[1][0] = rows[9][:] = value
    found = made.run(order)
    assert [i for i in order if found[i] != alone[i]] == [1, 9]
    assert np.isnan(np.frombuffer(found[9], np.float32)).all()
