"""linear on the GPU: every format and kernel, at numbers of tokens around each change of kernel."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import (
    ORDER,
    activation_name,
    linear_sample,
    need_gpu,
    normal,
    quantised,
    run_bounded,
)
from linear_cases import INTEGER_BLOCKS
from op_runs import report

from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.cuda.kernels.linear import MAX_F32_TOKENS
from graphllm.formats import ROW_FORMATS, WEIGHT_FORMATS
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
TOKENS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 64, 100, 128, 255, 256, 257)
# Many tokens are multiplied in half precision: bf16 has 8 bits, f16 11.
HALF = {"bf16": 2e-2, "f32": 0.0}
FP8 = 3e-3  # FP8 tensor cores add 128 products with about 14 bits


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def samples_of(kind: str, **more):
    """One row more than kernels compute together, and rows of odd and even numbers of blocks."""
    shapes = [(65, 768), (130, 1024)]
    shapes += [] if dtype(kind).block > 32 else [(33, 96)]
    return [linear_sample(t, shape, kind, **more) for t in TOKENS for shape in shapes]


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_counts_of_tokens(kind):
    wrong = run_bounded("linear", samples_of(kind, bias=True), least=HALF.get(kind, 4e-3))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_few_tokens_are_exact(kind):
    """Float activations are exact except for the order of summation."""
    most = 1 if kind in ("f16", "bf16") else MAX_F32_TOKENS
    few = [s for s in samples_of(kind) if s.env["T"] <= most]
    wrong = run_bounded("linear", few, Options(linear="float"), 0.0 if kind != "bf16" else 3e-5)
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", [*INTEGER_BLOCKS, *ROW_FORMATS])
def test_quantised_activations(kind):
    """Exact except for the order of summation, at any number of tokens."""
    least = FP8 if kind.startswith("fp8") else 0.0
    wrong = run_bounded("linear", samples_of(kind, x=activation_name(kind), bias=True), None, least)
    assert not wrong, report(wrong)


# Rows, depth: several blocks of rows and splits of the depth, and rows that are not aligned.
INVARIANT = ((300, 2304), (65, 768))


@pytest.mark.parametrize("kind", [k for k in WEIGHT_FORMATS if k != "f32"])
def test_results_do_not_depend_on_the_number_of_tokens(kind):
    """A token has the same bits whatever tokens are in the step, from two tokens on."""
    rng = np.random.default_rng(0)
    for rows, k in INVARIANT:
        w = quantised(normal(rng, (rows, k)).astype(np.float32), kind)
        executor = GuardedExecutor(Arrays({"w": w}), ORDER, Options())
        counts = TOKENS if kind == "w8a8" else TOKENS[1:-1]  # sums of w8a8 are exact
        drawn = rng.standard_normal((counts[-1], k)).astype(np.float32)
        whole = multiplied(executor, drawn, (rows, k), kind)
        for count in counts[:-1]:
            own = multiplied(executor, drawn[-count:], (rows, k), kind)
            np.testing.assert_array_equal(own, whole[-count:], err_msg=f"{rows}, {k}, {count}")


def multiplied(executor, drawn, shape, kind):
    """The linear of as many tokens in a plan made for that number."""
    x = feed("x", (Var("T", 1, len(drawn)), shape[1]), "f32")
    plan = executor.compile({"y": ops.linear(x, weight("w", shape, kind))})
    return executor.run(plan, {"x": drawn})["y"]


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k", "q6_k", "q3_k"])
def test_gated_units_do_not_depend_on_the_number_of_tokens(kind):
    """One kernel computes them, with the same bits for any number of tokens."""
    rng, (rows, k) = np.random.default_rng(0), (300, 1536)
    pair = {f"w{i}": quantised(normal(rng, (rows, k)).astype(np.float32), kind) for i in range(2)}
    drawn = rng.standard_normal((TOKENS[-2], k)).astype(np.float32)
    found = {}
    for without in ((), ("gated",)):
        for count in (TOKENS[-2], 128, 33, 16, 2):
            executor = GuardedExecutor(Arrays(pair), ORDER, Options(without=without))
            x = feed("x", (Var("T", 1, count), k), "f32")
            gate, up = (ops.linear(x, weight(name, (rows, k), kind)) for name in pair)
            y = ops.quantise_act(ops.mul(ops.silu(gate), up), dtype="f16")
            plan = executor.compile({"y": y})
            assert ("gated" in [s.node.op for s in plan.steps]) == (not without)
            found[without, count] = executor.run(plan, {"x": drawn[-count:]})["y"]
            np.testing.assert_array_equal(
                found[without, count], found[(), TOKENS[-2]][-count:], err_msg=f"{count} {without}"
            )


# A depth for each shape of gemv_shapes.py, for blocks of 32 and of 256.
DEPTHS = {32: (96, 640, 896, 2048, 8192, 8224), 256: (512, 8192, 8448)}
ROWS = (1, 37)  # the last block has warps without a row


def depths(kind: str) -> tuple[int, ...]:
    return DEPTHS[32 if dtype(kind).block <= 32 else 256]


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_one_token_of_any_depth(kind):
    """Exact except for the order of summation."""
    x = activation_name(kind) if dtype(kind).quantised else "f32"
    own = [
        linear_sample(t, (rows, k), kind, x) for t in (0, 1) for rows in ROWS for k in depths(kind)
    ]
    least = 3e-5 if kind == "bf16" else FP8 if kind.startswith("fp8") else 0.0
    wrong = run_bounded("linear", own, least=least)
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_one_gated_token_of_any_depth(kind):
    """Equal to its parts, which multiply the same quantised activations."""
    rng = np.random.default_rng(0)
    for rows in ROWS:
        for k in depths(kind):
            drawn = normal(rng, (2, rows, k)).astype(np.float32)
            pair = {f"w{i}": quantised(drawn[i], kind) for i in range(2)}
            feeds = {"x": rng.standard_normal((1, k)).astype(np.float32)}
            found = []
            for without in ((), ("gated",)):
                executor = GuardedExecutor(Arrays(pair), ORDER, Options(without=without))
                x = feed("x", (Var("T", 1, 1), k), "f32")
                gate, up = (ops.linear(x, weight(name, (rows, k), kind)) for name in pair)
                plan = executor.compile({"y": ops.mul(ops.silu(gate), up)})
                assert ("gated" in [s.node.op for s in plan.steps]) == (not without)
                found.append(executor.run(plan, feeds)["y"])
            np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5, err_msg=f"{rows}, {k}")
