"""Mixtures of experts on the GPU: every format, few and many tokens, valid and invalid ids, CUDA
graphs, and whole small models."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cases import mismatch
from cuda_cases import ORDER, need_gpu, normal, run_bounded
from fusion_cases import nmse
from linear_cases import INTEGER_BLOCKS
from op_runs import report
from random_models import MIXTURES, WIDE, decoder, engine

from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.cuda.runtime.device import KernelContext
from graphllm.engine.request import Sampling
from graphllm.formats import WEIGHT_FORMATS, activation_of, quantization
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import I32, dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.ops import Arg, Sample
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

pytestmark = pytest.mark.cuda
TOKENS = (1, 3, 7, 20, 40, 300)  # GEMV, groups of few and of many
# Many tokens are multiplied in half precision: bf16 has 8 bits, f16 11.
HALF = {"bf16": 2e-2, "f32": 0.0}
PROMPT = [int(i) for i in np.random.default_rng(5).integers(3, 120, 60)]


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


def random_ids(count: int):
    return lambda rng, shape: rng.integers(0, count, shape)


def last_only(count: int):
    """All tokens choose the last expert, beyond which nothing may be read."""
    return lambda rng, shape: np.full(shape, count - 1)


def exact(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that f16 and bf16 represent exactly."""
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)


def sample(tokens, shape, kind, x="f32", k=2, each=False, bias=False, ids=random_ids, make=None):
    args = (
        Arg(("T", k, shape[2]) if each else ("T", shape[2]), dtype(x), make=make),
        Arg(shape, dtype(kind), leaf="weight", make=normal),
        Arg(("T", k), I32, make=ids(shape[0])),
        Arg(shape[:2], leaf="weight") if bias else None,
    )
    return Sample(args, {}, {"T": tokens})


def several(kind: str, **more) -> list[Sample]:
    """More rows than a block computes, and depths of whole and partial pieces."""
    depths = (256, 768) if dtype(kind).block > 32 else (96, 352)
    return [
        sample(t, (5, rows, depth), kind, each=each, **more)
        for t in TOKENS
        for rows, depth, each in zip((33, 200), depths, (False, True))
    ]


def wrong_ones(name: str, samples: list[Sample], options=None, least: float = 0.0) -> str:
    found = run_bounded(name, samples, options, least)
    return report(found) if found else ""


# -------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_counts_of_tokens(kind):
    assert not wrong_ones("expert_linear", several(kind, bias=True), least=HALF.get(kind, 4e-3))


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_one_expert_for_all(kind):
    own = several(kind, ids=last_only)
    assert not wrong_ones("expert_linear", own, least=HALF.get(kind, 4e-3))


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_float_activations(kind):
    few = [s for s in several(kind, bias=True) if s.env["T"] <= 3]
    assert not wrong_ones("expert_linear", few, Options(linear="float"))


@pytest.mark.parametrize("kind", INTEGER_BLOCKS)
def test_quantised_activations(kind):
    """Exact except for the order of summation, at any number of tokens."""
    x = activation_of(dtype(kind)).name
    assert not wrong_ones("expert_linear", several(kind, x=x, bias=True))


@pytest.mark.parametrize("kind", INTEGER_BLOCKS)
def test_gemvs_that_quantize_have_the_bits_of_two_launches(kind):
    """Rows of the pairs of one token, one of which has no expert, are quantised by each block."""
    form = dtype(kind)
    for rows, depth in ((33, 256), (130, 768), (7, 1024), (65, 96)):
        if depth % form.block:
            continue
        rng = np.random.default_rng(depth)
        raw = quantization.quantise(normal(rng, (5 * rows, depth)).astype(np.float32), form)
        held = {"w": Blocks(raw.reshape(5, rows, -1), form, depth)}
        w = weight("w", (5, rows, depth), kind)
        x, ids = feed("x", (1, 3, depth), "f32"), feed("ids", (1, 3), "i32")
        act = ops.quantise_act(x, dtype=activation_of(form).name)
        both = {"y": ops.expert_linear(x, w, ids), "z": ops.expert_linear(act, w, ids)}
        executor = GuardedExecutor(Arrays(held), ORDER)
        plan = executor.compile(both)
        assert [step.node.op for step in plan.steps].count("quantise_act") == 1
        feeds = {"x": rng.standard_normal((1, 3, depth)).astype(np.float32)}
        got = executor.run(plan, feeds | {"ids": np.array([[4, 0, 5]], np.int32)})
        assert got["y"][0, :2].all() and np.isnan(got["y"][0, 2]).all()
        assert np.array_equal(got["y"], got["z"], equal_nan=True), (rows, depth)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kind", INTEGER_BLOCKS)
