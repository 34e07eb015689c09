"""Chains of linears of one token: shapes, which launches are joined, and results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

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
from paper_cuda import Empty, paper_fixture  # noqa: F401

from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cuda.kernels import linear_chain
from graphllm.backends.cuda.kernels.chain_joining import join
from graphllm.backends.cuda.kernels.linear_chain import FORMATS, WARPS, Linears, Row, shape
from graphllm.backends.cuda.kernels.weight_packing import item_elements
from graphllm.backends.cuda.runtime.work import MOSTLY_SHARED, Launch, max_shared
from graphllm.checkpoints.model_shapes import SHAPES
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

CHAINS = Options(chains=True)
DEPTHS = (640, 1024, 2048, 2560, 3584, 4096, 5120, 8192, 11008, 14336, 18944, 28672)
LARGE = 16 << 10  # bytes of a row that tests leave out, so that they stay short


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_shapes_fit_the_kernel(name, gated):
    kind, found = dtype(name), 0
    for depth in DEPTHS:
        own = shape(kind, depth, gated)
        if own is None:
            continue
        found += 1
        lanes = WARPS * own.lanes * own.items
        assert own.row_items * item_elements(kind) == depth
        assert own.row_items <= lanes and (own.row_items > lanes // 2 or lanes == 8 * WARPS)
        sums = own.rows * (1 + gated) * own.lanes // 32  # of a lane
        assert 1 <= sums <= own.lanes and sums & (sums - 1) == 0
        assert own.rows % (32 // own.lanes) == 0  # a warp multiplies rows of one matrix
        assert own.slot_nbytes % 128 == 0 and own.slot_nbytes < 65 << 10
    assert found >= 3


@pytest.mark.parametrize("name, depth", [("q4_0", 480), ("q8_0", 720), ("f16", 4100)])
def test_rows_with_few_items_or_parts_of_items_are_refused(name, depth):
    assert shape(dtype(name), depth, False) is None


# -------------------------------------------------------------------------------------- joining


def plan_on_paper(device, model: str, kind: str, tokens: int = 1) -> list[Launch]:
    """The launches of a plan of two layers of a model."""
    file = Empty(replace(SHAPES[model], layers=2), kind)
    options = {"backends": ("cuda",), "options": device.options}
    llm = LLM(file, build_decoder(file), options, Limits())
    llm.executor.bind(llm.engine.plan(["ids"], tokens))
    return [w for _, work in device.built for part in work for w in part if isinstance(w, Launch)]


def stages_of(launches: list[Launch]) -> list[list[str]]:
    """Source and matrices of the stages of each chain: `NORMED 2`."""
    found = []
    for made in (w.function.module for w in launches):
        if made.file == "linear_chain.cu":
            listed = dict(made.defines)["STAGES"].split("Linear<")[1:]
            fields = [stage.split(", ") for stage in listed]
            found.append([f"{f[6]} {f[5]}" for f in fields])
    return found


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_what_lies_between_two_attentions_is_one_launch(kind, paper):
    own = plan_on_paper(paper((9, 0), CHAINS), "mistral-7b", kind)
    first, middle, *_, head = stages_of(own)
    down = "AS_IS 1" if kind == "f16" else "QUANTISED 1"
    assert first == ["NORMED 1"]  # q, k and v of the first layer
    assert middle == ["AS_IS 1", "NORMED 2", down, "NORMED 1"]
    assert head[-1] == "NORMED 1"
    assert {w.shared_percent for w in own} == {MOSTLY_SHARED}
    assert max(w.shared for w in own) <= max_shared((9, 0))
    between = {w.function.name for w in own}
    assert not any(name.startswith(("norm_quantise", "rms_norm", "gemv")) for name in between)


def test_formats_are_mixed_in_a_chain(paper):
    """v has another format than q and k, and is computed of the same norm."""
    _, middle, *_ = stages_of(plan_on_paper(paper((9, 0), CHAINS), "mistral-7b", "q4_k_m"))
    assert middle == ["AS_IS 1", "NORMED 2", "QUANTISED 1", "NORMED 1", "NORMED 1"]


def test_norms_before_and_after_a_residual_are_stages(paper):
    """Gemma 3: rows of 640, whose scales take 40 bytes, and v in another format than q and k."""
    first, middle, *_ = stages_of(plan_on_paper(paper((9, 0), CHAINS), "gemma3-270m", "q4_k_m"))
    assert first == ["NORMED 1", "NORMED 1"]
    assert middle == [
        "AS_IS 1",
        "NORMED_TWICE 2",
        "QUANTISED 1",
        "NORMED_TWICE 1",
        "NORMED_TWICE 1",
    ]


def test_a_ring_has_room_beside_the_sums_of_the_rows_of_a_block(paper):
    """Of a head with 262,144 rows the 72 multiprocessors have 3,641 rows each: it has no ring."""
    own = plan_on_paper(paper((9, 0), CHAINS), "gemma3-270m", "q4_k_m")
    assert max(w.shared for w in own) <= max_shared((9, 0))
    assert [w.function.module.file for w in own].count("gemv.cu") == 1


@pytest.mark.parametrize(
    "capability, model, tokens, options",
    [((9, 0), "llama-1b", 1, Options()), ((8, 9), "llama-1b", 1, CHAINS),
     ((12, 0), "llama-1b", 1, CHAINS), ((9, 0), "llama-1b", 2, CHAINS),
     ((9, 0), "mixtral-8x7b", 1, CHAINS),
     ((9, 0), "llama-1b", 1, Options(chains=True, deterministic=True))],
)  # fmt: skip
def test_plans_without_chains(capability, model, tokens, options, paper):
    """Unless asked for, of several tokens, on GPUs with less shared memory, and with experts."""
    own = plan_on_paper(paper(capability, options), model, "q8_0", tokens)
    assert own and not stages_of(own)
    assert MOSTLY_SHARED not in {w.shared_percent for w in own}


A8 = dtype("a8_32")
GPU = SimpleNamespace(
    gpu=SimpleNamespace(processors=132, capability=(9, 0)), arrivals=lambda blocks: 1 << 40
)


def launch_of(part, **more) -> Launch:
    return Launch(linear_chain.kernel((), True), (1,), (32,), (), part=part, **more)


def linears(x: int, y: int, x_dtype=A8, depth: int = 4096) -> Linears:
    kind = dtype("q8_0" if x_dtype == A8 else "f16")
    own = shape(kind, depth, False)
    matrices = linear_chain.matrices_argument([])
    return Linears(
        kind, own, depth, False, 4096, x, x_dtype, matrices, -1, 8, ((y, 4 * 4096),), ()
    )  # fmt: skip


def joined(*parts, **more) -> list[list[int]]:
    """For each launch, its step and the number of its stages; 0: it was passed on."""
    work = join([[launch_of(p, **more)] for p in parts], GPU)
    return [
        [step, len(dict(w.function.module.defines)["STAGES"].split("Linear<")) - 1]
        for step, part in enumerate(work)
        for w in part
    ]


X, ROW, Y, Z = (i << 20 for i in range(1, 5))
NORM = Row(Y, ROW, A8, 4096, ((SimpleNamespace(address=16), 1e-5),))


def test_linears_follow_the_row_that_they_multiply():
    assert joined(linears(X, Y), NORM, linears(ROW, Z)) == [[0, 2]]
    assert joined(linears(X, Y), NORM, linears(ROW, Z), linears(ROW, X)) == [[0, 3]]
    assert joined(NORM, linears(ROW, Z), linears(X, Y)) == [[0, 1], [2, 1]]  # bytes of other steps
    assert joined(linears(X, Y), NORM, linears(X, Z)) == [[0, 1], [1, 0], [2, 1]]
    assert joined(linears(X, Y), NORM, None, linears(ROW, Z)) == [[0, 1], [1, 0], [2, 0], [3, 1]]
    assert joined(NORM, NORM, linears(ROW, Z)) == [[0, 0], [1, 1]]
    assert joined(None, NORM) == [[0, 0], [1, 0]]


def test_a_result_is_not_written_where_other_blocks_read():
    assert joined(linears(X, Y), NORM, linears(ROW, Y + 4096)) == [[0, 1], [1, 0], [2, 1]]


def test_floats_and_integers_are_not_mixed():
    floats = linears(Z, X, dtype("f32"))
    assert joined(linears(X, Y), floats, floats) == [[0, 1], [1, 2]]


def test_a_launch_without_overlap_begins_a_chain():
    parts = linears(X, Y), NORM, linears(ROW, Z)
    assert joined(*parts, programmatic=False) == [[0, 1], [1, 1]]


# ------------------------------------------------------------------------------------- results


def depths(name: str) -> list[int]:
    kind = dtype(name)
    return [d for d in DEPTHS if shape(kind, d, False) and kind.row_nbytes(d) <= LARGE]


@pytest.mark.cuda
@pytest.mark.parametrize("name", FORMATS)
def test_one_token(name):
    """Exact except for the order of summation, with a bias, at every depth."""
    need_gpu()
    kind = dtype(name)
    least = 3e-5 if name == "bf16" else 0.0
    x = activation_name(name) if kind.quantised else "f32"
    for depth in depths(name):
        rows = (2 << 20) // kind.row_nbytes(depth) + 77
        own = [linear_sample(1, (rows, depth), name, x, bias) for bias in (False, True)]
        assert not (wrong := run_bounded("linear", own, CHAINS, least)), (depth, wrong)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 131, 132, 133, 264, 1000])
def test_any_number_of_rows(rows, monkeypatch):
    """Fewer rows than multiprocessors, one more or less, and ends of slots anywhere."""
    need_gpu()
    monkeypatch.setattr(linear_chain, "_MIN_NBYTES", 0)
    for name, depth in (("q4_0", 2048), ("f16", 1024), ("q6_k", 4096)):
        x = activation_name(name) if dtype(name).quantised else "f32"
        wrong = run_bounded("linear", [linear_sample(1, (rows, depth), name, x, True)], CHAINS)
        assert not wrong, (name, wrong)


def chains(executor: GuardedExecutor, plan) -> int:
    work = [w for segment, _ in executor.segments(plan) for part in segment.work for w in part]
    return len(stages_of([w for w in work if isinstance(w, Launch)]))


# Rows of q, k and v: the blocks of a GPU with 132 multiprocessors, and of one with fewer, have rows
# of two matrices, slots with fewer rows than fit, and up to one row more than others.
ROWS = (1301, 258, 130)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "depth, sandwich", [(2048, False), (4096, False), (640, True), (2048, True)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_has_the_results_of_single_launches(name, depth, sandwich):
    """Residual, norm, gated unit, residual, norm, q, k and v, with norms before residuals or not;
    again, from a CUDA graph."""
    need_gpu()
    if depth % dtype(name).block:
        pytest.skip("parts of blocks")
    rng, wide = np.random.default_rng(0), 2048
    shapes = {
        "o": (depth, wide), "gate": (wide, depth), "up": (wide, depth), "down": (depth, wide),
        **{f"qkv{i}": (n, depth) for i, n in enumerate(ROWS)},
    }  # fmt: skip
    stored = {
        n: quantised(normal(rng, size).astype(np.float32), name) for n, size in shapes.items()
    }
    norms = {f"g{i}": 1 + 0.1 * rng.standard_normal(depth).astype(np.float32) for i in range(4)}
    feeds = {"x": rng.standard_normal((1, wide)), "h": rng.standard_normal((1, depth))}
    feeds = {key: value.astype(np.float32) for key, value in feeds.items()}
    found = []
    for options in (CHAINS, Options()):
        executor = GuardedExecutor(Arrays({**stored, **norms}), ORDER, options)
        t = Var("T", 1, 1)
        x, h = feed("x", (t, wide), "f32"), feed("h", (t, depth), "f32")
        w = {n: weight(n, size, name) for n, size in shapes.items()}
        g = [weight(n, (depth,), "f32") for n in norms]

        def after(y, number, g=g, sandwich=sandwich):
            return ops.rms_norm(y, g[number], eps=1e-5) if sandwich else y

        h = ops.add(h, after(ops.linear(x, w["o"]), 2))
        y = ops.rms_norm(h, g[0], eps=1e-5)
        y = ops.mul(ops.silu(ops.linear(y, w["gate"])), ops.linear(y, w["up"]))
        h = ops.add(h, after(ops.linear(y, w["down"]), 3))
        y = ops.rms_norm(h, g[1], eps=1e-5)
        made = {"h": h, **{f"y{i}": ops.linear(y, w[f"qkv{i}"]) for i in range(3)}}
        plan = executor.compile(made)
        results = [executor.run(plan, feeds) for _ in range(4)]
        assert (chains(executor, plan) > 0) == options.chains
        for again in results[1:]:
            for key, value in results[0].items():
                np.testing.assert_array_equal(value, again[key], err_msg=f"{key}, run again")
        found.append(results[0])
    for key, value in found[0].items():
        scale = np.abs(found[1][key]).max()
        np.testing.assert_allclose(value, found[1][key], atol=3e-4 * scale, err_msg=key)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m", "f16"])
def test_a_model_answers_as_without_chains(kind):
    """Greedy tokens of a model with random weights, many steps in a row."""
    need_gpu()
    file = RandomCheckpoint(replace(SHAPES["llama-1b"], layers=3), kind)
    answers = []
    for options in (CHAINS, Options()):
        settings = {"backends": ORDER, "options": options}
        llm = LLM(file, build_decoder(file), settings, Limits(context=512))
        answers.append(
            llm.generate(
                list(range(100, 140)), max_tokens=200, temperature=0.0, ignore_eos=True
            ).ids
        )
    assert answers[0][:16] == answers[1][:16]
