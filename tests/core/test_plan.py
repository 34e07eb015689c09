"""Graph passes, placement with reasons, lowering, memory, and the executor's contract."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphllm import backends, ops
from graphllm.backends import ROWS, Backend, Options
from graphllm.backends.alignment import ALIGN, aligned
from graphllm.backends.reference import HostDevice
from graphllm.compiler import memory
from graphllm.compiler.placement import place
from graphllm.compiler.plan import compile_plan
from graphllm.debug import listing
from graphllm.errors import GraphError, PlacementError
from graphllm.graph import rewrite
from graphllm.graph.tensor import Meta, Var, feed, scope, state, weight
from graphllm.profiler.record import Recorder
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

T = Var("T", 1, 8)


class ToyDevice(HostDevice):
    """Runs the results of builders, here NumPy functions, with the reference's segment."""


def toy(**kernels) -> Backend:
    """Return a backend whose kernels are the NumPy bodies, registered with the given rules."""
    backend = Backend("toy", lambda: (True, "a test"), lambda options: ToyDevice())
    for name, rules in kernels.items():
        backend.kernel(name, **rules)(ops.get(name).reference)
    return backend


@pytest.fixture
def with_toy(monkeypatch):
    """A mapping whose entry "toy" is the backend that Executor(backends=("toy", ...)) finds."""
    known = {}
    real = backends.find
    monkeypatch.setattr(backends, "find", lambda name: known.get(name) or real(name))
    return known


def test_equal_nodes_merge_and_keep_their_scopes():
    x = feed("x", (T, 4), "f32")
    with scope("a"):
        a = ops.silu(x)
    with scope("b"):
        b = ops.silu(x)
    merged = rewrite.merge({"y": ops.add(a, b)})
    silus = [n for n in rewrite.toposort(merged.values()) if n.op == "silu"]
    assert [n.scopes for n in silus] == [("a", "b")]
    nodes = rewrite.toposort(merged.values())
    assert listing(nodes, merged).count("silu") == 1


def test_verify_finds_a_read_after_an_overwrite():
    pool, x = state("pool", (8, 1, 4), "f32"), feed("x", (T, 1, 4), "f32")
    slot = feed("slot", (T,), "i32")
    written = ops.kv_write(pool, x, slot)
    stale = ops.gather_rows(pool, slot)
    with pytest.raises(GraphError, match="'pool'"):
        rewrite.verify({"y": stale, "pool": written})
    rewrite.verify({"y": ops.gather_rows(written, slot)})
    with pytest.raises(GraphError, match="not a state"):
        rewrite.verify({"y": ops.kv_write(feed("p", (8, 1, 4), "f32"), x, slot)})


def test_verify_finds_a_node_that_reads_what_it_overwrites():
    pool, slot = state("pool", (64, 1, 16), "f32"), feed("slot", (40,), "i32")
    with pytest.raises(GraphError, match="kv_write reads the state that it writes"):
        rewrite.verify({"y": ops.kv_write(pool, pool.slice(0, 0, 40), slot)})


def test_verify_finds_outputs_that_are_overwritten():
    """Old versions, and views of them; the last version may be an output."""
    pool, x = state("pool", (8, 1, 4), "f32"), feed("x", (T, 1, 4), "f32")
    first = ops.kv_write(pool, x, feed("slot", (T,), "i32"))
    second = ops.kv_write(first, x, feed("other", (T,), "i32"))
    for old in (pool, pool.slice(0, 2, 5), first, first.slice(0, 2, 5)):
        with pytest.raises(GraphError, match="'old' is a state that is overwritten"):
            rewrite.verify({"old": old, "new": second})
    rewrite.verify({"new": second, "view": second.slice(0, 2, 5)})


def test_verify_finds_leaves_that_disagree():
    y = ops.add(ops.silu(feed("x", (T, 4), "f32")), ops.silu(feed("x", (T, 4), "f32")))
    rewrite.verify({"y": y})
    with pytest.raises(GraphError, match="two leaves 'x'"):
        rewrite.verify({"y": y, "z": ops.silu(feed("x", (T, 5), "f32"))})