def test_sums_of_experts_have_the_bits_of_two_launches(kind, quantised, bias):
    """One token, at every number of its experts; an id out of range gives NaN."""
    form = dtype(kind)
    for k, rows, depth in ((1, 33, 256), (2, 130, 768), (5, 7, 1024), (8, 67, 512), (8, 65, 96)):
        if depth % form.block:
            continue
        rng = np.random.default_rng(depth)
        raw = quantization.quantise(normal(rng, (9 * rows, depth)).astype(np.float32), form)
        held = {"w": Blocks(raw.reshape(9, rows, -1), form, depth),
                "b": rng.standard_normal((9, rows)).astype(np.float32)}  # fmt: skip
        w, b = weight("w", (9, rows, depth), kind), weight("b", (9, rows), "f32")
        x, ids = feed("x", (1, k, depth), "f32"), feed("ids", (1, k), "i32")
        weights, r = feed("weights", (1, k), "f32"), feed("r", (1, rows), "f32")
        act = ops.quantise_act(x, dtype=activation_of(form).name) if quantised else x
        y = ops.expert_linear(act, w, ids, b if bias else None)
        outputs = {"y": ops.add(r, ops.combine(y, weights))}
        feeds = {"x": rng.standard_normal((1, k, depth)), "weights": rng.random((1, k)),
                 "r": rng.standard_normal((1, rows))}  # fmt: skip
        feeds = {name: data.astype(np.float32) for name, data in feeds.items()}
        one = GuardedExecutor(Arrays(held), ("cuda",))
        many = GuardedExecutor(Arrays(held), ("cuda",), Options(without=("expert_linear_add",)))
        plans = one.compile(outputs), many.compile(outputs)
        had = [[step.node.op for step in plan.steps][-1] for plan in plans]
        summed = not quantised or (act.dtype.block == 32 and act.meta.strides[1] % 16 == 0)
        assert had == ["expert_linear_add" if summed else "combine_add", "combine_add"]
        for chosen in (rng.permutation(9)[:k], np.append(rng.permutation(9)[1:k], 9)):
            feeds["ids"] = chosen.astype(np.int32)[None]
            got, want = (e.run(plan, feeds)["y"] for e, plan in zip((one, many), plans))
            assert np.isnan(want).all() == (9 in chosen)
            assert np.array_equal(got, want, equal_nan=True), (k, rows, depth)


@pytest.mark.parametrize("experts, k", [(1, 1), (3, 2), (130, 8), (600, 3)])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_activations_are_exact(kind, experts, k):
    """Exact except for the order of summation; small, large and empty groups."""
    shapes = [(experts, 40, depth) for depth in (63, 72, 200)]  # unaligned and aligned
    own = [sample(t, shape, kind, k=k, make=exact) for shape in shapes for t in (9, 300)]
    assert not wrong_ones("expert_linear", own)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_k"])
def test_heads_with_matrices_of_their_own(kind):
    depths = (256,) if dtype(kind).block == 256 else (96, 352)
    samples = [
        Sample(
            (Arg(("T", 3, depth)), Arg((3, 150, depth), dtype(kind), leaf="weight", make=normal)),
            {}, {"T": t},
        )
        for depth in depths for t in (1, 2, 40, 300)
    ]  # fmt: skip
    assert not wrong_ones("head_linear", samples, least=HALF.get(kind, 4e-3))


def expert_plan(kind: str, shape: tuple[int, int, int], k: int, most: int, least: int = 0):
    """An executor, its plan of expert_linear for ``least`` to ``most`` tokens, and the weights."""
    args = sample(0, shape, kind).args
    w = normal(np.random.default_rng(1), shape).astype(args[1].dtype.numpy)
    t = Var("T", least, most)
    x, ids = feed("x", (t, shape[2]), "f32"), feed("ids", (t, k), "i32")
    executor = GuardedExecutor(Arrays({"w": w}), ORDER)
    plan = executor.compile({"y": ops.expert_linear(x, weight("w", shape, kind), ids)})
    assert plan.steps[-1].backend.name == "cuda"
    return executor, plan, w.astype(np.float32)


