"""Many sequences at once: each request gets what it gets alone, bit for bit."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from request_runs import (
    answer,
    collect,
    ids_of,
    logprobs_of,
    requests,
    run_at_random,
    run_interrupted,
    take,
)
from windowed_model import IDS

import graphllm
from graphllm.engine.generation import Generation
from graphllm.engine.kv_memory import kv_blocks
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.profiler.record import Recorder

REQUESTS = 200
SEED = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("batching"))


# ------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("backends", [("cpu", "reference"), ("lazy", "reference")])
def test_random_requests_get_what_they_get_alone(path, backends, monkeypatch):
    """Random arrival, cancellations, prefixes, windows; small pools, so that some are preempted.

    The lazy device runs ahead of the host, as a GPU does. Its kernels are NumPy's, whose rounding
    depends on the number of rows, so log-probabilities agree nearly.
    """
    if backends[0] == "lazy":
        import lazy_device

        lazy_device.install(monkeypatch)
    count = REQUESTS if backends[0] == "cpu" else REQUESTS // 4
    rng = random.Random(SEED)
    asked = requests(rng, count, processors=True, grammars=True)
    single = windowed_model.make_engine(path, backends=backends)
    want = [answer(single, *each) for each in asked]
    engine = windowed_model.make_engine(path, backends=backends, sequences=6, kv_blocks=22)
    have = run_at_random(engine, asked, rng)
    if backends[0] == "cpu":
        assert have == want
    else:
        assert list(map(ids_of, have)) == list(map(ids_of, want))
        np.testing.assert_allclose(logprobs_of(have), logprobs_of(want), atol=1e-4)
    assert engine.scheduler.preempted > 0 and engine.manager.hits > 0
    assert set(engine.manager.held.values()) == {0}


@pytest.mark.parametrize("seed", [20, 22])
def test_many_beams_keep_blocks_that_others_continue(path, seed):
    """Beams take over sequences that hold private copies of blocks that are cached, too."""
    rng = random.Random(seed)
    engine = windowed_model.make_engine(path, sequences=40, tokens=64)
    run_at_random(engine, requests(rng, 120, processors=True), rng)  # checks the pools
    assert set(engine.manager.held.values()) == {0}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [16, 24])
def test_threads_and_the_size_of_steps_do_not_change_answers(path, threads, tokens):
    asked = requests(random.Random(SEED + 1), 24)
    single = windowed_model.make_engine(path)
    want = [answer(single, *each) for each in asked]
    engine = windowed_model.make_engine(path, threads=threads, tokens=tokens, sequences=5)
    found = collect(engine, {i: engine.submit(*each, ()) for i, each in enumerate(asked)})
    assert [found[index] for index in range(len(asked))] == want


def test_a_batch_of_one_plan_for_all_bucket_sizes(path):
    """1, 2, 3, ... sequences run in plans for the next power of two."""
    prompt, settings = IDS[:9], Sampling(temperature=0.8, seed=3, max_tokens=5)
    want = answer(windowed_model.make_engine(path), prompt, settings)
    engine = windowed_model.make_engine(path, sequences=9)
    for count in range(1, 10):
        engine.clear_cache()
        live = {index: engine.submit(prompt, settings, ()) for index in range(count)}
        assert set(map(tuple, collect(engine, live).values())) == {tuple(want)}


# ---------------------------------------------------------------------------------- shared prefixes


def test_a_common_prefix_is_computed_once(path):
    """Requests that arrive together or later compute only what follows the shared blocks."""
    engine = windowed_model.make_engine(path, sequences=8)
    prefix = [*range(3, 67)]  # 8 blocks
    asked = [([*prefix, 70 + i], Sampling(temperature=0.0, max_tokens=3)) for i in range(8)]
    want = [answer(windowed_model.make_engine(path), *each) for each in asked]
    recorder = Recorder()
    live = {index: engine.submit(*each, ()) for index, each in enumerate(asked)}
    while not all(generation.done for generation in live.values()):
        engine.step((recorder, Recorder()))
    computed = sum(run.env["T"] for run in recorder.runs)
    assert computed <= len(prefix) + 8 + 16  # the suffixes, and decode beside the first chunks
    ids: dict[int, list[int]] = {index: [] for index in live}
    for index, generation in live.items():
        take(generation, ids[index])
    assert list(ids.values()) == want
    assert sum(generation.prefill_tokens for generation in live.values()) == len(prefix) + 8


# ------------------------------------------------------------------------------------------ the API


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("batching") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=2, max_sequences=8)


def test_several_prompts_are_one_batch(llm):
    prompts = ["hello", "what is", [5, 6, 7], "hello there"]
    settings = {"max_tokens": 12, "temperature": 0.7, "seed": 4, "ignore_eos": True}
    want = [llm.generate(prompt, **settings).ids for prompt in prompts]
    before = llm.engine.batcher.steps
    have = llm.generate(prompts, **settings)
    assert [done.ids for done in have] == want
    assert llm.engine.batcher.steps - before < 4 * 12 / 2


def test_concurrent_requests_of_four_threads(llm):
    """64 requests; a slow reader of a stream does not hold up the others."""
    texts = [f"hello {'x' * (i % 7)}" for i in range(64)]
    settings = {"max_tokens": 10, "temperature": 0.9, "seed": 2, "ignore_eos": True}
    want = [llm.generate(text, **settings).text for text in texts]
    slow = llm.stream("what is", max_tokens=30, temperature=0, ignore_eos=True)
    text = next(slow)
    have: dict[int, str] = {}

    def work(first: int) -> None:
        for index in range(first, len(texts), 4):
            have[index] = llm.generate(texts[index], **settings).text

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [have[index] for index in range(64)] == want
    text += "".join(slow)
    assert text == llm.generate("what is", max_tokens=30, temperature=0, ignore_eos=True).text


def test_a_request_that_fails_leaves_the_others_alone(llm):
    want = llm.generate("hello there", max_tokens=20, temperature=0, ignore_eos=True).text
    stream = llm.stream("hello there", max_tokens=20, temperature=0, ignore_eos=True)
    text = next(stream)
    with pytest.raises(RequestError, match="the context holds"):
        llm.generate(list(range(3, 300)) * 20)
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate([[5, 6], []])
    assert text + "".join(stream) == want
    llm.engine.settle()
    assert set(llm.engine.manager.held.values()) == {0}


# ------------------------------------------------------------------------------------------- memory


def test_the_size_of_the_kv_cache(path):
    engine = windowed_model.make_engine(path, sequences=4)
    limits, groups = engine.limits, windowed_model.caches(path)
    assert kv_blocks(groups, limits, "auto", None) == 4 * limits.blocks
    assert kv_blocks(groups, limits, "auto", 0) == limits.blocks
    assert kv_blocks(groups, replace(limits, sequences=1), "auto", 1 << 40) == limits.blocks
    with pytest.raises(RequestError, match="kv_memory = 1000 is too small"):
        kv_blocks(groups, limits, 1000, None)
    total = sum(
        operand.buffer.nbytes
        for name, _, operand in _pools(windowed_model.make_engine(path, sequences=4, kv_blocks=20))
    )
    assert kv_blocks(groups, limits, total, None) == 20


def _pools(engine):
    engine.prepare()
    return [v for v in engine.executor.buffers.values() if v[0].endswith((".k", ".v"))]


def test_the_memory_of_the_engine_stays_flat(llm):
    """Nothing of 500 requests is kept but cached prefixes, which are bounded."""
    rng = np.random.default_rng(5)
    for _ in range(500):
        llm.generate([int(i) for i in rng.integers(3, 300, 9)], max_tokens=2, temperature=0)
    engine = llm.engine
    engine.settle()
    assert not engine.batcher.generations
    assert all(n <= engine.limits.pool_blocks(0) for n in engine.manager.cached.values())
    assert engine.scheduler.running == engine.scheduler.waiting == 0


# ------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("where", ["run", "take", "complete", "push"])
def test_an_interrupted_step_loses_and_repeats_nothing(path, monkeypatch, where):
    """Ctrl-C at any point of a step: the requests go on and get what they get alone."""
    asked = requests(random.Random(SEED + 2), 12)
    single = windowed_model.make_engine(path)
    want = [answer(single, *each) for each in asked]
    engine = windowed_model.make_engine(path, sequences=5)
    owner, name = {
        "run": (engine.batcher.runner, "run"),
        "take": (engine.batcher.runner, "take"),
        "complete": (engine.scheduler, "complete"),
        "push": (Generation, "push"),
    }[where]
    live = {i: engine.submit(*each, ()) for i, each in enumerate(asked)}
    interrupts = run_interrupted(
        monkeypatch, engine, (owner, name), random.Random(SEED), live.values()
    )
    found = collect(engine, live)
    assert [found[index] for index in range(len(asked))] == want
    assert interrupts > 3
