"""The cache of keys and values: blocks, rings of windowed layers, formats, rolling back."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.backends import Options
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.engine.engine import Engine
from graphllm.engine.kv_cache import BlockTable
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.executor import Executor

WINDOWED = """
from dataclasses import replace
from graphllm.model.decoder import Decoder as Model
from graphllm.model.config_keys import base_config

def config(keys):
    plain = base_config(keys)
    layers = tuple(replace(layer, window=20 * (i % 2)) for i, layer in enumerate(plain.layers))
    return replace(plain, layers=layers)
"""
WINDOW, CONTEXT = 20, 120
IDS = [int(i) for i in np.random.default_rng(5).integers(3, 90, CONTEXT)]
GREEDY = Sampling(max_tokens=200, temperature=0.0, seed=0)


def windowed(folder):
    """A llama with heads of 32, of whose three layers the second has a window of 20."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 32)
        patch.setattr(tiny, "DIM", 32 * tiny.HEADS)
        written = tiny.write_llama(folder / "tiny.gguf", tiny.llama_weights())
    (folder / "windowed.py").write_text(WINDOWED)
    return written


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("kv"))


def engine(path, threads=0, backends=("cpu", "reference"), **limits) -> Engine:
    """Steps of 16 tokens, blocks of 8: a window of 20 keeps 6 of the 15 blocks of the context."""
    decoder = build_decoder(GgufCheckpoint(path), path.parent / "windowed.py")
    executor = Executor(decoder.weights, backends, Options(threads=threads), strict=True)
    wanted = {"tokens": 16, "context": CONTEXT, "block": 8, "kv_dtype": "f32", **limits}
    return Engine(decoder, executor, Limits(**wanted))


def logits(engine, ids=IDS, size=16):
    """float32 [T, vocab], the prompt cut in pieces of ``size``."""
    engine.clear_cache()
    parts = [engine.step_logits(ids[i : i + size]) for i in range(0, len(ids), size)]
    return np.concatenate(parts)


def drawn(engine, ids, count):
    found = engine.generate(ids, GREEDY, ())
    return [next(found) for _ in range(count)]


# ------------------------------------------------------------------------------------------ blocks


