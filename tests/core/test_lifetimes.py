"""Lifetimes: what an executor caches for a graph is freed with the graph. Feeds are checked."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from short_graphs import campaign, held

from graphllm import ops
from graphllm.errors import GraphError
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

T = Var("T", 0, 8)
X = np.arange(12, dtype=np.float32).reshape(3, 4)
ORDERS = [("reference",), ("cpu", "reference")]
every_order = pytest.mark.parametrize("order", ORDERS, ids="+".join)


@pytest.fixture
def no_gc():
    """Disable the garbage collector: objects must be freed by reference counts.

    Objects that exist already are exempt from it until the end of the test, so that a collection
    takes milliseconds, whatever has been imported.
    """
    gc.collect(0)
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("count", [200, 1000])
@every_order
def test_short_lived_graphs_are_right_and_leave_nothing(order, count, no_gc):
    found = campaign(count, order)
    assert (found.wrong, found.held) == (0, 0)
    assert found.grown < 2 << 20


FEEDS = {"x": X, "slot": np.arange(3, dtype=np.int32)}


@pytest.fixture(params=ORDERS, ids="+".join)
def executor(request):
    return Executor(Arrays({"w": np.full(4, 2, np.float32)}), request.param)


def outputs():
    x, pool = feed("x", (T, 4), "f32"), state("pool", (8, 1, 4), "f32")
    written = ops.kv_write(pool, x.reshape(T, 1, 4), feed("slot", (T,), "i32"))
    return {"y": ops.rms_norm(x, weight("w", (4,), "f32"), eps=1e-6), "pool": written}


def test_the_same_graph_has_one_plan_while_it_lives(executor, no_gc):
    graph = outputs()
    plan = executor.compile(graph)
    assert executor.compile(graph) is plan and executor.compile(graph, {"T": (1, 3)}) is not plan
    assert executor.compile(outputs()) is not plan


def test_state_lives_as_long_as_the_graph_that_has_it(executor, no_gc):
    graph = outputs()
    executor.run(executor.compile(graph), FEEDS)
    np.testing.assert_array_equal(executor.get_state("pool", 3)[:, 0], X)
    again = outputs()  # another graph with the same state
    executor.bind(executor.compile(again))
    del graph
    np.testing.assert_array_equal(executor.get_state("pool", 3)[:, 0], X)
    del again
    assert held(executor) == 0
    with pytest.raises(GraphError, match="no input or state 'pool'"):
        executor.get_state("pool")


def test_a_plan_outlives_its_graph(executor, no_gc):
    plan = executor.compile(outputs())
    assert np.isfinite(executor.run(plan, FEEDS)["y"]).all()
    np.testing.assert_array_equal(executor.get_state("pool", 3)[:, 0], X)
    del plan
    assert held(executor) == 0


def test_a_graph_goes_when_one_of_its_outputs_does(executor, no_gc):
    x = feed("x", (T, 4), "f32")
    executor.bind(executor.compile({"x": x, "y": ops.silu(x)}))
    sizes = executor.cache_sizes()
    assert sizes["graphs"] == 1  # x is alive, and nothing else
    assert sizes["plans"] == sizes["values"] == 0


def test_a_placed_model_is_kept(executor, no_gc):
    executor.place_model(outputs())
    model = executor.model
    plan = executor.compile({"y": model["y"]})
    address = weakref.ref(plan)
    del plan
    assert address() is executor.compile({"y": model["y"]})


def test_an_executor_is_no_cycle(executor, request, no_gc):
    """So its memory is freed with the last reference."""
    own = Executor(Arrays({"w": np.full(4, 2, np.float32)}), ORDERS[1])
    graph = outputs()
    plan = own.compile(graph)
    own.run(plan, FEEDS)
    gone, buffer = weakref.ref(own), weakref.ref(own.arenas["host"])
    del own, plan
    assert gone() is None and buffer() is None


def test_two_leaves_of_one_name_must_agree(executor):
    x = feed("x", (4,), "f32")
    with pytest.raises(GraphError, match=r"leaf 'x' is i32\[4\], elsewhere f32\[4\]"):
        executor.compile({"a": ops.silu(x), "b": ops.gather_rows(X_TABLE, feed("x", (4,), "i32"))})
    y = ops.silu(x)
    plan = executor.compile({"y": y})
    with pytest.raises(GraphError, match=r"leaf 'x' is f32\[8\], elsewhere f32\[4\]"):
        executor.compile({"y": ops.silu(feed("x", (8,), "f32"))})
    del y, plan
    executor.compile({"y": ops.silu(feed("x", (8,), "f32"))})


X_TABLE = weight("table", (8, 4), "f32")


# ------------------------------------------------------------------------------------------- feeds


def test_a_plan_of_another_executor_is_refused(executor):
    other = Executor(executor.weights, ("reference",))
    plan = other.compile(outputs())
    for call in (
        executor.bind,
        lambda p: executor.run(p, FEEDS),
        lambda p: executor.with_outputs(p, {}),
    ):
        with pytest.raises(GraphError, match="does not belong to this executor"):
            call(plan)
    with pytest.raises(GraphError, match="does not belong to this executor"):
        executor.decode_loop(plan, FEEDS, {"T": 3}, "y")


def test_a_missing_feed_is_named(executor):
    plan = executor.compile(outputs())
    executor.run(plan, FEEDS)
    for name in FEEDS:
        with pytest.raises(GraphError, match=f"input '{name}' .* is not fed"):
            executor.run(plan, {k: v for k, v in FEEDS.items() if k != name}, {"T": 3})


def test_a_decode_loop_keeps_its_feeds(executor):
    plan, live = executor.compile(outputs()), {"T": 3}
    with pytest.raises(GraphError, match=r"input '.*' .* was never fed"):
        executor.decode_loop(plan, {}, live, "y")
    want = executor.run(plan, FEEDS)["y"]
    steps = executor.decode_loop(plan, {}, live, "y")
    steps.launch()
    np.testing.assert_array_equal(steps.take(), want)


def test_a_decode_loop_is_fed_again_with_what_its_arrays_hold(executor):
    """After runs with other live values, and beside a loop of the same plan."""
    plan = executor.compile(outputs())
    feeds = {name: array.copy() for name, array in FEEDS.items()}
    other = {"x": X[:2] - 5, "slot": np.array([7, 6], np.int32)}
    first = executor.decode_loop(plan, feeds, {"T": 3}, "y", others=["pool"])
    second = executor.decode_loop(plan, other, {"T": 2}, "y", others=["pool"])
    for loop, own in ((first, feeds), (second, other), (first, feeds)):
        own["x"] *= 3
        own["slot"][:] = own["slot"][::-1].copy()
        loop.feed()
        loop.launch()
        y, pool = loop.take(), *loop.take_others()
        fresh = Executor(executor.weights, ("reference",))
        np.testing.assert_allclose(y, fresh.run(fresh.compile(outputs()), own)["y"], rtol=1e-6)
        np.testing.assert_array_equal(pool[own["slot"], 0], own["x"])


FITTING = {
    "list": [[1, 2, 3, 4]] * 3,
    "float64": X.astype(np.float64),
    "float16": X.astype(np.float16),
    "int64": X.astype(np.int64),
    "bool": X > 3,
    "big-endian": X.astype(">f4"),
    "infinity": np.where(X > 3, -np.inf, 1),
}
LOST = {
    "complex": (X + 1j, "takes f32, not complex64"),
    "text": (X.astype(str), "takes f32, not <U"),
    "object": (X.astype(object), "takes f32, not object"),
    "ragged": ([[1.0], [1.0, 2.0]], "is not an array"),
    "beyond f32": (np.full((3, 4), 1e300), "which cannot hold 1e\\+300"),
    "no exact f32": (np.full((3, 4), 2**24 + 1), "which cannot hold 16777217"),
}
LOST_SLOTS = {
    "float": (np.ones(3), "takes i32, not float64"),
    "NaN": (np.full(3, np.nan, np.float32), "takes i32, not float32"),
    "beyond int32": (np.full(3, 2**31), "cannot hold 2147483648"),
    "unsigned": (np.full(3, 2**63, np.uint64), "cannot hold 9223372036854775808"),
    "complex": (np.ones(3, complex), "takes i32, not complex128"),
}


@pytest.mark.filterwarnings("ignore:invalid value")  # of the reference, for infinity
@pytest.mark.parametrize("label", FITTING)
def test_feeds_that_lose_nothing_are_converted(executor, label):
    plan, x = executor.compile(outputs()), np.asarray(FITTING[label], np.float32)
    executor.run(plan, {**FEEDS, "x": FITTING[label]})
    np.testing.assert_array_equal(executor.get_state("pool", 3)[:, 0], x)


@pytest.mark.parametrize(
    "name, label", [("x", k) for k in LOST] + [("slot", k) for k in LOST_SLOTS]
)
def test_feeds_that_would_lose_values_are_refused(executor, name, label):
    plan = executor.compile(outputs())
    data, words = (LOST if name == "x" else LOST_SLOTS)[label]
    with pytest.raises(GraphError, match=f"feed '{name}' .*{words}"):
        executor.run(plan, {**FEEDS, name: data})


def test_no_tokens_are_an_empty_list(executor):
    plan = executor.compile(outputs())
    assert executor.run(plan, {"x": np.zeros((0, 4)), "slot": []})["y"].shape == (0, 4)


def test_state_is_checked_as_feeds_are(executor):
    graph = outputs()
    executor.bind(executor.compile(graph))
    with pytest.raises(GraphError, match=r"'pool' is f32\[8,1,4\]; data of shape \(9, 1, 4\)"):
        executor.set_state("pool", np.zeros((9, 1, 4), np.float32))
    with pytest.raises(GraphError, match=r"'pool' is f32\[8,1,4\]; data of shape \(2, 4\)"):
        executor.set_state("pool", np.zeros((2, 4), np.float32))
    with pytest.raises(GraphError, match="'pool' takes f32, not complex128"):
        executor.set_state("pool", np.zeros((2, 1, 4), complex))


def test_too_many_vars_are_refused(executor):
    for i in range(16):
        x = feed(f"x{i}", (Var(f"V{i}", 0, 4), 4), "f32")
        executor.bind(executor.compile({"y": ops.silu(x)}))
    y = ops.silu(feed("more", (Var("More", 0, 4), 4), "f32"))
    with pytest.raises(GraphError, match="More: an executor's graphs may have 16 Vars"):
        executor.bind(executor.compile({"y": y}))
