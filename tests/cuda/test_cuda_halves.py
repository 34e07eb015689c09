"""f16 and bf16 activations on the GPU: kernels that write them and kernels that read them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cuda_cases import ORDER, need_gpu, normal
from cuda_results import unequal

from graphllm import ops
from graphllm.formats.quantization import Blocks, quantise
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Tensor, Var, feed, state, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
KINDS = ("f16", "bf16")
STEP = {"f16": 1e-3, "bf16": 8e-3}  # two roundings of one number to halves
MANY = 300  # tokens, for which block weights are dequantized
T = Var("T", 1, MANY)
COUNTS = (1, 3, MANY)
MOST = (7, 16, 30, 64, 200)  # tokens of plans, for each size of small_batch.cu


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return rng.standard_normal((count, width)).astype(np.float32)


def stored(array: np.ndarray, kind: str) -> np.ndarray | Blocks:
    """A matrix in the format ``kind``."""
    if dtype(kind).quantised:
        return Blocks(quantise(array, dtype(kind)), dtype(kind), array.shape[1])
    return array.astype(dtype(kind).numpy)


def agree(
    outputs: dict[str, Tensor], feeds: dict, weights: dict, tolerance: float, counts=COUNTS
) -> list[str]:
    """Compare the GPU with the reference; return the ops of the GPU's plan."""
    gpu, reference = Executor(Arrays(weights), ORDER), Executor(Arrays(weights), ("reference",))
    plan = gpu.compile(outputs)
    assert {s.backend.name for s in plan.steps} == {"cuda"}, plan.explain()
    for count in counts:
        live = {name: array[:count] for name, array in feeds.items()}
        have = gpu.run(plan, live)
        want = reference.run(reference.compile(outputs), live)
        for name, array in want.items():
            np.testing.assert_allclose(have[name], array, rtol=tolerance, atol=tolerance)
    return [s.node.op for s in plan.steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 63, 700, 4096])
