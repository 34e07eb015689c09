"""CUDA backend on a GPU: every op and sample, fused ops, CUDA graphs and whole decoders.

Skipped, with the reason, where no GPU can be used; `test_cuda_compile.py` needs none.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import groups, mismatch
from cuda_cases import ARCHS, ORDER, greedy, need_gpu
from cuda_results import unequal
from fusion_cases import FUSED, NOT_ON_CUDA, named, nmse
from op_runs import KERNELS, OPS, report, run_all
from tiny_models import write_tiny

import graphllm
from graphllm import backends, ops
from graphllm.backends import Kernel, Options
from graphllm.backends.cuda import BACKEND
from graphllm.errors import OutOfMemory
from graphllm.formats.quantization import dequantise
from graphllm.graph.dtype import CACHED, dtype
from graphllm.graph.fused_op import results
from graphllm.graph.tensor import Var, feed, state, weight
from graphllm.profiler.record import Recorder
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
# Products of many tokens round activations and dequantized weights to f16 or bf16. Tolerances for
# few tokens, and for float32, are tighter in test_cuda_linear.py and the tests of attention.
HALVES = {"linear": 6e-3, "attention": 2e-3, "packed_attention": 2e-3, "linear_quantise": 6e-3,
          "packed_attention_quantise": 8e-3, "layer_norm_quantise": 1e-3,
          "linears": 6e-3, "gated": 6e-3, "linear_add": 6e-3, "linears_quantise": 6e-3,
          "linear_add_quantise": 6e-3,
          "expert_linear": 1e-2, "head_linear": 1e-2, "expert_gated": 1e-2,
          "expert_clamped": 1e-2}  # fmt: skip


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


@pytest.fixture(params=[True, False], ids=["graphs", "launches"])
def captured(request, monkeypatch):
    """Whether plans are replayed as CUDA graphs from the second run on, or launched one by one."""
    if not request.param:
        monkeypatch.setattr("graphllm.backends.cuda.runtime.segment.MAX_GRAPHS", 0)
    return request.param


@pytest.mark.parametrize("name", OPS)
def test_op(name, captured):
    wrong = run_all(name, ORDER, Options(), floor=HALVES.get(name, 0.0))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("linear, cap", [("float", 0.0), ("integer", np.inf)])
def test_linear_options(linear, cap):
    wrong = run_all("linear", ORDER, Options(linear=linear), cap, HALVES["linear"])
    assert not wrong, report(wrong)


def test_every_contiguous_sample_runs_on_the_gpu():
    refused = set()
    for name in set(KERNELS) - {"quantise"}:  # weights are quantised on the host
        for group in groups(ops.get(name)):
            choice = BACKEND.select(group.node, Options()) if group.contiguous else None
            if choice is not None and not isinstance(choice, Kernel):
                refused.add(f"{name}: {choice}")
    assert not refused


@pytest.mark.parametrize("name", sorted(set(FUSED) - NOT_ON_CUDA))
def test_fused_equals_its_parts(name):
    """Samples without a fused kernel are not compared."""
    wrong, compared = [], 0
    for group in groups(ops.get(name)):
        if isinstance(BACKEND.select(group.node, Options()), Kernel):
            cases = {c.sample.label: (c.feeds, c.sample.env) for c in group.cases}
            tolerance = max(HALVES.get(name, 0.0), *(c.tolerance for c in group.cases))
            wrong += unequal(group.node, cases, group.weights, tolerance)
            compared += len(cases)
    assert compared and not wrong, report(wrong)


@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.parametrize("width, style", [(64, "half"), (96, "half"), (128, "half"), (256, "half"),
                                          (128, "interleaved")])  # fmt: skip
def test_heads_are_rotated_and_written(width, style, kind):
    """rope_write has kernels for some head dimensions, and for few and many tokens."""
    rng, heads, kv, slots = np.random.default_rng(width), 6, 2, 512
    t = Var("T", 1, 400)
    q, k, v = (feed(n, (t, h, width), "f32") for n, h in zip("qkv", (heads, kv, kv)))
    pos, slot = feed("pos", (t,), "i32"), feed("slot", (t,), "i32")
    pools = (state(n, (slots, kv, width), kind) for n in ("kp", "vp"))
    weights = {n: rng.standard_normal(width).astype(np.float32) for n in ("qn", "kn")}
    norms = (weight(n, (width,), "f32") for n in weights)
    rotation = {
        "base": 1e4,
        "dims": 0,
        "style": style,
        "scale": 1.0,
        "attention_factor": 1.25,
        "eps": 1e-6,
    }
    node = ops.get("rope_write").node(q, k, v, pos, *pools, slot, *norms, **rotation)
    cases = {}
    for count in (1, 5, 400):
        feeds = {n: rng.standard_normal((count, h, width)).astype(np.float32)
                 for n, h in zip("qkv", (heads, kv, kv))}  # fmt: skip
        feeds |= {"pos": np.arange(count, dtype=np.int32) * 9}
        feeds |= {"slot": rng.permutation(slots)[:count].astype(np.int32)}
        cases[f"{count}"] = feeds, {"T": count}
    if not dtype(kind).quantised:
        assert not unequal(node, cases, weights, 1e-3 if kind == "f16" else 1e-5)
        return
    # A different rounding of a rotated key may change a quantized value: compare dequantized ones.
    for label, (feeds, env) in cases.items():
        found = []
        for order in (("cuda",), ("reference",)):
            executor = Executor(Arrays(weights), order)
            made = (
                results(node) if order == ("cuda",) else ops.get(node.op)(*node.src, **node.attrs)
            )
            plan = executor.compile(named(made))
            executor.bind(plan)
            for name in ("kp", "vp"):
                nbytes = kv * dtype(kind).row_nbytes(width)
                executor.set_state(name, np.zeros((slots, nbytes), np.uint8))
            executor.run(plan, feeds, env, fetch=())
            pools = [executor.get_state(n).reshape(slots * kv, -1) for n in ("kp", "vp")]
            found.append([dequantise(pool, dtype(kind)) for pool in pools])
        for a, b in zip(*found):
            assert nmse(a, b) < (1e-6 if kind == "q8_0" else 1e-5), label


@pytest.mark.parametrize("width", [8448, 20000])
def test_norms_of_wide_rows(width):
    rng, t = np.random.default_rng(width), Var("T", 1, 3)
    weights = {n: rng.standard_normal(width).astype(np.float32) for n in ("w", "w2")}
    x, h = feed("x", (t, width), "f32"), feed("h", (t, width), "f32")
    w, w2 = (weight(n, (width,), "f32") for n in weights)
    feeds = {n: rng.standard_normal((2, width)).astype(np.float32) for n in "xh"}
    y = ops.rms_norm(x, w, eps=1e-5)
    executor = Executor(Arrays(weights), ("cuda",))
    got = executor.run(executor.compile({"y": y}), feeds)["y"]
    want = ops.get("rms_norm").reference(feeds["x"], weights["w"], eps=1e-5)
    assert not mismatch(got, want, 1e-5)
    again = ops.get("norm_add_norm").node(h, w, x, w2, eps=1e-5, eps2=1e-6, dtypes=())
    for node in (again, ops.get("norm_add").node(h, w, x, eps=1e-5)):
        if width <= 16384:
            assert not unequal(node, {"": (feeds, {"T": 2})}, weights, 2e-5)
        else:
            assert BACKEND.select(node, Options()) == f"rows of {width} do not fit in registers"


# ------------------------------------------------------------------------------- plans and devices


def chain() -> dict:
    x = feed("x", (Var("T", 1, 4), 64), "f32")
    return {"y": ops.add(ops.silu(x), x)}


def test_times_of_steps_add_up():
    """A profiled run returns a nonnegative time for every step, and the same values."""
    executor, x = Executor(backends=ORDER), np.ones((3, 64), np.float32)
    plan = executor.compile(chain())
    want = executor.run(plan, {"x": x})["y"]
    for _ in range(3):
        recorder = Recorder()
        assert (executor.run(plan, {"x": x}, profile=recorder)["y"] == want).all()
        assert [row.op for row in recorder.rows] == ["silu", "add"]
        assert all(row.ns >= 0 for row in recorder.rows)


def test_values_of_vars_reach_captured_graphs():
    executor = Executor(backends=ORDER)
    plan = executor.compile(chain())
    for count in (1, 4, 2, 2, 3, 1):
        x = np.random.default_rng(count).standard_normal((count, 64)).astype(np.float32)
        got = executor.run(plan, {"x": x})["y"]
        assert got.shape == x.shape
        np.testing.assert_allclose(got, x / (1 + np.exp(-x)) + x, rtol=1e-5, atol=1e-6)


def test_copies_in_a_graph():
    """A feed is stored where it is copied from, and the report names the copy's readers."""
    x = feed("x", (Var("T", 1, 4), 64), "f32")
    there = ops.copy(x, memory="cuda:0")
    executor = Executor(backends=ORDER)
    plan = executor.compile({"y": ops.copy(ops.silu(there), memory="host"), "x": there})
    assert [str(copies) for copies in plan.copies()] == [
        "copies from host to cuda:0: 1, of 1,024 bytes in all, for silu",
        "copies from cuda:0 to host: 1, of 1,024 bytes in all",
    ]
    for count in (4, 1, 3):
        fed = np.random.default_rng(count).standard_normal((count, 64)).astype(np.float32)
        got = executor.run(plan, {"x": fed})
        np.testing.assert_array_equal(got["x"], fed)
        np.testing.assert_allclose(got["y"], fed / (1 + np.exp(-fed)), rtol=1e-5, atol=1e-6)


def test_out_of_memory_reports_bytes():
    device = backends.find("cuda").open_device(Options())
    with pytest.raises(OutOfMemory, match=r": 10000\.00 GB are needed in the GPU, .* are free"):
        device.alloc(10**13)
    assert device.free() > 0


# ---------------------------------------------------------------------------------- whole decoders


@pytest.mark.parametrize("arch", ARCHS)
def test_a_decode_step_is_one_graph(arch, tmp_path):
    """The decode plan is one segment, which is one CUDA graph."""
    llm = graphllm.load(write_tiny(tmp_path / "tiny.gguf", arch), device="cuda")
    greedy(llm)
    plan = llm.engine.decode_plan()
    assert {s.backend.name for s in plan.steps} == {"cuda"}
    ((segment, _),) = llm.engine.executor.segments(plan)
    assert segment.submissions == 1 and segment.replays