@pytest.mark.parametrize("depth", [64, 63])
@pytest.mark.parametrize("tokens", [2, 100])
def test_unknown_ids_give_nan_and_read_nothing(tokens, depth):
    executor, plan, w = expert_plan("f16", (5, 37, depth), 3, tokens)
    rng = np.random.default_rng(tokens)
    x, ids = exact(rng, (tokens, depth)), rng.integers(0, 5, (tokens, 3)).astype(np.int32)
    bad = rng.random(ids.shape) < 0.4
    ids[bad] = rng.choice([-1, 5, -(2**31), 2**31 - 1], bad.sum())
    want = np.einsum("tk,tjnk->tjn", x, w[np.where(bad, 0, ids)])
    want[bad] = np.nan
    assert bad.any() and not bad.all()
    got = executor.run(plan, {"x": x, "ids": ids})["y"]
    assert not mismatch(got, want, 1e-5)


def test_results_do_not_depend_on_the_batch():
    """Bit for bit: tokens in another order, and fewer of them."""
    executor, plan, _ = expert_plan("f16", (7, 150, 200), 2, 300)
    rng = np.random.default_rng(0)
    x, ids = exact(rng, (300, 200)), rng.integers(0, 7, (300, 2)).astype(np.int32)
    want = executor.run(plan, {"x": x, "ids": ids})["y"]
    for order in (rng.permutation(300), np.arange(17)):
        got = executor.run(plan, {"x": x[order], "ids": ids[order]})["y"]
        assert np.array_equal(got, want[order])


@pytest.mark.parametrize("most", [1, 4, 40])
def test_replayed_graphs_follow_the_ids(most):
    """GEMV and groups, as a CUDA graph from the second run on."""
    executor, plan, w = expert_plan("f16", (6, 70, 72), 2, most, least=1)
    rng = np.random.default_rng(most)
    for count in (most, 1, most, max(1, most - 1)):
        x, ids = exact(rng, (count, 72)), rng.integers(0, 6, (count, 2)).astype(np.int32)
        got = executor.run(plan, {"x": x, "ids": ids})["y"]
        assert not mismatch(got, np.einsum("tk,tjnk->tjn", x, w[ids]), 1e-5)
    ((segment, _),) = executor.segments(plan)
    assert segment.replays and segment.submissions == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_gated_units_of_experts(kind, bias):
    """One step computes both products and the activation, in the dtype that the next step reads;
    few pairs, small groups and large ones."""
    rng, form = np.random.default_rng(3), dtype(kind)
    depth, inner = (512, 256) if form.block > 32 else (96, 160)
    shapes = {"gate": (5, inner, depth), "up": (5, inner, depth), "down": (5, depth, inner)}
    held = {}
    for name, shape in shapes.items():
        w = normal(rng, shape).astype(np.float32)
        plain = form.numpy is not None
        raw = None if plain else quantization.quantise(w.reshape(-1, shape[2]), form)
        held[name] = w.astype(form.numpy) if plain else Blocks(
            raw.reshape(*shape[:2], -1), form, shape[2]
        )  # fmt: skip
        held[f"{name}.bias"] = normal(rng, shape[:2]).astype(np.float32)
    x, ids = (
        feed("x", (Var("T", 0, 1000), depth), "f32"),
        feed("ids", (Var("T", 0, 1000), 2), "i32"),
    )

    def product(x, name):
        more = [weight(f"{name}.bias", shapes[name][:2], "f32")] if bias else []
        return ops.expert_linear(x, weight(name, shapes[name], kind), ids, *more)

    y = product(ops.mul(ops.silu(product(x, "gate")), product(x, "up")), "down")
    options = Options(), Options(without=("expert_gated",))
    joined, apart = (GuardedExecutor(Arrays(held), ("cuda",), each) for each in options)
    for tokens in TOKENS:
        plans = [e.compile({"y": y}, {"T": (0, tokens)}) for e in (joined, apart)]
        assert "expert_gated" in {step.node.op for step in plans[0].steps}
        for count in (tokens, tokens // 2):
            feeds = {"x": exact(rng, (count, depth)),
                     "ids": rng.integers(0, 5, (count, 2)).astype(np.int32)}  # fmt: skip
            got, want = (e.run(p, feeds)["y"] for e, p in zip((joined, apart), plans))
            assert got.shape == want.shape and (not count or nmse(got, want) < 1e-5), tokens


# ----------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("columns, attrs", [
    (128, {"k": 8}), (512, {"k": 10}),
    (256, {"k": 8, "groups": 8, "top_groups": 4, "top_per_group": 2}),
    (160, {"k": 6, "groups": 8, "top_groups": 3, "top_per_group": 1}),
])  # fmt: skip
def test_top_k(columns, attrs):
    """Few distinct values, so that most comparisons are ties."""

    def few_values(rng, shape):
        return rng.integers(-3, 3, shape) / 4

    samples = [
        Sample((Arg(("T", columns), make=few_values), Arg((columns,), leaf="weight")),
               {"groups": 1, "top_groups": 1, "top_per_group": 1, **attrs}, {"T": t})
        for t in TOKENS
    ]  # fmt: skip
    assert not wrong_ones("top_k", samples)


