"""Copies between memories in small graphs; `test_placement.py` tests whole models."""

from __future__ import annotations

import numpy as np
import pytest
from remote_memory import remote  # noqa: F401

from graphllm import ops
from graphllm.compiler.plan import HOST
from graphllm.graph.tensor import Var, feed, scope, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays


def test_a_state_is_copied_where_pins_ask_for_it(remote):  # noqa: F811
    t, pool = Var("T", 1, 4), state("pool", (8, 1, 4), "f32")
    slot = feed("slot", (t,), "i32")
    with scope("write"):
        written = ops.kv_write(pool, feed("x", (t, 1, 4), "f32"), slot)
    with scope("read"):
        y = ops.gather_rows(written, slot)
    executor = Executor(backends=("remote", "reference"), pins={"read": "reference"})
    plan = executor.compile({"y": y})
    assert {s.backend.name for s in plan.steps} == {
        "reference"
    }  # the writer moves to the same memory
    executor = Executor(
        backends=("remote", "reference"), pins={"read": "reference", "write": "remote"}
    )
    plan = executor.compile({"y": y})
    assert [s.node.op for s in plan.steps] == ["kv_write", "copy", "gather_rows"]
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    np.testing.assert_array_equal(
        executor.run(plan, {"x": x, "slot": np.array([3], np.int32)})["y"], x
    )


@pytest.mark.parametrize("kind", ["fed", "kept", "weight", "made"])
@pytest.mark.parametrize("target", [HOST, "remote"])
def test_a_copy_that_the_graph_asks_for(remote, kind, target):  # noqa: F811
    """Explicit copies in a graph, with users of the source in both memories."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    leaf = {"kept": state, "weight": weight}.get(kind, feed)("x", (3, 4), "f32")
    with scope("near"):
        source = ops.scale(leaf, factor=2.0) if kind == "made" else leaf
        outputs = {"near": ops.scale(source, factor=3.0)}
    with scope("copy"):
        outputs["copy"] = ops.copy(source, memory=target)
    with scope("remote"):
        outputs["remote"] = ops.scale(source, factor=5.0)
    pins = {"near": "reference", "remote": "remote", "copy": "remote"}
    executor = Executor(Arrays({"x": x}), backends=("remote", "reference"), pins=pins)
    plan = executor.compile(outputs)
    other = HOST if target == "remote" else "remote"
    found = {(copies.source, copies.target): str(copies) for copies in plan.copies()}
    if kind in ("fed", "weight"):  # in both memories
        assert list(found) == [(other, target)]
        assert found[other, target].endswith(": 1, of 48 bytes in all")
    assert (other, target) in found
    executor.bind(plan)
    if kind == "kept":
        executor.set_state("x", x)
    values = executor.run(plan, {"x": x} if kind in ("fed", "made") else {})
    source = 2 * x if kind == "made" else x
    for name, factor in (("near", 3), ("copy", 1), ("remote", 5)):
        np.testing.assert_array_equal(values[name], factor * source)
