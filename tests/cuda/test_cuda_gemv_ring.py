"""Linears of one token through rings in shared memory: shapes, plans with rings, and results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

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
from paper_cuda import paper_fixture, plan_on_paper  # noqa: F401

from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cuda.kernels import gemv_ring
from graphllm.backends.cuda.kernels.gemv_ring import FORMATS, shape
from graphllm.backends.cuda.kernels.weight_packing import item_elements
from graphllm.backends.cuda.runtime.work import MOSTLY_SHARED, Launch, max_shared
from graphllm.checkpoints.model_shapes import SHAPES
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Tensor, Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

# Fused ops whose linears of int8 activations multiply a norm, and have no rings.
NORMED = ("linear_add_norm_gated", "linear_add_norm_linears")


@pytest.fixture
def rings_everywhere(monkeypatch):
    """Use rings for all formats that the kernel multiplies, and for small matrices."""
    monkeypatch.setattr(gemv_ring, "DEFAULT_FORMATS", FORMATS)
    monkeypatch.setattr(gemv_ring, "_MIN_NBYTES", 0)
    monkeypatch.setattr(gemv_ring, "_MIN_DEPTH", 0)


DEPTHS = (640, 1024, 2048, 2560, 3584, 4096, 5120, 8192, 11008, 14336, 18944, 28672)
LARGE = 16 << 10  # bytes of a row that tests leave out, so that they stay short


@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_shapes_fit_the_kernel(name, gated, warps):
    kind, found = dtype(name), 0
    for depth in DEPTHS:
        own = shape(kind, depth, gated, warps)
        if own is None:
            continue
        found += 1
        lanes = warps * own.row_lanes * own.items
        assert own.row_items * item_elements(kind) == depth
        assert own.row_items <= lanes and (own.row_items > lanes // 2 or lanes == 8 * warps)
        sums = own.rows * (1 + gated) * own.row_lanes // 32  # of a lane
        assert 1 <= sums <= own.row_lanes and sums & (sums - 1) == 0
        assert own.rows % (32 // own.row_lanes) == 0  # a warp multiplies rows of one matrix
        assert own.slot_nbytes % 128 == 0 and own.slot_nbytes < 65 << 10
    assert found >= 3


@pytest.mark.parametrize("name, depth", [("q4_0", 480), ("q8_0", 720), ("f16", 4100)])
def test_rows_with_few_items_or_parts_of_items_are_refused(name, depth):
    assert shape(dtype(name), depth, False) is None


# ---------------------------------------------------------------------------------------- plans


def launches_on_paper(device, model: str, kind: str, tokens: int = 1) -> list[Launch]:
    return [w for _, own in plan_on_paper(device, SHAPES[model], kind, tokens) for w in own]


def files(launches: list[Launch]) -> Counter[str]:
    """How many launches each source has."""
    return Counter(w.function.module.file for w in launches)


def all_have_rings(own: list[Launch], rings: int) -> None:
    """All linears of two layers with ``rings`` each, and the head."""
    assert files(own)["gemv_ring.cu"] == 2 * rings + 1 and "gemv.cu" not in files(own)
    assert {w.shared_percent for w in own} == {MOSTLY_SHARED}
    assert max(w.shared for w in own) <= max_shared((9, 0))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("model", ["mistral-7b", "llama-1b"])
def test_all_linears_of_one_token_have_rings(model, kind, paper):
    """q, k and v, o, the gated unit and down."""
    all_have_rings(launches_on_paper(paper((9, 0)), model, kind), 4)


def test_launches_of_small_models_have_more_warps(paper):
    """But for a head with many rows per multiprocessor, whose sums would leave a ring no room."""
    device = paper((9, 0))
    for processors, head in ((132, 17), (72, 9)):
        device.gpu.processors, device.built = processors, []
        own = launches_on_paper(device, "llama-1b", "f16")
        rings = [w.block[0] // 32 for w in own if w.function.module.file == "gemv_ring.cu"]
        assert rings == 8 * [17] + [head]
    device.built = []
    own = launches_on_paper(device, "mistral-7b", "f16")
    assert {w.block for w in own if w.function.module.file == "gemv_ring.cu"} == {(9 * 32,)}


@pytest.mark.parametrize("kind, rings", [("q8_0", 4), ("q4_k_m", 5)])
def test_other_formats_can_have_rings(kind, rings, paper, rings_everywhere):
    """v, in another format than q and k, has its own."""
    device = paper((9, 0), Options(without=NORMED))
    all_have_rings(launches_on_paper(device, "mistral-7b", kind), rings)


def test_rings_of_two_launches_of_a_small_model_fit(paper):
    """One without residual and the next one, with it, but not two of those with it."""
    own = launches_on_paper(paper((9, 0)), "llama-1b", "f16")
    *rings, head = [w.shared + 1024 for w in own if w.function.module.file == "gemv_ring.cu"]
    whole = max_shared((9, 0)) + 1024  # of a multiprocessor; 1 KB of each block is the system's
    assert len(rings) == 8 and all(a + b <= whole for a, b in pairwise(rings))
    assert all(2 * second > whole for second in rings[1::2]) and 2 * head > whole


def test_a_ring_has_room_beside_the_sums_of_the_rows_of_a_block(paper, rings_everywhere):
    """Of a head with 262,144 rows the 72 multiprocessors have 3,641 rows each: it has no ring. Rows
    of 640 elements, whose scales take 40 bytes, have rings."""
    own = launches_on_paper(paper((9, 0)), "gemma3-270m", "q4_k_m")
    assert max(w.shared for w in own) <= max_shared((9, 0))
    assert files(own)["gemv_ring.cu"] == 10 and files(own)["gemv.cu"] == 1


@pytest.mark.parametrize(
    "capability, model, kind, tokens, options",
    [((8, 9), "llama-1b", "f16", 1, Options()), ((12, 0), "llama-1b", "f16", 1, Options()),
     ((9, 0), "llama-1b", "f16", 2, Options()), ((9, 0), "llama-1b", "f16", 512, Options()),
     ((9, 0), "mixtral-8x7b", "f16", 1, Options()),
     ((9, 0), "llama-1b", "f16", 1, Options(deterministic=True)),
     ((9, 0), "llama-1b", "q8_0", 1, Options()), ((9, 0), "gemma3-270m", "f16", 1, Options())],
)  # fmt: skip
def test_plans_without_rings(capability, model, kind, tokens, options, paper):
    """On GPUs with less shared memory, of several tokens, with experts, if deterministic, of small
    matrices, and with other formats than f16 and bf16."""
    own = launches_on_paper(paper(capability, options), model, kind, tokens)
    assert own and "gemv_ring.cu" not in files(own)
    assert MOSTLY_SHARED not in {w.shared_percent for w in own}


# ------------------------------------------------------------------------------------- results


def depths(name: str) -> list[int]:
    kind = dtype(name)
    return [d for d in DEPTHS if shape(kind, d, False) and kind.row_nbytes(d) <= LARGE]


@pytest.mark.cuda
@pytest.mark.parametrize("name", FORMATS)
def test_one_token(name, rings_everywhere):
    """Exact except for the order of summation, with a bias, at every depth."""
    need_gpu()
    kind = dtype(name)
    least = 3e-5 if name == "bf16" else 0.0
    x = activation_name(name) if kind.quantised else "f32"
    for depth in depths(name):
        rows = (2 << 20) // kind.row_nbytes(depth) + 77
        own = [linear_sample(1, (rows, depth), name, x, bias) for bias in (False, True)]
        assert not (wrong := run_bounded("linear", own, least=least)), (depth, wrong)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 131, 132, 133, 264, 1000])
def test_any_number_of_rows(rows, rings_everywhere):
    """Fewer rows than multiprocessors, one more or less, and ends of slots anywhere."""
    need_gpu()
    for name, depth in (("q4_0", 2048), ("f16", 1024), ("q6_k", 4096)):
        x = activation_name(name) if dtype(name).quantised else "f32"
        wrong = run_bounded("linear", [linear_sample(1, (rows, depth), name, x, True)])
        assert not wrong, (name, wrong)


def leave_linears_to_gemv(monkeypatch) -> None:
    monkeypatch.setattr(gemv_ring, "launch", lambda *arguments: None)


def rings(executor: GuardedExecutor, plan) -> int:
    work = [w for segment, _ in executor.segments(plan) for part in segment.work for w in part]
    return files([w for w in work if isinstance(w, Launch)])["gemv_ring.cu"]


# Rows of q, k and v: the blocks of a GPU with 132 multiprocessors, and of one with fewer, have rows
# of two matrices, slots with fewer rows than fit, and up to one row more than others.
ROWS = (1301, 258, 130)


def layer(name: str, depth: int, wide: int) -> tuple[dict, dict, dict]:
    """Weights, feeds and results of a layer without attention: residual, norm, gated unit,
    residual, norm, q, k and v; every linear has a bias."""
    rng = np.random.default_rng(0)
    shapes = {
        "o": (depth, wide), "gate": (wide, depth), "up": (wide, depth), "down": (depth, wide),
        **{f"qkv{i}": (n, depth) for i, n in enumerate(ROWS)},
    }  # fmt: skip
    stored = {n: quantised(normal(rng, s).astype(np.float32), name) for n, s in shapes.items()}
    stored |= {f"{n}.bias": rng.standard_normal(s[0]).astype(np.float32) for n, s in shapes.items()}
    stored |= {f"g{i}": 1 + 0.1 * rng.standard_normal(depth).astype(np.float32) for i in range(2)}
    feeds = {"x": rng.standard_normal((1, wide)), "h": rng.standard_normal((1, depth))}

    def linear(x: Tensor, n: str) -> Tensor:
        return ops.linear(x, weight(n, shapes[n], name), weight(f"{n}.bias", shapes[n][:1], "f32"))

    t = Var("T", 1, 1)
    h = ops.add(feed("h", (t, depth), "f32"), linear(feed("x", (t, wide), "f32"), "o"))
    y = ops.rms_norm(h, weight("g0", (depth,), "f32"), eps=1e-5)
    h = ops.add(h, linear(ops.mul(ops.silu(linear(y, "gate")), linear(y, "up")), "down"))
    y = ops.rms_norm(h, weight("g1", (depth,), "f32"), eps=1e-5)
    made = {"h": h, **{f"y{i}": linear(y, f"qkv{i}") for i in range(3)}}
    return stored, {key: value.astype(np.float32) for key, value in feeds.items()}, made


@pytest.mark.cuda
@pytest.mark.parametrize("depth", [640, 2048, 4096])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_has_the_results_of_gemv(name, depth, monkeypatch, rings_everywhere):
    """And again, from a CUDA graph. Sums of w8a8 are exact, so that its bits are the same. With
    sums in another order, int8 activations may be rounded to the next step."""
    need_gpu()
    if depth % dtype(name).block:
        pytest.skip("parts of blocks")
    stored, feeds, made = layer(name, depth, 2048)
    found = []
    for with_rings in (True, False):
        if not with_rings:
            leave_linears_to_gemv(monkeypatch)
        executor = GuardedExecutor(Arrays(stored), ORDER, Options(without=NORMED))
        plan = executor.compile(made)
        results = [executor.run(plan, feeds) for _ in range(4)]
        capability = executor.devices.of(executor.backends[0]).gpu.capability
        assert rings(executor, plan) == (4 if with_rings and gemv_ring.has_room(capability) else 0)
        for again in results[1:]:
            for key, value in results[0].items():
                np.testing.assert_array_equal(value, again[key], err_msg=f"{key}, run again")
        found.append(results[0])
    for key, value in found[0].items():
        share = 0 if name == "w8a8" else 3e-3 if dtype(name).quantised else 3e-4
        most = share * np.abs(found[1][key]).max()
        np.testing.assert_allclose(value, found[1][key], rtol=0, atol=most, err_msg=key)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m", "f16"])
def test_a_model_answers_as_with_gemv(kind, monkeypatch, rings_everywhere):
    """Greedy tokens of a model with random weights, many steps in a row."""
    need_gpu()
    file = RandomCheckpoint(replace(SHAPES["llama-1b"], layers=3), kind)
    answers = []
    for with_rings in (True, False):
        if not with_rings:
            leave_linears_to_gemv(monkeypatch)
        llm = LLM(file, build_decoder(file), {"backends": ORDER}, Limits(context=512))
        answers.append(
            llm.generate(
                list(range(100, 140)), max_tokens=200, temperature=0.0, ignore_eos=True
            ).ids
        )
    assert answers[0][:16] == answers[1][:16]
