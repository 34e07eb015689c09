"""w8a8 and fp8 on the GPU: many tiles of the result, wide rows, and the same bits for any number of
tokens. test_cuda_linear.py runs these formats at small sizes."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import ORDER, need_gpu, normal, quantised

from graphllm import ops
from graphllm.backends import Options
from graphllm.formats import ROW_FORMATS, activation_of
from graphllm.formats.activations import dequantise_act, quantise_act
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
K, COUNT = 384, 700  # depth, tokens


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def compiled(build, weights, count: int, options: Options | None = None):
    """An executor, and its plan of ``build``(x) for x [count, K]."""
    executor = GuardedExecutor(Arrays(weights), ORDER, options or Options())
    x = feed("x", (Var("T", 1, count), K), "f32")
    return executor, executor.compile({"y": build(x)})


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """What quantised activations stand for, in float64."""
    form = activation_of(dtype(kind))
    return dequantise_act(quantise_act(x, form), form, x.shape[-1]).astype(np.float64)


@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_many_tiles(kind):
    """More tiles than multiprocessors, an odd number of rows, bias and residual."""
    rng, shapes = np.random.default_rng(0), {"a": (6_001, K), "b": (130, K)}
    values = {n: normal(rng, shape).astype(np.float32) for n, shape in shapes.items()}
    weights = {n: quantised(w, kind) for n, w in values.items()}
    bias = rng.standard_normal(6_001).astype(np.float32)
    x = rng.standard_normal((COUNT, K)).astype(np.float32)

    def build(x):
        own = {n: ops.linear(x, weight(n, shape, kind)) for n, shape in shapes.items()}
        added = ops.linear(x, weight("a", shapes["a"], kind), weight("bias", (6_001,), "f32"))
        return ops.concat(ops.add(own["a"], added), own["b"])

    executor, plan = compiled(build, {**weights, "bias": bias}, COUNT)
    found = executor.run(plan, {"x": x})["y"]
    exact = {n: rounded(x, kind) @ w.dequantise().astype(np.float64).T for n, w in weights.items()}
    wanted = np.concatenate([2 * exact["a"] + bias, exact["b"]], axis=1)
    least = 2e-5 if kind == "w8a8" else 2e-3
    assert np.abs(found - wanted).max() < least * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ROW_FORMATS)
@pytest.mark.parametrize("count", [1, 3, COUNT])
def test_gated_units(kind, count):
    """Equal to the linears and their product."""
    rng, shape = np.random.default_rng(1), (1_500, K)
    pair = {n: quantised(normal(rng, shape).astype(np.float32), kind) for n in ("gate", "up")}
    x = rng.standard_normal((count, K)).astype(np.float32)

    def build(x):
        gate, up = (ops.linear(x, weight(n, shape, kind)) for n in pair)
        return ops.mul(ops.silu(gate), up)

    found = []
    for without in ((), ("gated", "glu")):
        executor, plan = compiled(build, pair, count, Options(without=without))
        assert ("gated" in [s.node.op for s in plan.steps]) == (not without)
        found.append(executor.run(plan, {"x": x})["y"])
    np.testing.assert_allclose(*found, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [1_504, 9_040])
def test_gated_units_of_many_tokens(rows):
    """Products of fp8 that are stored as f16 without scales: the largest possible sums, zeros, and
    rows of tokens and weights of very different size."""
    rng = np.random.default_rng(5)
    w = {n: normal(rng, (rows, K)).astype(np.float32) for n in ("gate", "up")}
    w["gate"][0], w["up"][1] = 1, 1e-6
    x = rng.standard_normal((COUNT, K)).astype(np.float32)
    x[1], x[2], x[3:6] = 1, 0, x[3:6] * [[1e-5], [1e2], [1e3]]
    pair = {n: quantised(values, "fp8") for n, values in w.items()}

    def build(x):
        gate, up = (ops.linear(x, weight(n, (rows, K), "fp8")) for n in pair)
        return ops.mul(ops.silu(gate), up)

    executor, plan = compiled(build, pair, COUNT)
    assert "gated" in [s.node.op for s in plan.steps]
    found = executor.run(plan, {"x": x})["y"]
    gate, up = (rounded(x, "fp8") @ v.dequantise().astype(np.float64).T for v in pair.values())
    wanted = gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up
    error, size = np.abs(found - wanted).max(1), np.abs(wanted).max(1)
    assert np.all(error <= 3e-3 * size)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_results_do_not_depend_on_the_number_of_tokens(kind, deterministic):
    """Sums of w8a8 are exact, so that all kernels agree; those of fp8 if `deterministic`."""
    rng, shape = np.random.default_rng(2), (700, K)
    w = {"w": quantised(normal(rng, shape).astype(np.float32), kind)}
    x = rng.standard_normal((COUNT, K)).astype(np.float32)
    counts = (1, 2, 40, 130, 256, 300, COUNT)
    if kind != "w8a8" and not deterministic:
        counts = counts[:5]
    found = {}
    for count in counts:
        executor, plan = compiled(
            lambda x: ops.linear(x, weight("w", shape, kind)), w, count,
            Options(deterministic=deterministic),
        )  # fmt: skip
        found[count] = executor.run(plan, {"x": x[:count]})["y"]
        np.testing.assert_array_equal(found[count][:1], found[1], err_msg=f"{count} tokens")
    np.testing.assert_array_equal(found[counts[-1]][:40], found[40])


@pytest.mark.parametrize("width", [96, 8_192, 20_480])
@pytest.mark.parametrize("kind", ["a8_row", "f8_row"])
def test_rows_of_any_width_are_quantised(kind, width):
    """Rows that fit in the registers of a block, and wider ones."""
    x = np.random.default_rng(3).standard_normal((3, width)).astype(np.float32)
    x[1, -1] = 1e4
    executor = GuardedExecutor(Arrays({}), ORDER, Options())
    y = ops.quantise_act(feed("x", (Var("T", 1, 3), width), "f32"), dtype=kind)
    found = executor.run(executor.compile({"y": y}), {"x": x})["y"]
    np.testing.assert_array_equal(found.reshape(3, -1), quantise_act(x, dtype(kind)))
