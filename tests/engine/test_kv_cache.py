"""KV cache: blocks, rings of sliding-window layers, dtypes, rollback."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
from random_models import decoder
from windowed_model import (
    CONTEXT,
    IDS,
    WINDOW,
    generate_ids,
    logits,
    make_engine,
    windowed,
)

import graphllm
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.engine import Engine
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.graph.dtype import CACHED
from graphllm.loading.load import build_decoder, graph_limits
from graphllm.model.decoder import Limits
from graphllm.runtime.executor import Executor


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("kv"))


# ------------------------------------------------------------------------------------------- rings


def test_a_windowed_group_keeps_only_its_window(path):
    engine = make_engine(path)
    logits(engine)
    rows = {name: engine.executor.get_state(name).shape[0] for name in ("window20.1.k", "full.0.v")}
    assert rows == {"window20.1.k": 48, "full.0.v": CONTEXT}
    assert engine.limits.kept(WINDOW) == 6 and engine.limits.kept(0) == 15


@pytest.mark.parametrize("kind", CACHED)
def test_rings_chunks_and_threads_give_identical_bits(path, kind, monkeypatch):
    """Full pools or rings, any chunking, one or two threads."""
    ring = make_engine(path, threads=2, kv_dtype=kind)
    want = logits(ring)
    for size in (1, 7):
        np.testing.assert_array_equal(logits(ring, size=size), want)
    np.testing.assert_array_equal(logits(make_engine(path, threads=1, kv_dtype=kind)), want)
    monkeypatch.setattr(Limits, "kept", lambda self, window: self.blocks)
    whole = make_engine(path, kv_dtype=kind)
    np.testing.assert_array_equal(logits(whole), want)
    assert whole.executor.get_state("window20.1.k").shape[0] == CONTEXT


def test_generation_wraps_around_the_ring(path, monkeypatch):
    """Slots computed on the device give the same tokens as full pools."""
    have = generate_ids(make_engine(path), IDS[:30], 80)
    monkeypatch.setattr(Limits, "kept", lambda self, window: self.blocks)
    assert have == generate_ids(make_engine(path), IDS[:30], 80)


def test_a_longer_prompt_computes_only_its_new_tokens(path):
    engine = make_engine(path)
    tokens = generate_ids(engine, IDS[:50], 30)
    longer = [*IDS[:50], *tokens[:-1], *IDS[:9]]
    assert generate_ids(engine, longer, 8) == generate_ids(make_engine(path), longer, 8)
    assert engine.prefill_tokens == 9


@pytest.mark.parametrize("common", [95, 90, 80])
def test_rollback_within_the_ring(path, common):
    engine = make_engine(path)
    generate_ids(engine, IDS[:96], 1)
    prompt = [*IDS[:common], 4, 5, 6]
    assert generate_ids(engine, prompt, 12) == generate_ids(make_engine(path), prompt, 12)
    assert engine.prefill_tokens == 3


@pytest.mark.parametrize("common", [70, 40, 3])
def test_rollback_beyond_the_ring_clears_the_cache(path, common):
    engine = make_engine(path)
    generate_ids(engine, IDS, 1)
    prompt = [*IDS[:common], 4, 5, 6]
    assert generate_ids(engine, prompt, 12) == generate_ids(make_engine(path), prompt, 12)
    assert engine.prefill_tokens == len(prompt)


def test_repeated_rollback(path):
    """Any order of prompts gives the same logits as an empty cache."""
    engine, rng = make_engine(path), np.random.default_rng(8)
    for _ in range(12):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT - len(prompt)))
        fresh = make_engine(path, backends=("reference",))
        want = logits(fresh, prompt)[-1]
        np.testing.assert_allclose(logits(engine, prompt)[-1], want, atol=2e-3)
        have = generate_ids(engine, prompt, min(count, 20))  # adds tokens to the cache
        assert have == generate_ids(fresh, prompt, min(count, 20))


# ----------------------------------------------------------------------------------------- formats


def nmse(have, want):
    return float(((have - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize(
    ("kind", "most"), [("f16", 1e-6), ("q8_0", 1e-3), ("q4_0", 0.2), ("fp8", 1e-2)]
)
def test_cache_dtypes_stay_near_f32(path, kind, most):
    want = logits(make_engine(path))
    for backends in (("cpu", "reference"), ("reference",)):
        assert 0 < nmse(logits(make_engine(path, backends=backends, kv_dtype=kind)), want) < most


@pytest.mark.parametrize(("kind", "most"), [("q8_0", 1e-7), ("q4_0", 1e-5), ("fp8", 1e-5)])
def test_blocks_are_the_same_on_the_reference(path, kind, most):
    """Scores differ in their last bits, which may round a key of a later layer otherwise."""
    have, want = (
        logits(make_engine(path, backends=order, kv_dtype=kind))
        for order in (("cpu", "reference"), ("reference",))
    )
    assert nmse(have, want) < most


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "fp8"])
def test_blocks_must_be_whole(tmp_path, kind):
    file = tiny.write_llama(tmp_path / "m.gguf", tiny.llama_weights())  # heads of 10
    with pytest.raises(RequestError) as caught:
        graphllm.load(file, kv_type=kind, device="cpu")
    assert f"kv_type = '{kind}'" in str(caught.value) and "head size is 10" in str(caught.value)


def test_latent_attention_refuses_row_scales():
    """Its values are columns of the keys, which share a scale with the other columns."""
    model = decoder("deepseek_v2", 0, "f32")
    with pytest.raises(RequestError, match="kv_type = 'fp8' is not supported for latent attention"):
        model.check_cache(Limits(kv_dtype="fp8"))


@pytest.mark.realmodel
def test_q8_0_on_the_demo():
    """700 tokens (two chunks, more than the window): near the f32 cache, for any chunking.

    Activations are not quantised, since quantisation would amplify small differences.
    """
    ask = {"device": "cpu", "context": 1024, "linear": "float"}
    kept, exact = (graphllm.load("demo", kv_type=kind, **ask) for kind in ("q8_0", "f32"))
    ids = exact.encode("The quick brown fox jumps over the lazy dog and finds a coin. " * 52)[:700]
    assert len(ids) == 700
    have = kept.logits(ids)[-64:]
    assert nmse(have, exact.logits(ids)[-64:]) < 2e-3
    with kept.engine.evaluation(ids) as sequence:
        for at in range(0, len(ids), 64):
            last = sequence.step_logits(ids[at : at + 64])
    np.testing.assert_array_equal(last, have[-len(last) :])


@pytest.mark.realmodel
def test_rollback_of_the_demo():
    """A short rollback reuses the cache, a long one clears it; both give the right tokens."""
    llm = graphllm.load("demo", device="cpu", context=2048, max_sequences=1)
    ids = llm.encode("One, two, three, four, five, six, seven, eight, nine, ten. " * 60)
    ask = Sampling(max_tokens=8, temperature=0.0, seed=0)

    def answer(prompt):
        found = llm.engine.generate(prompt, ask, ())
        return [next(found) for _ in range(8)], llm.engine.prefill_tokens

    assert len(ids) > 1200
    answer(ids[:1700])
    near, far = [*ids[:1000], 7], [*ids[:100], 7]
    assert [answer(p)[1] for p in (near, far)] == [1, len(far)]
    got = [answer(ids[:1100])[0] and answer(p)[0] for p in (near, far)]
    llm.engine.clear_cache()
    fresh = []
    for p in (near, far):
        llm.engine.clear_cache()
        fresh.append(answer(p)[0])
    assert got == fresh


# --------------------------------------------------------------------------------- tokens of a step


@pytest.mark.parametrize(
    "shape, device, sequences, context, tokens",
    [
        ("llama-1b", "cpu", 1, 100, 100),
        ("llama-1b", "cpu", 3, 100, 300),
        ("llama-1b", "cpu", 256, 100, 512),
        ("llama-1b", "cuda", 1, 4096, 2048),
        ("llama-1b", "cuda", 2, 4096, 512),
        ("llama-1b", "cuda", 100, 4096, 832),
        ("llama-1b", "cuda", 256, 100, 2048),
        (
            "gemma3-270m",
            "cuda",
            256,
            4096,
            512,
        ),  # its pools have blocks for a step of each sequence
    ],
)
def test_decoding_leaves_room_for_prompts(shape, device, sequences, context, tokens):
    decoder = build_decoder(RandomCheckpoint(shape, "q4_0"))
    limits = decoder.limits(graph_limits(context, None, device, sequences))
    assert (limits.tokens, limits.context, limits.sequences) == (tokens, context, sequences)


def test_short_steps_run_in_a_plan_of_their_own(monkeypatch):
    """And long steps give the tokens of short ones."""
    monkeypatch.setattr(Limits, "tokens", 16)
    model, engines = decoder("llama", 0, "f32"), []
    for tokens in (16, 64):
        executor = Executor(model.weights, ("cpu", "reference"))
        engines.append(Engine(model, executor, Limits(tokens, context=100)))
        engines[-1].prepare()
    short, long = engines
    run, steps = long.executor.run, []
    monkeypatch.setattr(long.executor, "run", lambda plan, *a: steps.append(plan) or run(plan, *a))
    ids = [i * 7 % 50 + 1 for i in range(81)]
    for count in (16, 17, 81):
        long.clear_cache()
        assert generate_ids(long, ids[:count], 5) == generate_ids(short, ids[:count], 5)
    assert steps[:2] == [long.plan(["ids"], n) for n in (16, 64)]
