"""Decoding ahead of the host: a step is begun before the id of the last one is read.

On a device that defers all work (lazy_device.py) the results equal those of a loop that waits for
each step: tokens, stop conditions, and the cache that the next request starts from.
"""

from __future__ import annotations

import lazy_device
import numpy as np
import pytest
import tiny_models as tiny
from test_kv_cache import CONTEXT, GREEDY, IDS, drawn, engine, windowed

import graphllm
from graphllm.compiler.placement import Pin
from graphllm.engine.request import Sampling
from graphllm.errors import GraphError
from graphllm.profiler.record import Recorder

ENV = {"T": 1, "S": 1, "Q": 2, "N": 1}
DRAWN = Sampling(max_tokens=200, temperature=0.9, seed=7, repeat_penalty=1.2)


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    lazy_device.install(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def ahead(path):
    return engine(path, backends=("lazy",))


@pytest.fixture
def plain(path):
    return engine(path, backends=("reference",))


def device(held):
    return held.executor.devices["lazy"]


def watch(held, monkeypatch):
    """Slots of the tokens that single steps work on, as each begins."""
    found = []
    held.prepare()
    ((segment, _),) = held.executor.segments(held.decode_plan())
    run = segment.steps.run

    def seen(times):
        values = held.executor.buffers.values()
        buffers = (slot.buffer for name, _, slot in values if name.startswith("slot."))
        found.append([int(b[:4].view(np.int32)[0]) for b in buffers])
        run(times)

    monkeypatch.setattr(segment.steps, "run", seen)
    return found


# ---------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 119, 120])
def test_tokens_up_to_the_end_of_the_context(ahead, plain, length, sampling):
    """The same ones, and as many; no step is begun that the context has no room for."""
    have, want = (list(e.generate(IDS[:length], sampling, ())) for e in (ahead, plain))
    assert have == want and len(have) == CONTEXT - length + 1
    device(ahead).finish()
    chunks = -(-length // 16)
    assert device(ahead).begun == chunks + CONTEXT - length


def test_one_step_is_ahead(ahead):
    found = ahead.generate(IDS[:20], GREEDY, ())
    next(found)
    before = device(ahead).begun
    for read in range(1, 9):
        next(found)
        assert device(ahead).begun - before == read + 1 and device(ahead).queue


def test_every_step_finds_its_blocks(ahead, monkeypatch):
    """Blocks of 8, of which a step gets a new one just before it begins; a ring in one group."""
    slots = watch(ahead, monkeypatch)
    drawn(ahead, IDS[:5], CONTEXT - 5)
    device(ahead).finish()
    assert len(slots) == CONTEXT - 5 and min(map(min, slots)) >= 0
    assert [row[0] for row in slots] == list(range(5, CONTEXT))


def test_nothing_is_ahead_in_several_segments(path):
    pinned = engine(path, backends=("lazy", "reference"))
    pinned.executor.strict = False
    pinned.executor.place_model(pinned.outputs, [Pin("model.layers.1.*", "reference")])
    plan = pinned.decode_plan()
    assert len(plan.segments()) > 1
    with pytest.raises(GraphError, match=r"input '.*' .* was never fed"):
        pinned.executor.decode_loop(plan, {}, ENV, "ids")
    metas = {name: leaf.meta.at(ENV) for name, leaf in plan.inputs.items()}
    feeds = {name: np.zeros(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
    assert pinned.executor.decode_loop(plan, feeds, ENV, "ids").lookahead == 0


def test_timed_runs_are_ahead_as_others_are(ahead, plain):
    times = Recorder(), Recorder()
    found = ahead.generate(IDS[:20], GREEDY, (), profile=times)
    have = [next(found) for _ in range(9)]
    assert device(ahead).queue and have == drawn(plain, IDS[:20], 9)
    runs, steps = times[1].runs, ahead.decode_plan().steps
    assert not device(ahead).queue  # reading the times waits for what was begun
    assert [run.env["kv_sum"] for run in runs] == list(range(21, 21 + len(runs)))
    assert len(times[1].rows) == len(steps) and 8 <= len(runs) <= 9 + ahead.limits.tokens
    assert all(len(row.times) == len(runs) for row in times[1].rows)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("read", [1, 7])
def test_another_request_does_not_change_this_one(ahead, plain, sampling, read):
    """Each goes on where it was, with a step under way that the other one finds."""
    want = list(plain.generate(IDS[:20], sampling, ()))
    first = ahead.generate(IDS[:20], sampling, ())
    have = [next(first) for _ in range(read)]
    assert drawn(ahead, IDS[:9], 5) == drawn(plain, IDS[:9], 5)
    have += [next(first) for _ in range(3)]
    next(ahead.logits(IDS[:40], last=True))
    assert have + list(first) == want


# ---------------------------------------------------------------------------- after a step too many


@pytest.mark.parametrize("read", [1, 2, 3, 11, 12, 13, 40])
def test_a_longer_prompt_after_an_early_stop(ahead, plain, read):
    """Computes what the plain loop computes, and no more."""
    for held in (ahead, plain):
        tokens = drawn(held, IDS[:30], read)
    longer = [*IDS[:30], *tokens, *IDS[:9]]
    assert drawn(ahead, longer, 12) == drawn(plain, longer, 12)
    assert ahead.prefill_tokens == plain.prefill_tokens == 10


@pytest.mark.parametrize("tokens, requests", [(16, 25), (1, 12)])
def test_requests_in_any_order(path, tokens, requests):
    """With steps of one token a ring has room for the window and the next token, and no more."""
    ahead, plain = (engine(path, backends=(b,), tokens=tokens) for b in ("lazy", "reference"))
    rng = np.random.default_rng(8)
    for _ in range(requests):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT + 1 - len(prompt)))
        assert drawn(ahead, prompt, count) == drawn(plain, prompt, count)
        if rng.integers(2):
            more = [*prompt, *IDS[:3]]
            have, want = (next(e.logits(more, last=True)) for e in (ahead, plain))
            np.testing.assert_array_equal(have, want)


def test_an_interrupted_answer_spoils_nothing(ahead, plain):
    found = ahead.generate(IDS[:30], GREEDY, ())
    first = [next(found) for _ in range(4)]

    def interrupted():
        raise KeyboardInterrupt

    device(ahead).queue.appendleft(interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(found)
    again = [*IDS[:30], *first]
    assert drawn(plain, IDS[:30], 4) == first
    assert drawn(ahead, again, 12) == drawn(plain, again, 12)
    assert ahead.prefill_tokens == 1


# ------------------------------------------------------------------------------------------ answers


def test_answers_and_their_ends(tmp_path):
    """Lengths, stop texts and stop tokens, one request after another in one cache."""
    file = tiny.write_llama(tmp_path / "tiny.gguf", tiny.llama_weights())
    have, want = (graphllm.load(file, device=d, kv_type="f32") for d in ("lazy", "reference"))
    ask = {"temperature": 0.0, "ignore_eos": True}
    free, _ = (llm.generate("hello there", max_tokens=24, **ask) for llm in (have, want))
    for more in (
        {"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 24}, {"stop": free.text[7:10]},
        {"stop_ids": [free.ids[9]]}, {"max_tokens": 500}, {"max_tokens": 3, "stop": "?"},
    ):  # fmt: skip
        a, b = (llm.generate("hello there", **ask, **more) for llm in (have, want))
        assert (a.text, a.ids, a.finish_reason) == (b.text, b.ids, b.finish_reason)
        assert a.cached_tokens == b.cached_tokens