def small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return normal(rng, shape).astype(np.float32)


def mixture(kind: str, experts: int, k: int, score: str, bias: bool, clamped: bool):
    """A mixture of one token, with a residual, and its weights."""
    rng, form, depth, inner = np.random.default_rng(k), dtype(kind), 256, 256
    shapes = {"gate": (inner, depth), "up": (inner, depth), "down": (depth, inner)}
    held = {}
    for name, shape in shapes.items():  # of four matrices
        raw = quantization.quantise(small(rng, (4 * shape[0], shape[1])), form)
        some = raw.reshape(4, shape[0], -1)[rng.integers(0, 4, experts)]
        held[name] = Blocks(some, form, shape[1])
        held[f"{name}.bias"] = small(rng, (experts, shape[0]))
    held["correction"] = rng.integers(-2, 3, experts).astype(np.float32) / 8

    def product(x, name):
        more = [weight(f"{name}.bias", (experts, shapes[name][0]), "f32")] if bias else []
        return ops.expert_linear(x, weight(name, (experts, *shapes[name]), kind), ids, *more)

    x, r = feed("x", (1, depth), "f32"), feed("r", (1, depth), "f32")
    own = logits = feed("logits", (1, experts), "f32")
    if score != "chosen":
        own = (ops.softmax if score == "softmax" else ops.sigmoid)(logits)
    correction = weight("correction", (experts,), "f32") if score == "sigmoid" and bias else None
    ids = ops.top_k(own, correction, k=k, groups=1, top_groups=1, top_per_group=1)
    weights = ops.pick(own, ids)
    weights = ops.softmax(weights) if score == "chosen" else ops.sum_norm(weights, eps=1e-20)
    gate, up = product(x, "gate"), product(x, "up")
    unit = ops.mul(ops.silu(gate), up)
    if clamped:
        unit = ops.clamped_glu(gate, up, alpha=1.702, limit=0.5)
    return {"y": ops.add(r, ops.combine(product(unit, "down"), weights))}, held


