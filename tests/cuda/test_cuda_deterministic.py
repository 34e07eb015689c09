"""`deterministic=True`: results have the same bits at any number of tokens and in any batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cuda_cases import need_gpu, quantised
from paper_cuda import paper_fixture  # noqa: F401
from predicted_answers import look_up_on_device, predict_answers, speculate
from request_runs import answer, requests, run_at_random
from windowed_model import CONTEXT

import graphllm
from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.checkpoints.model_shapes import ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.engine import Engine
from graphllm.engine.request import Sampling
from graphllm.errors import PlacementError
from graphllm.graph.tensor import Var, feed, weight
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

SAME = Options(deterministic=True)
TOKENS = (1, 2, 3, 9, 17, 31, 64, 100, 128, 255, 257, 600)
DENSE = ModelShape("llama", 3, 512, 8, 2, 1024, 512, context=1024)
MIXTURE = ModelShape(
    "qwen3moe", 2, 512, 8, 2, 256, 512, context=1024, experts=8, experts_per_token=2
)
REQUESTS, SEED = 200, 3


def linear(kind: str, rows: int, depth: int, most: int, options: Options = SAME):
    """An executor of one linear of at most ``most`` tokens, and its plan."""
    values = np.random.default_rng(rows).normal(size=(rows, depth)).astype(np.float32)
    executor = Executor(Arrays({"w": quantised(values, kind)}), ("cuda",), options)
    x = feed("x", (Var("T", 1, most), depth), "f32")
    plan = executor.compile({"y": ops.linear(x, weight("w", (rows, depth), kind))})
    return executor, plan


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
@pytest.mark.parametrize("kind, depth", [("f16", 512), ("f16", 509), ("f32", 512), ("q4_k", 512)])
def test_one_kernel_multiplies_any_number_of_tokens(kind, depth, capability, paper):
    """No GPU is needed: no library call, and one module family with one division of the depth."""
    device, found = paper(capability, SAME), set()
    for most in TOKENS:
        executor, plan = linear(kind, 192, depth, most)
        executor.bind(plan)
        (_, work) = device.built[-1]
        launches = [each for part in work for each in part]
        assert all(isinstance(each, Launch) for each in launches)
        found.add((launches[-1].function.module.file, tuple(launches[-1].args[5:6])))
    assert len(found) == 1


@pytest.mark.parametrize("width", [256, 320, 768, 1024])
def test_one_kernel_normalizes_any_number_of_tokens(width, paper):
    """No GPU is needed. Kernels for rows of several units add their squares in another order."""
    device, found = paper((9, 0), SAME), set()
    w, b, m = weight("w", (width,), "f32"), weight("b", (width,), "f32"), (192, width)
    weights = {"w": np.ones(width, np.float32), "b": np.ones(width, np.float32),
               "m": np.ones(m, np.float16)}  # fmt: skip
    for most in TOKENS:
        executor = Executor(Arrays(weights), ("cuda",), SAME)
        x = feed("x", (Var("T", 1, most), width), "f32")
        y = ops.linear(ops.layer_norm(x, w, b, eps=1e-5), weight("m", m, "f16"))
        executor.bind(executor.compile({"y": y}))
        (_, work) = device.built[-1]
        found.add(work[0][0].function.name)
    assert len(found) == 1 or (width == 256 and len(found) == 2)


def test_an_old_gpu_is_refused(monkeypatch):
    from graphllm.backends.cuda.runtime import device

    class Old:
        class gpu:
            capability = (7, 5)

    monkeypatch.setattr(device, "CudaDevice", lambda options: Old)
    assert BACKEND.open_device(Options()) is Old
    with pytest.raises(PlacementError, match=r"capability 8\.0; the GPU has 7\.5"):
        BACKEND.open_device(SAME)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "kind, rows, depth",
    [("f16", 200, 1040), ("bf16", 96, 256), ("f16", 50, 77), ("f32", 33, 300), ("q4_k", 272, 2048),
     ("q8_0", 130, 1056), ("q4_0", 64, 96), ("q6_k", 48, 256), ("q8_0", 7, 64)],
)  # fmt: skip
def test_rows_of_a_linear_do_not_depend_on_their_number(kind, rows, depth):
    need_gpu()
    x = np.random.default_rng(1).normal(size=(max(TOKENS), depth)).astype(np.float32)
    found = {}
    for most in TOKENS:
        executor, plan = linear(kind, rows, depth, most)
        executor.bind(plan)
        found[most] = executor.run(plan, {"x": x[-most:]})["y"]
    want = found[max(TOKENS)]
    for most, have in found.items():
        np.testing.assert_array_equal(have.view(np.uint32), want[-most:].view(np.uint32))


def engine(shape: ModelShape, kind: str, **limits) -> Engine:
    file = RandomCheckpoint(shape, kind)
    decoder = build_decoder(file)
    executor = Executor(decoder.weights, ("cuda", "reference"), SAME, strict=True)
    wanted = {"tokens": 512, "context": CONTEXT, "block": 16, "kv_dtype": "f16", **limits}
    return Engine(decoder, executor, Limits(**wanted))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "shape, kind, cached",
    [(DENSE, "f16", "f16"), (DENSE, "q8_0", "q8_0"), (DENSE, "q4_k_m", "f16"),
     (MIXTURE, "q4_k_m", "f16")],
    ids=["f16", "q8_0", "q4_k_m", "mixture"],
)  # fmt: skip
def test_random_requests_get_bit_for_bit_what_they_get_alone(shape, kind, cached):
    """With preemption, prefix reuse, beams, log-probabilities and cancelled copies."""
    need_gpu()
    rng = random.Random(SEED)
    count = REQUESTS if shape is DENSE else REQUESTS // 4
    asked = requests(rng, count, processors=True)
    single = engine(shape, kind, kv_dtype=cached)
    want = [answer(single, *each) for each in asked]
    many = engine(shape, kind, kv_dtype=cached, sequences=12, kv_blocks=40)
    have = run_at_random(many, asked, rng)
    wrong = [i for i, (a, b) in enumerate(zip(have, want)) if a != b]
    assert not wrong, f"{len(wrong)} of {count}, first {asked[wrong[0]]}"
    assert many.scheduler.preempted > 0 and many.manager.hits > 0


@pytest.mark.cuda
@pytest.mark.parametrize("fixed", [0, 4])
def test_drafts_change_no_bit(fixed, monkeypatch):
    """With preemption, prefix reuse, log-probabilities, penalties, and steps launched ahead."""
    need_gpu()
    rng = random.Random(SEED)
    asked = requests(rng, REQUESTS // 4, processors=True)
    single = engine(DENSE, "q4_k_m")
    want = [answer(single, *each) for each in asked]
    predict_answers(monkeypatch, asked, want)
    many = engine(DENSE, "q4_k_m", sequences=6, kv_blocks=24, drafts=16)
    speculate(many, fixed)
    assert run_at_random(many, asked, rng) == want
    own = many.batcher.speculation
    assert min(own.accepted, own.rejected) > 5 or not fixed


@pytest.mark.cuda
@pytest.mark.parametrize("fixed, sequences", [(0, 1), (4, 1), (15, 1), (4, 3)])
def test_drafts_of_the_device_change_no_bit(fixed, sequences):
    """Answers of one id are predicted right, those of two ids sometimes, and others hardly ever."""
    need_gpu()
    rng = random.Random(SEED)
    asked = requests(rng, REQUESTS // 8, processors=True)
    for seed, ids in enumerate([(5,), (5, 9), (5, 9)]):
        settings = Sampling(
            temperature=1.5, seed=seed, max_tokens=60, allowed_ids=ids, logprobs=2 * seed
        )
        asked += [([7, 5, 9, 5, 30 + seed], settings)]
    single = engine(DENSE, "q4_k_m")
    want = [answer(single, *each) for each in asked]
    many = engine(DENSE, "q4_k_m", sequences=sequences, kv_blocks=24, drafts=16)
    speculate(many, fixed)
    look_up_on_device(many)
    assert run_at_random(many, asked, rng, arrival=0.1) == want
    own, device = many.batcher.speculation, many.batcher.device_drafts
    assert device._loops and device._supported and own.accepted > 20
    assert own.rejected > 5 or not fixed


@pytest.mark.cuda
def test_load_with_deterministic():
    need_gpu()
    file = RandomCheckpoint(DENSE, "q4_k_m")
    llm = graphllm.load(file, device="cuda", deterministic=True, context=CONTEXT)
    ids = [[5, 9, 30], [7] * 40, [11, 12]]
    together = llm.generate(ids, max_tokens=8, seed=1, logprobs=2)
    alone = [llm.generate(each, max_tokens=8, seed=1, logprobs=2) for each in ids]
    assert [(a.ids, a.logprobs) for a in together] == [(a.ids, a.logprobs) for a in alone]