def test_a_ring_names_no_block_twice():
    table = BlockTable(list(range(5)), block=4, width=20, max_blocks=5, window=9)
    for tokens in range(1, 81):
        table.grow(tokens)
        owned = table.table[table.table >= 0].tolist()
        assert len(owned) == len(set(owned)) == min(5, -(-tokens // 4))
        assert (table.slots(max(0, tokens - 9), tokens) >= 0).all()
    with pytest.raises(RequestError, match="81 tokens do not fit"):
        table.grow(81)


def test_a_ring_knows_what_it_has_lost():
    table = BlockTable(list(range(5)), block=4, width=20, max_blocks=5, window=9)
    table.grow(40)  # blocks 5..10 are there: tokens 20..40
    assert [n for n in range(41) if table.holds(n)] == [0, *range(28, 41)]
    table.release()
    assert table.holds(0) and (table.table < 0).all()
    table.grow(8)
    assert table.table[:2].tolist() == [0, 1]  # memory that was in use already


def test_without_a_window_nothing_is_lost():
    table = BlockTable(list(range(20)), block=4, width=20)
    table.grow(80)
    assert all(table.holds(n) for n in range(81))


# ------------------------------------------------------------------------------------------- rings


def test_a_windowed_group_keeps_its_window_only(path):
    held = engine(path)
    logits(held)
    rows = {name: held.executor.get_state(name).shape[0] for name in ("window20.1.k", "full.0.v")}
    assert rows == {"window20.1.k": 48, "full.0.v": CONTEXT}
    assert held.limits.kept(WINDOW) == 6 and held.limits.kept(0) == 15


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_rings_pieces_and_threads_change_no_bit(path, kind, monkeypatch):
    """Whole pools or rings, whatever the pieces, alone or with two threads."""
    ring = engine(path, threads=2, kv_dtype=kind)
    want = logits(ring)
    for size in (1, 7):
        np.testing.assert_array_equal(logits(ring, size=size), want)
    np.testing.assert_array_equal(logits(engine(path, threads=1, kv_dtype=kind)), want)
    monkeypatch.setattr(Limits, "kept", lambda self, window: self.blocks)
    whole = engine(path, kv_dtype=kind)
    np.testing.assert_array_equal(logits(whole), want)
    assert whole.executor.get_state("window20.1.k").shape[0] == CONTEXT


def test_generation_around_the_ring(path, monkeypatch):
    """The slots that the step itself works out lead to the same tokens as whole pools."""
    have = drawn(engine(path), IDS[:30], 80)
    monkeypatch.setattr(Limits, "kept", lambda self, window: self.blocks)
    assert have == drawn(engine(path), IDS[:30], 80)


def test_a_longer_prompt_computes_its_end_only(path):
    held = engine(path)
    tokens = drawn(held, IDS[:50], 30)
    longer = [*IDS[:50], *tokens[:-1], *IDS[:9]]
    assert drawn(held, longer, 8) == drawn(engine(path), longer, 8)
    assert held.prefill_tokens == 9


@pytest.mark.parametrize("common", [95, 90, 80])
def test_rolling_back_within_the_ring(path, common):
    held = engine(path)
    logits(held, IDS[:96])
    prompt = [*IDS[:common], 4, 5, 6]
    assert drawn(held, prompt, 12) == drawn(engine(path), prompt, 12)
    assert held.prefill_tokens == 3


@pytest.mark.parametrize("common", [70, 40, 3])
def test_rolling_back_beyond_the_ring_begins_anew(path, common):
    held = engine(path)
    logits(held)
    prompt = [*IDS[:common], 4, 5, 6]
    assert drawn(held, prompt, 12) == drawn(engine(path), prompt, 12)
    assert held.prefill_tokens == len(prompt)


def test_rolling_back_again_and_again(path):
    """Any order of prompts gives what a fresh start gives."""
    held, rng = engine(path), np.random.default_rng(8)
    for _ in range(12):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT - len(prompt)))
        fresh = engine(path, backends=("reference",))
        want = logits(fresh, prompt)[-1]
        at = held.reuse_cache(prompt)
        while at < len(prompt):
            have = held.step_logits(prompt[at : at + 16])
            at += len(prompt[at : at + 16])
        np.testing.assert_allclose(have[-1], want, atol=2e-3)
        drawn(held, prompt, min(count, 20))  # leaves more in the cache


# ----------------------------------------------------------------------------------------- formats


def nmse(have, want):
    return float(((have - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-6), ("q8_0", 1e-3)])
def test_formats_stay_near_f32(path, kind, most):
    want = logits(engine(path))
    for backends in (("cpu", "reference"), ("reference",)):
        assert 0 < nmse(logits(engine(path, backends=backends, kv_dtype=kind)), want) < most


def test_q8_0_is_the_same_on_the_reference(path):
    have, want = (
        logits(engine(path, backends=order, kv_dtype="q8_0"))
        for order in (("cpu", "reference"), ("reference",))
    )
    assert nmse(have, want) < 1e-7


def test_q8_0_needs_whole_blocks(tmp_path):
    file = tiny.write_llama(tmp_path / "m.gguf", tiny.llama_weights())  # heads of 10
    with pytest.raises(RequestError) as caught:
        graphllm.load(file, kv_type="q8_0")
    assert "kv_type = 'q8_0'" in str(caught.value) and "head size is 10" in str(caught.value)


@pytest.mark.realmodel
def test_q8_0_on_the_demo():
    """700 tokens: two chunks, and more than the window; near the f32 cache, at any chunking.

    With activations that are not quantised: these turn any small difference into a larger one.
    """
    ask = {"device": "cpu", "context": 1024, "linear": "float"}
    kept, exact = (graphllm.load("demo", kv_type=kind, **ask) for kind in ("q8_0", "f32"))
    ids = exact.encode("The quick brown fox jumps over the lazy dog and finds a coin. " * 52)[:700]
    assert len(ids) == 700
    have = kept.logits(ids)[-64:]
    assert nmse(have, exact.logits(ids)[-64:]) < 2e-3
    kept.engine.clear_cache()
    for at in range(0, len(ids), 64):
        last = kept.engine.step_logits(ids[at : at + 64])
    np.testing.assert_array_equal(last, have[-len(last) :])


@pytest.mark.realmodel
def test_the_demo_rolls_back():
    """From 900 tokens: a little keeps what is there, a lot begins anew; both are right."""
    llm = graphllm.load("demo", device="cpu", context=2048)
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