def test_rounded_as_declared(kind, width):
    """To nearest even; f16 clamps to its finite range; NaN stays NaN."""
    x = (
        rows(np.random.default_rng(width), 40, width)
        * np.float32(10) ** np.arange(-20, 20)[:, None]
    )
    x[3, :1], x[4, :1], x[5, :1] = np.nan, np.inf, -np.inf
    y = ops.quantise_act(feed("x", (T, width), "f32"), dtype=kind)
    executor = GuardedExecutor(backends=("cuda",))
    got = executor.run(executor.compile({"y": y}), {"x": x.astype(np.float32)})["y"]
    want = ops.get("quantise_act").reference(x.astype(np.float32), dtype=kind)
    assert got.dtype == want.dtype == (np.float16 if kind == "f16" else ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("dtypes", [("f16",), ("bf16",), ("a8_32", "f16"), ("bf16", "a8_256")])
@pytest.mark.parametrize("width", [256, 768, 4096])
def test_norms_and_units_give_halves(width, dtypes):
    rng = np.random.default_rng(width)
    weights = {n: rng.standard_normal(width).astype(np.float32) for n in ("w", "w2")}
    x, h = feed("x", (T, width), "f32"), feed("h", (T, width), "f32")
    w, w2 = (weight(n, (width,), "f32") for n in weights)
    nodes = [
        ops.get("norm_quantise").node(x, w, eps=1e-5, dtypes=dtypes),
        ops.get("norm_add_norm").node(h, w, x, w2, eps=1e-5, eps2=1e-6, dtypes=dtypes),
        ops.get("glu").node(x, h, act="silu", kind="", dtypes=dtypes),
    ]
    feeds = {n: rows(rng, MANY, width) for n in "xh"}
    step = max(STEP.get(d, 0) for d in dtypes)
    for node in nodes:
        used = {n: feeds[n] for n in "xh" if n in {s.name for s in node.sources}}
        cases = {f"{c}": ({n: a[:c] for n, a in used.items()}, {"T": c}) for c in COUNTS}
        assert not unequal(node, cases, weights, step)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_k"])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_a_gated_mlp(kind, act):
    """A norm, the gated unit, and down with the residual: three steps with half activations."""
    rng, dim, hidden = np.random.default_rng(1), 256, 768
    shapes = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    weights = {n: stored(normal(rng, s).astype(np.float32), kind) for n, s in shapes.items()}
    weights["norm"] = np.ones(dim, np.float32)
    x = feed("x", (T, dim), "f32")
    gate, up, down = (weight(n, s, kind) for n, s in shapes.items())
    y = ops.rms_norm(x, weight("norm", (dim,), "f32"), eps=1e-6)
    own = (
        ops.silu(ops.linear(y, gate))
        if act == "silu"
        else ops.gelu(ops.linear(y, gate), kind="tanh")
    )
    y = ops.add(x, ops.linear(ops.mul(own, ops.linear(y, up)), down))
    found = agree({"y": y}, {"x": rows(rng, MANY, dim)}, weights, 2e-2 if kind == "bf16" else 4e-3)
    norm = "rms_norm" if kind == "f32" else "norm_quantise"
    assert found == [norm, "gated", "linear_add"]


@pytest.mark.parametrize("kinds", [("f16", "f16", "f16"), ("q4_k", "q4_k", "q6_k"),
                                   ("bf16", "q8_0", "f32"), ("q8_0", "q8_0", "q8_0")])  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_several_linears_of_one_activation(kinds, bias):
    """Two of one shape are one batched product; each weight dtype has its own activation dtype."""
    rng, dim = np.random.default_rng(2), 512
    shapes = {"q": (640, dim), "k": (136, dim), "v": (136, dim)}
    weights = {n: stored(normal(rng, s).astype(np.float32), k)
               for (n, s), k in zip(shapes.items(), kinds)}  # fmt: skip
    weights |= {f"{n}.b": rng.standard_normal(s[0]).astype(np.float32) for n, s in shapes.items()}
    x = feed("x", (T, dim), "f32")
    made = {}
    for (name, shape), kind in zip(shapes.items(), kinds):
        own = weight(f"{name}.b", shape[:1], "f32") if bias else None
        made[name] = ops.linear(x, weight(name, shape, kind), own)
    agree(made, {"x": rows(rng, MANY, dim)}, weights, 2e-2 if "bf16" in kinds else 4e-3)


@pytest.mark.parametrize("fit", [100, 300])  # rows of the matrix
def test_a_matrix_larger_than_the_workspace(fit, monkeypatch):
    """Dequantized some rows at a time: those that fit, or a multiple of 256."""
    monkeypatch.setattr("graphllm.backends.cuda.kernels.gemm._TILE", fit << 10)
    rng, dim = np.random.default_rng(3), 512
    weights = {n: stored(normal(rng, (s, dim)).astype(np.float32), "q8_0")
               for n, s in (("a", 333), ("b", 64), ("c", 64), ("d", 40))}  # fmt: skip
    x, r = feed("x", (T, dim), "f32"), feed("r", (T, 333), "f32")
    made = {n: ops.linear(x, weight(n, w.shape, "q8_0")) for n, w in weights.items()}
    made["a"] = ops.add(r, made["a"])
    feeds = {"x": rows(rng, MANY, dim), "r": rows(rng, MANY, 333)}
    agree(made, feeds, weights, 4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width, pool", [(64, "f16"), (128, "q8_0"), (80, "f16"), (64, "f32")])
def test_attention_gives_halves(width, pool, kind):
    """By the tiled kernel itself, or by a second kernel after the others."""
    rng, heads, kv, block = np.random.default_rng(4), 4, 2, 16
    q, slots = feed("q", (T, heads, width), "f32"), 96
    if pool == "q8_0":
        pools = [state(n, (slots, kv, width), pool) for n in "kv"]
    else:
        pools = [feed(n, (slots, kv, width), pool) for n in "kv"]
    start, length = feed("start", (2,), "i32"), feed("length", (1,), "i32")
    attended = ops.attention(
        q, *pools, start, length, feed("table", (1, 6), "i32"), scale=width**-0.5, block=block
    )
    y = ops.quantise_act(attended.flatten(), dtype=kind)
    executors = Executor(backends=ORDER), Executor(backends=("reference",))
    plans = [e.compile({"y": y}) for e in executors]
    assert [s.node.op for s in plans[0].steps] == ["attention_quantise"]
    kept = [normal(rng, (slots, kv * width)).astype(np.float32) for _ in "kv"]
    queries, found = rows(rng, 40, heads * width).reshape(40, heads, width), []
    for executor, plan in zip(executors, plans):
        feeds = {"q": queries, "start": np.array([0, 40], np.int32)}
        feeds |= {"length": np.array([70], np.int32)}
        feeds |= {"table": np.array([[5, 1, 4, 2, 3, 0]], np.int32)}
        executor.bind(plan)
        for name, array in zip("kv", kept):
            if pool == "q8_0":
                executor.set_state(name, quantise(array, dtype(pool)))
            else:
                feeds[name] = array.astype(dtype(pool).numpy).reshape(slots, kv, width)
        found.append(executor.run(plan, feeds)["y"].astype(np.float32))
    np.testing.assert_allclose(*found, rtol=4e-3 + STEP[kind], atol=4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", MOST)
def test_one_pass_for_several_tokens(kind, most):
    """Fused and single matrices, with bias and residual."""
    rng, depths, t = np.random.default_rng(5), (96, 544), Var("T", 2, most)
    x = {d: feed(f"x{d}", (t, d), "f32") for d in depths}
    r = feed("r", (t, 150), "f32")
    shapes = {"a": (150, 544), "b": (64, 544), "c": (177, 544), "d": (150, 96)}
    weights = {n: normal(rng, s).astype(dtype(kind).numpy) for n, s in shapes.items()}
    weights["bias"] = rng.standard_normal(64).astype(np.float32)
    made = {n: ops.linear(x[s[1]], weight(n, s, kind)) for n, s in shapes.items() if n != "b"}
    made["b"] = ops.linear(x[544], weight("b", (64, 544), kind), weight("bias", (64,), "f32"))
    made["d"] = ops.add(r, made["d"])
    feeds = {f"x{d}": rows(rng, most, d) for d in depths} | {"r": rows(rng, most, 150)}
    agree(made, feeds, weights, 2e-2 if kind == "bf16" else 4e-3, (2, most - 3, most))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_in_one_pass(kind, most, bias):
    """To half or float32 results, with incomplete blocks of rows."""
    rng, t = np.random.default_rng(7), Var("T", 2, most)
    weights = {n: normal(rng, (150, 96)).astype(dtype(kind).numpy) for n in ("gate", "up")}
    weights |= {f"{n}.b": rng.standard_normal(150).astype(np.float32) for n in ("gate", "up")}
    x = feed("x", (t, 96), "f32")
    both = []
    for name in ("gate", "up"):
        own = weight(f"{name}.b", (150,), "f32") if bias else None
        both.append(ops.linear(x, weight(name, (150, 96), kind), own))
    y = ops.mul(ops.gelu(both[0], kind="erf"), both[1])
    for result in (y, ops.quantise_act(y, dtype=kind)):
        tolerance = 2e-2 if kind == "bf16" else 4e-3
        found = agree({"y": result}, {"x": rows(rng, most, 96)}, weights, tolerance, (2, most))
        assert found == ["quantise_act", "gated"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clusters", [1, 5])
def test_products_of_many_tokens_to_halves(kind, clusters, monkeypatch):
    """Of one to three matrices in one launch, with incomplete tiles of tokens, rows and depth."""
    name = "graphllm.backends.cuda.kernels.gemm_halves.most_clusters"
    monkeypatch.setattr(name, lambda *arguments: clusters)
    rng, depth, most = np.random.default_rng(8), 136, 1000
    t, shapes = Var("T", 257, most), {"a": (288, depth), "b": (32, depth), "c": (544, depth)}
    weights = {n: normal(rng, s).astype(dtype(kind).numpy) for n, s in shapes.items()}
    weights |= {f"{n}.b": rng.standard_normal(s[0]).astype(np.float32) for n, s in shapes.items()}
    x = feed("x", (t, depth), kind)
    w, bias = ([weight(f"{n}{end}", np.shape(weights[n + end]), each) for n in "abc"]
               for end, each in (("", kind), (".b", "f32")))  # fmt: skip
    one = {"heads": 0, "dtype": kind}
    nodes = [
        ops.get("linears_quantise").node(
            *(x, w[0], bias[0], x, w[1], None, x, w[2], bias[2]), heads=(9, 0, 17), dtype=kind
        ),
        ops.get("linear_quantise").node(x, w[2], bias[2], act="gelu", kind="erf", **one),
        ops.get("linear_quantise").node(x, w[0], None, act="relu", kind="", **one),
    ]
    if kind == "f16":
        r = feed("r", (t, 544), kind)
        nodes.append(ops.get("linear_add_quantise").node(x, w[2], r, bias[2], dtype=kind))
    counts = (257, 640, most)
    array, before = rows(rng, most, depth), rows(rng, most, 544)
    for node in nodes:
        feeds = {"x": array.astype(dtype(kind).numpy), "r": before.astype(np.float16)}
        read = {s.name for s in node.sources if s.op == "input"}
        cases = {f"{c}": ({n: feeds[n][:c] for n in read}, {"T": c}) for c in counts}
        assert not unequal(node, cases, weights, 2e-2 if kind == "bf16" else 4e-3)


def test_a_plan_of_sixteen_tokens_is_one_graph():
    """There is no cuBLASLt call between its launches."""
    rng, t = np.random.default_rng(6), Var("T", 16, 16)
    weights = {n: normal(rng, (512, 256)).astype(np.float16) for n in "ab"}
    x = feed("x", (t, 256), "f32")
    executor = Executor(Arrays(weights), ("cuda",))
    plan = executor.compile({n: ops.linear(x, weight(n, (512, 256), "f16")) for n in "ab"})
    for _ in range(3):
        executor.run(plan, {"x": rows(rng, 16, 256)})
    ((segment, _),) = executor.segments(plan)
    assert segment.submissions == 1 and segment.replays
