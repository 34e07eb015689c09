"""`prefill="fp8"`: plans without a GPU, and on a GPU its errors, what stays exact, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_cases import ORDER, need_gpu, normal, quantised
from paper_cuda import Empty, paper_fixture  # noqa: F401
from tiny_models import write_tiny

import graphllm
from graphllm import ops
from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.backends.cuda.kernels.e4m3_copy import PACK_WITH_COPY
from graphllm.backends.cuda.kernels.matrices import MAX_TOKENS
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.checkpoints.model_shapes import MIX, SHAPES
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.errors import PlacementError, RequestError
from graphllm.formats.activations import F8_ROW, dequantise_act, quantise_act
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import WEIGHT, Var, feed, weight
from graphllm.loading.load import build_decoder, memory_left
from graphllm.model.decoder import Limits
from graphllm.profiler.planner import Planner
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

FP8 = Options(prefill="fp8")
E4M3 = {"gemm_bytes.cu", "gated_e4m3.cu"}  # sources of kernels that multiply it
TEXT = Path(__file__).parents[1] / "golden" / "alice_chapter_1.txt"


# ------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("kind", ["f16", "q8_0", MIX])
def test_only_steps_of_many_tokens_multiply_e4m3(kind, paper):
    """And each weight has one packed form, which all plans share."""
    device = paper((9, 0), FP8)
    file = Empty(replace(SHAPES["llama-1b"], layers=2, vocab=512), kind)
    settings = {"backends": ("cuda",), "options": FP8}
    llm = LLM(file, build_decoder(file), settings, Limits(tokens=512))
    packs = {}
    for tokens in (1, 16, 256, 512):
        device.built.clear()
        llm.executor.bind(llm.engine.plan(["ids.filtered"], tokens))
        steps = [step for steps, _ in device.built for step in steps]
        launches = [w for _, work in device.built for part in work for w in part]
        files = {w.function.module.file for w in launches if isinstance(w, Launch)}
        assert {"linears_plain_e4m3", "linears_blocks_e4m3"} & {step.kernel.name for step in steps}
        many = tokens > MAX_TOKENS
        assert {"gemm_bytes.cu", "gated_e4m3.cu"} & files == (E4M3 if many else set())
        assert not many or not {"gemm.cu", "small_batch_blocks.cu"} & files
        for step in steps:
            for i, source in enumerate(step.node.src):
                if source is not None and source.op == WEIGHT and len(source.shape) == 2:
                    form = step.kernel.pack.get(ops.get(step.node.op).operand(i))
                    packs.setdefault(source.name, set()).add(form)
    assert {PACK_WITH_COPY} in packs.values()
    assert all(len(forms) == 1 for forms in packs.values()), packs


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_generations_multiply_the_copies_with_mma(capability, paper):
    device = paper(capability, FP8)
    file = Empty(replace(SHAPES["llama-1b"], layers=2, vocab=512), "q8_0")
    settings = {"backends": ("cuda",), "options": FP8}
    llm = LLM(file, build_decoder(file), settings, Limits(tokens=512))
    llm.executor.bind(llm.engine.plan(["ids.filtered"], 512))
    launches = [w for _, work in device.built for part in work for w in part]
    files = {w.function.module.file for w in launches if isinstance(w, Launch)}
    assert "small_batch.cu" in files and not files & E4M3


def test_the_plan_of_a_short_prompt_is_for_many_tokens():
    """So it multiplies the copies, however short the prompt is."""
    assert Limits().plan_tokens(1) > MAX_TOKENS
    assert Limits(tokens=2048).plan_tokens(20) > MAX_TOKENS


def test_a_site_without_a_copy_is_as_before(paper):
    """A router, few rows, float32, rows of logits, and a depth that is no multiple of 32."""
    paper((9, 0), FP8)
    for rows, depth, kind, tokens, name in (
        (128, 64, "f16", "T", "mlp.gate.weight"), (96, 64, "f16", "T", "w"),
        (512, 64, "f32", "T", "w"), (512, 64, "f16", "N", "w"), (512, 40, "f16", "T", "w"),
    ):  # fmt: skip
        x = feed("x", (Var(tokens, 1, 512), depth), "f32")
        y = ops.linear(x, weight(name, (rows, depth), kind))
        values = {name: np.zeros((rows, depth), dtype(kind).numpy)}
        executor = Executor(Arrays(values), ("cuda",), FP8)
        steps = executor.compile({"y": y}).steps
        assert [step.kernel.name for step in steps][-1] == "linear_plain", (rows, depth, kind, name)
        assert "f8_row" not in {str(s.dtype) for step in steps for s in step.node.src if s}


# --------------------------------------------------------------------------------------- refusals


def test_refusals(tmp_path):
    for device in ("cpu", "reference"):
        with pytest.raises(PlacementError, match=r"'fp8' needs .* capability 8\.9 or newer"):
            graphllm.load("demo", device=device, prefill="fp8")
    with pytest.raises(RequestError, match="prefill = 'fp4'"):
        graphllm.load("demo", prefill="fp4")
    with pytest.raises(PlacementError, match="device = 'cpu'"):
        graphllm.dry_run(write_tiny(tmp_path / "tiny.gguf", "llama"), device="cpu", prefill="fp8")


def test_a_plan_counts_the_copies(tmp_path):
    """One byte for each element of the matrices of the layers."""
    file = RandomCheckpoint(replace(SHAPES["llama-1b"], layers=2, vocab=512), "q8_0")
    plain, fp8 = (graphllm.dry_run(file, device="cuda", prefill=kind) for kind in ("auto", "fp8"))
    names = [name for name in file.tensors if name.startswith("blk.")]
    elements = sum(math.prod(file.info(n).shape) for n in names if len(file.info(n).shape) == 2)
    added = fp8.memory["cuda:0"].weights - plain.memory["cuda:0"].weights
    assert elements < added < 1.01 * elements


@pytest.mark.parametrize("shape", ["llama-1b", "llama-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_memory_left_counts_the_copies_that_are_made(shape):
    """As a plan does: none of the embedding, the head, routers and experts."""
    file = RandomCheckpoint(replace(SHAPES[shape], layers=2, vocab=8192), "q8_0")
    decoder = build_decoder(file)
    left, weights = [], []
    for kind in ("auto", "fp8"):
        planner = Planner(decoder.weights, "cuda", Options(prefill=kind), 1 << 40)
        left.append(memory_left(decoder, planner))
        plan = graphllm.dry_run(file, device="cuda", prefill=kind)
        weights.append(plan.memory["cuda:0"].weights)
    assert left[0] - left[1] == pytest.approx(weights[1] - weights[0], rel=2e-3)
    matrices = [decoder.weights.meta(n) for n in decoder.weights.names()]
    every = sum(m.size for m in matrices if m is not None and m.ndim == 2)
    assert 0 < left[0] - left[1] < 0.99 * every


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_below_8_9_is_refused(capability, monkeypatch):
    made = SimpleNamespace(gpu=SimpleNamespace(capability=capability))
    path = "graphllm.backends.cuda.runtime.device.CudaDevice"
    monkeypatch.setattr(path, lambda options: made)
    if capability >= (8, 9):
        assert BACKEND.open_device(FP8) is made
        return
    own = ".".join(map(str, capability))
    with pytest.raises(PlacementError) as error:
        BACKEND.open_device(FP8)
    assert str(error.value) == f"prefill = 'fp8' needs compute capability 8.9; the GPU has {own}"
    assert BACKEND.open_device(Options()) is made


def test_determinism_excludes_it(paper):
    paper((9, 0), FP8)
    with pytest.raises(RequestError, match="exclude each other"):
        graphllm.load("demo", device="cuda", prefill="fp8", deterministic=True)


# ------------------------------------------------------------------------------------------ results


def rounded(rows: np.ndarray) -> np.ndarray:
    """Rows as e4m3 with a scale each, in float64."""
    return dequantise_act(quantise_act(rows, F8_ROW), F8_ROW, rows.shape[-1]).astype(np.float64)


def product(x, w, bias, kind, most=600, options=FP8):
    """x w^T + bias with weights of ``kind``, in a plan of at most ``most`` tokens."""
    x_leaf = feed("x", (Var("T", 0, most), x.shape[-1]), "f32")
    y = ops.linear(
        x_leaf, weight("w", (len(bias), x.shape[-1]), kind), weight("b", bias.shape, "f32")
    )
    executor = GuardedExecutor(Arrays({"w": w, "b": bias}), ORDER, options)
    plan = executor.compile({"y": y})
    assert plan.steps[-1].kernel.name.endswith("_e4m3") == (options == FP8)
    return executor.run(plan, {"x": x}, {"T": len(x)})["y"]


@pytest.fixture
def gpu():
    need_gpu()


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k", "iq4_nl", "mxfp4"])
@pytest.mark.parametrize("rows, depth", [(512, 256), (1056, 768)])
def test_products(kind, rows, depth):
    """Those of operands rounded to e4m3, computed in float64, at several numbers of tokens."""
    rng = np.random.default_rng(rows)
    w = quantised(normal(rng, (rows, depth)).astype(np.float32), kind)
    plain = w.astype(np.float32) if isinstance(w, np.ndarray) else w.dequantise()
    exact = rounded(plain)
    bias = rng.standard_normal(rows).astype(np.float32)
    for tokens in (0, 257, 600):
        x = rng.standard_normal((tokens, depth)).astype(np.float32)
        x[:, ::7] *= 20
        got, want = product(x, w, bias, kind), rounded(x) @ exact.T + bias
        assert got.shape == (tokens, rows)
        assert not tokens or np.abs(got - want).max() < 2e-3 * np.abs(want).max()


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
def test_rows_that_are_not_finite_stay_rows():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 512)).astype(np.float32)
    w = quantised(rng.standard_normal((512, 512)).astype(np.float32), "f16")
    bias = np.zeros(512, np.float32)
    clean = product(x, w, bias, "f16")
    x[3, 5], x[299, 0], x[7] = np.nan, np.inf, 0
    got = product(x, w, bias, "f16")
    assert np.isnan(got[[3, 299]]).all() and (got[7] == 0).all()
    rest = [i for i in range(300) if i not in (3, 7, 299)]
    assert (got[rest] == clean[rest]).all()


@pytest.mark.cuda
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_k"])
@pytest.mark.parametrize("most", [1, 16, MAX_TOKENS])
def test_short_steps_are_exact(kind, most):
    """Plans of few tokens read the weight itself: the same bits as without the option."""
    rng = np.random.default_rng(most)
    w = quantised(normal(rng, (512, 512)).astype(np.float32), kind)
    bias, x = rng.standard_normal(512), rng.standard_normal((most, 512))
    operands = x.astype(np.float32), w, bias.astype(np.float32), kind, most
    assert (product(*operands) == product(*operands, Options())).all()


@pytest.mark.cuda
@pytest.mark.realmodel
@pytest.mark.usefixtures("gpu")
def test_the_demo():
    """Its decode steps have the same bits; its perplexity rises by less than 5 %."""
    text = TEXT.read_text("utf-8")
    exact, fast = (graphllm.load("demo", device="cuda", context=1024, prefill=kind)
                   for kind in ("auto", "fp8"))  # fmt: skip
    with exact, fast:
        ids = exact.encode("The capital of France is")
        answers = [llm.generate(ids, max_tokens=24, temperature=0).ids for llm in (exact, fast)]
        assert answers[0] == answers[1]
        values = [llm.perplexity(text, context=1024).value for llm in (exact, fast)]
    assert values[0] != values[1]
    assert values[1] == pytest.approx(values[0], rel=0.05)