@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
@pytest.mark.parametrize("score, bias, clamped", [
    ("softmax", False, False), ("softmax", True, True), ("sigmoid", False, False),
    ("sigmoid", True, False), ("chosen", False, True), ("chosen", True, False),
])  # fmt: skip
@pytest.mark.parametrize("experts, k", [(4, 4), (7, 2), (32, 4), (100, 8), (256, 5)])
def test_mixtures_that_choose_experts_have_the_results_of_separate_steps(
    experts, k, score, bias, clamped, kind
):
    """Also if most logits are equal, or one is no number. The total of a softmax is added in
    another order."""
    outputs, held = mixture(kind, experts, k, score, bias, clamped)
    executors = [
        GuardedExecutor(Arrays(held), ("cuda",), Options(without=without))
        for without in ((), ("moe_add",))
    ]
    plans = [e.compile(outputs) for e in executors]
    assert [[s.node.op for s in p.steps].count("moe_add") for p in plans] == [1, 0]
    rng = np.random.default_rng(experts)
    for turn in range(4):
        logits = rng.standard_normal((1, experts)).astype(np.float32)
        if turn % 2:
            logits = rng.integers(-1, 2, (1, experts)).astype(np.float32)
        logits[0, experts // 2] = np.nan if turn == 3 else 1
        feeds = {"x": exact(rng, (1, 256)), "r": exact(rng, (1, 256)), "logits": logits}
        got, want = (e.run(p, feeds)["y"] for e, p in zip(executors, plans))
        assert np.isnan(want).all() == (turn == 3)
        tolerance = 1e-6 if score == "softmax" else 0
        np.testing.assert_allclose(got, want, tolerance, tolerance)


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "mxfp4"])
def test_ids_that_were_read_too_early_are_read_again(kind, monkeypatch):
    """Before its wait, the kernel that adds up the experts finds those of the run before."""
    rng, form, k = np.random.default_rng(4), dtype(kind), 4
    raw = quantization.quantise(small(rng, (40 * 70, 512)), form)
    held = {"w": Blocks(raw.reshape(40, 70, -1), form, 512), "b": small(rng, (40, 70))}
    x, r = feed("x", (1, k, 512), "f32"), feed("r", (1, 70), "f32")
    ids = ops.top_k(feed("logits", (1, 40), "f32"), k=k, groups=1, top_groups=1, top_per_group=1)
    y = ops.expert_linear(x, weight("w", (40, 70, 512), kind), ids, weight("b", (40, 70), "f32"))
    outputs = {"y": ops.add(r, ops.combine(y, feed("weights", (1, k), "f32")))}
    results = []
    for early in (False, True):
        if early:
            monkeypatch.setattr(KernelContext, "readable_before_wait", lambda self, *names: True)
        executor = GuardedExecutor(Arrays(held), ("cuda",))
        plan = executor.compile(outputs)
        assert [s.node.op for s in plan.steps][-1] == "expert_linear_add"
        rng, own = np.random.default_rng(5), []
        for _ in range(6):
            feeds = {"x": exact(rng, (1, k, 512)), "r": exact(rng, (1, 70)),
                     "logits": exact(rng, (1, 40)), "weights": exact(rng, (1, k))}  # fmt: skip
            own.append(executor.run(plan, feeds)["y"])
        results.append(own)
    assert np.array_equal(*results)


# ------------------------------------------------------------------------------------ whole models


def pair(name: str, kind: str = "f32", **changes):
    """Engines of one small model on the GPU alone and on the reference."""
    model = decoder(name, 0, kind, **changes)
    return engine(model, ("cuda",)), engine(model, ("reference",))


def logits(made, ids: list[int]) -> np.ndarray:
    with made.evaluation(ids) as sequence:
        return sequence.step_logits(ids)


def margins(gpu, reference, count: int = 40) -> np.ndarray:
    """The reference's largest logit minus that of the token that the GPU samples, by token."""
    drawn = gpu.generate(PROMPT, Sampling(temperature=0.0), ())
    ids = [next(drawn) for _ in range(count)]
    seen = logits(reference, PROMPT + ids)[len(PROMPT) - 1 : -1]
    return seen.max(axis=-1) - seen[np.arange(count), ids]


@pytest.mark.parametrize("name", MIXTURES)
def test_small_mixtures_agree_with_the_reference(name):
    """In float32: prefill and decode."""
    gpu, reference = pair(name)
    assert nmse(logits(gpu, PROMPT), logits(reference, PROMPT)) < 1e-8
    for _ in range(2):  # the second run uses graphs and cached keys
        assert margins(gpu, reference).max() < 1e-2


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_k", "mxfp4"])
def test_mixtures_in_other_formats(kind):
    """A rounding may make a token choose another expert; most tokens do not."""
    gpu, reference = pair("mixtral", kind, **WIDE)
    each = [nmse(a, b) for a, b in zip(logits(gpu, PROMPT), logits(reference, PROMPT))]
    assert np.median(each) < (1e-3 if kind in ("f16", "bf16") else 5e-3)
    assert np.median(margins(gpu, reference)) < 0.1


def test_a_decode_step_of_a_mixture_is_one_graph():
    gpu, reference = pair("mixtral", "q4_k", **WIDE)
    margins(gpu, reference, 8)
    plan = gpu.decode_plan()
    assert {s.backend.name for s in plan.steps} == {"cuda"}
    ((segment, _),) = gpu.executor.segments(plan)
    assert segment.submissions == 1 and segment.replays