def test_the_executor_verifies_what_it_compiles():
    """Shapes and leaves with the placement, the order of states with each choice of outputs."""
    pool, x = state("pool", (8, 1, 4), "f32"), feed("x", (T, 1, 4), "f32")
    slot, other = feed("slot", (T,), "i32"), feed("x", (T, 1, 5), "f32")
    wrong, good = ops.silu(x), ops.scale(x, factor=2.0)
    wrong.meta = Meta.of((T, 1, 3), "f32")
    ex = Executor(backends=("reference",))
    with pytest.raises(GraphError, match="its shape rule gives"):
        ex.compile({"y": ops.silu(wrong), "z": good})
    with pytest.raises(GraphError, match="leaf 'x'"):
        ex.compile({"y": good, "z": ops.silu(other)})
    model = {"y": ops.gather_rows(pool, slot), "pool": ops.kv_write(pool, x, slot)}
    ex.place_model(model)
    for name in model:
        ex.compile({name: model[name]})
    with pytest.raises(GraphError, match="'pool', which kv_write overwrites"):
        ex.compile(model)


def test_only_disjoint_lifetimes_share_memory():
    rng = np.random.default_rng(0)
    for _ in range(50):
        intervals = []
        for _ in range(rng.integers(1, 30)):
            first = int(rng.integers(0, 20))
            size = int(rng.integers(0, 5000))
            intervals.append(memory.Interval(first, first + int(rng.integers(0, 8)), size))
        offsets, total = memory.assign(intervals)
        spans = list(zip(intervals, offsets))
        for (a, at_a), (b, at_b) in itertools.combinations(spans, 2):
            meet = a.first <= b.last and b.first <= a.last
            apart = at_a + a.nbytes <= at_b or at_b + b.nbytes <= at_a
            assert apart or not meet or not a.nbytes or not b.nbytes
        assert all(at % ALIGN == 0 and at + i.nbytes <= total for i, at in spans)
        peak = max(sum(aligned(i.nbytes) for i in intervals if i.first <= t <= i.last)
                   for t in range(30))  # fmt: skip
        assert total >= peak


def test_placement_keeps_every_reason(with_toy):
    with_toy["toy"] = toy(silu={"dtypes": {"x": "f16"}}, add={})
    x = feed("x", (T, 4), "f32")
    with scope("model.layers.0"):
        y = ops.add(ops.silu(x), ops.scale(x, factor=2.0))
    ex = Executor(backends=("toy", "reference"))
    plan = ex.compile({"y": y})
    why = {s.node.op: s.choice.why for s in plan.steps}
    assert why["silu"] == "toy: x is f32, not f16"
    assert why["scale"] == "toy: toy has no kernel for scale"
    assert why["add"] == ""
    assert "x is f32, not f16" in plan.explain()
    assert len(plan.segments()) == 2
    with pytest.raises(PlacementError, match=r"model\.layers\.0: s.* would run on reference"):
        Executor(backends=("toy", "reference"), strict=True).compile({"y": y})
    with pytest.raises(PlacementError, match="no backend can run"):
        Executor(backends=("toy",)).compile({"y": y})
    pinned = Executor(backends=("toy", "reference"), pins={"model.layers.*": "reference"})
    assert {s.backend.name for s in pinned.compile({"y": y}).steps} == {"reference"}
    data = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    a, b = (e.run(e.compile({"y": y}), {"x": data})["y"] for e in (ex, pinned))
    np.testing.assert_array_equal(a, b)


def test_lowering_inserts_one_shared_layout_op(with_toy):
    with_toy["toy"] = toy(silu={}, gelu={}, scale={"layout": {"x": ROWS}}, contiguous={
        "layout": {"x": "any"}})  # fmt: skip
    x = feed("x", (T, 8), "f32").slice(1, 2, 6)
    y = {"a": ops.silu(x), "b": ops.gelu(x), "c": ops.scale(x, factor=3.0)}
    plan = Executor(backends=("toy", "reference")).compile(y)
    assert sorted(s.node.op for s in plan.steps) == ["contiguous", "gelu", "scale", "silu"]


def test_lowering_copies_between_memories(with_toy):
    class Remote(ToyDevice):
        memory = "remote"

    remote = toy(silu={}, copy={"layout": {"x": "any"}})
    remote.open_device = lambda options: Remote()
    with_toy["toy"] = remote
    x = feed("x", (T, 4), "f32")
    y = ops.scale(ops.silu(ops.scale(x, factor=2.0)), factor=3.0)
    plan = Executor(backends=("toy", "reference")).compile({"y": y})
    assert [s.node.op for s in plan.steps] == ["scale", "copy", "silu", "copy", "scale"]
    assert set(plan.arena) == {"host", "remote"}


