"""Shapes and values at the limits of what ops accept, on the CPU and on the reference."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm import ops
from graphllm.errors import GraphError
from graphllm.graph.tensor import Var, feed, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

T = Var("T", 0, 8)


def results(y, feeds, **weights) -> list[np.ndarray]:
    """The result of a node on each backend."""
    found = []
    for backend in ("cpu", "reference"):
        executor = Executor(Arrays(weights), (backend,))
        found.append(executor.run(executor.compile({"y": y}), feeds)["y"])
    return found


@pytest.mark.parametrize("rows", [5, T])
@pytest.mark.parametrize("name", ["softmax", "rms_norm", "layer_norm"])
def test_norms_of_one_axis_are_refused(name, rows):
    """The last axis is normalized, and the first one may vary."""
    w = [] if name == "softmax" else [weight("w", (5,), "f32")]
    attrs = {} if name == "softmax" else {"eps": 1e-5}
    with pytest.raises(GraphError, match="x has one axis"):
        ops.get(name)(feed("x", (rows,), "f32"), *w, **attrs)


@pytest.mark.parametrize("name", ["add", "mul"])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("rows", [4, T])
def test_a_vector_and_a_scalar(name, shape, rows):
    x, s = np.arange(4, dtype=np.float32), np.full(shape, 3, np.float32)
    y = ops.get(name)(feed("x", (rows,), "f32"), weight("s", shape, "f32"))
    for found in results(y, {"x": x}, s=s):
        np.testing.assert_array_equal(found, x + 3 if name == "add" else x * 3)


def test_casts_of_five_axes_are_refused():
    with pytest.raises(GraphError, match="5 axes, more than 4"):
        ops.cast(feed("x", (T, 1, 2, 3, 4), "f32"), dtype="f16")


def test_gelu_of_infinite_values():
    """x erfc(-x) is undefined at minus infinity, as PyTorch has it."""
    x = np.array([[np.inf, -np.inf, 1e30, -1e30, 20, -20, np.nan]], np.float32)
    for found in results(ops.gelu(feed("x", (T, 7), "f32"), kind="erf"), {"x": x}):
        want = np.array([[np.inf, np.nan, 1e30, 0, 20, 0, np.nan]], np.float32)
        np.testing.assert_array_equal(found, want)