def test_a_plan_is_kept_and_buckets_share_placement():
    x = feed("x", (T, 4), "f32")
    y = {"y": ops.silu(x)}
    ex = Executor(backends=("reference",))
    one, many = ex.compile(y, {"T": (1, 1)}), ex.compile(y, {"T": (1, 8)})
    assert one is ex.compile(y, {"T": (1, 1)}) and one is not many
    assert one.arena["host"] < many.arena["host"]
    data = np.ones((1, 4), np.float32)
    ex.run(many, {"x": np.ones((8, 4), np.float32)})
    np.testing.assert_array_equal(ex.run(one, {"x": data})["y"], ex.run(many, {"x": data})["y"])


def test_feeds_are_checked():
    x, w = feed("x", (T, 4), "f32"), weight("w", (4,), "f32")
    ex = Executor(Arrays({"w": np.ones(4, np.float32)}), ("reference",))
    plan = ex.compile({"y": ops.rms_norm(x, w, eps=1e-6)})
    with pytest.raises(GraphError, match="feed 'x'"):
        ex.run(plan, {"x": np.ones((2, 5), np.float32)})
    with pytest.raises(GraphError, match=r"T = 9 is not in 1\.\.8"):
        ex.run(plan, {"x": np.ones((9, 4), np.float32)})
    with pytest.raises(GraphError, match=r"input .x. \(f32\[T,4\]\) is not fed"):
        ex.run(plan)
    missing = Executor(Arrays({}), ("reference",))
    with pytest.raises(GraphError, match="'w' is None"):
        missing.bind(missing.compile({"y": ops.rms_norm(x, w, eps=1e-6)}))


def test_guards_catch_an_out_of_bounds_write(with_toy):
    with_toy["toy"] = toy(silu={})

    class OutOfBounds(ToyDevice):
        def build(self, steps, header):
            segment = super().build(steps, header)
            run, out = segment.run, steps[0].out

            def write_past_the_end(log):
                run(log)
                out.buffer[out.meta.offset + out.meta.bound().nbytes] = 1

            segment.run = write_past_the_end
            return segment

    with_toy["toy"].open_device = lambda options: OutOfBounds()
    ex = GuardedExecutor(backends=("toy", "reference"))
    plan = ex.compile({"y": ops.silu(feed("x", (T, 4), "f32"))})
    with pytest.raises(GraphError, match="wrote outside"):
        ex.run(plan, {"x": np.ones((8, 4), np.float32)})


def test_costs_use_live_values():
    x, w = feed("x", (T, 32), "f32"), weight("w", (16, 32), "f32")
    ex = Executor(Arrays({"w": np.ones((16, 32), np.float32)}), ("reference",))
    with scope("layer"):
        plan = ex.compile({"y": ops.linear(x, w)})
    for rows in (1, 5):
        seen = Recorder()
        ex.run(plan, {"x": np.ones((rows, 32), np.float32)}, profile=seen)
        (row,) = seen.rows
        assert (row.op, row.backend, row.scope) == ("linear", "reference", "layer")
        assert row.flops == 2 * rows * 16 * 32
        assert row.bytes == 4 * (rows * 32 + 16 * 32 + rows * 16) and row.ns > 0


def test_state_persists_between_runs():
    pool, x = state("pool", (8, 1, 4), "f32"), feed("x", (T, 1, 4), "f32")
    slot = feed("slot", (T,), "i32")
    ex = Executor(backends=("reference",))
    plan = ex.compile({"y": ops.gather_rows(ops.kv_write(pool, x, slot), feed("at", (T,), "i32"))})
    at = np.array([5], np.int32)
    first = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    ex.run(plan, {"x": first, "slot": at, "at": at})
    out = ex.run(plan, {"x": first * 2, "slot": np.array([2], np.int32), "at": at})
    np.testing.assert_array_equal(out["y"], first)
    np.testing.assert_array_equal(ex.get_state("pool")[2], first[0] * 2)
    with pytest.raises(GraphError, match="no input or state 'nothing'"):
        ex.get_state("nothing")


def test_compile_plan_can_be_used_without_an_executor():
    backend = backends.find("reference")
    y = ops.silu(feed("x", (T, 4), "f32"))
    placement, _ = place({"y": y}, [backend], Options(), lambda b: "host")
    plan = compile_plan(placement)
    assert [s.node.op for s in plan.steps] == ["silu"] and plan.arena == {"host": 128}
