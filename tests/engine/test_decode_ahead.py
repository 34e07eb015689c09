"""Decode lookahead: a step is launched before the id of the previous step is read.

On a device that defers all work (lazy_device.py) the results equal those of a loop that waits for
each step: tokens, stop conditions, and the cache that the next request starts with.
"""

from __future__ import annotations

import lazy_device
import numpy as np
import pytest
import tiny_models as tiny
from windowed_model import CONTEXT, GREEDY, IDS, generate_ids, make_engine, windowed

import graphllm
from graphllm.compiler.placement import Pin
from graphllm.engine.request import Sampling
from graphllm.errors import GraphError
from graphllm.profiler.record import Recorder

ENV = {"T": 1, "S": 1, "Q": 2, "N": 1}
SAMPLED = Sampling(max_tokens=200, temperature=0.9, seed=7, repeat_penalty=1.2)


@pytest.fixture(autouse=True)
def _lazy_device(monkeypatch):
    lazy_device.install(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def ahead(path):
    return make_engine(path, backends=("lazy",))


@pytest.fixture
def plain(path):
    return make_engine(path, backends=("reference",))


def last_logits(engine, ids):
    """Return the logits of the last token, computed in steps of the engine's size."""
    with engine.evaluation(ids) as sequence:
        return next(sequence.logits(ids, last=True))


def device(engine):
    return engine.executor.devices["lazy"]


def watch(engine, monkeypatch):
    """Record the cache slots of the token of each decode step when the step is launched."""
    found = []
    engine.prepare()
    ((segment, _),) = engine.executor.segments(engine.decode_plan())
    run = segment.steps.run

    def recording_run(times):
        values = engine.executor.buffers.values()
        buffers = (slot.buffer for name, _, slot in values if name.startswith("slot."))
        found.append([int(b[:4].view(np.int32)[0]) for b in buffers])
        run(times)

    monkeypatch.setattr(segment.steps, "run", recording_run)
    return found


# ---------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 119, 120])
def test_tokens_up_to_the_end_of_the_context(ahead, plain, length, sampling):
    """The same tokens as without lookahead; no step is launched beyond the context."""
    have, want = (list(e.generate(IDS[:length], sampling, ())) for e in (ahead, plain))
    assert have == want and len(have) == CONTEXT - length + 1
    device(ahead).finish()
    chunks = -(-length // 16)
    assert device(ahead).begun == chunks + CONTEXT - length


def test_one_step_is_launched_ahead(ahead):
    found = ahead.generate(IDS[:20], GREEDY, ())
    next(found)
    before = device(ahead).begun
    for read in range(1, 9):
        next(found)
        assert device(ahead).begun - before == read + 1 and device(ahead).queue


def test_blocks_are_allocated_before_each_step(ahead, monkeypatch):
    """Blocks have 8 tokens; a new one is added just before the step that needs it."""
    slots = watch(ahead, monkeypatch)
    generate_ids(ahead, IDS[:5], CONTEXT - 5)
    device(ahead).finish()
    assert len(slots) == CONTEXT - 5 and min(map(min, slots)) >= 0
    assert [row[0] for row in slots] == list(range(5, CONTEXT))


def test_no_lookahead_with_several_segments(path):
    pinned = make_engine(path, backends=("lazy", "reference"))
    pinned.executor.strict = False
    pinned.executor.place_model(pinned.outputs, [Pin("model.layers.1.*", "reference")])
    plan = pinned.decode_plan()
    assert len(plan.segments()) > 1
    with pytest.raises(GraphError, match=r"input '.*' .* was never fed"):
        pinned.executor.decode_loop(plan, {}, ENV, "ids")
    metas = {name: leaf.meta.at(ENV) for name, leaf in plan.inputs.items()}
    feeds = {name: np.zeros(meta.shape, meta.dtype.numpy) for name, meta in metas.items()}
    assert pinned.executor.decode_loop(plan, feeds, ENV, "ids").lookahead == 0


def test_profiled_runs_have_lookahead(ahead, plain):
    times = Recorder(), Recorder()
    found = ahead.generate(IDS[:20], GREEDY, (), profile=times)
    have = [next(found) for _ in range(9)]
    assert device(ahead).queue and have == generate_ids(plain, IDS[:20], 9)
    runs, steps = times[1].runs, ahead.decode_plan().steps
    assert not device(ahead).queue  # reading the times waits for launched steps
    assert [run.env["kv_sum"] for run in runs] == list(range(21, 21 + len(runs)))
    assert len(times[1].rows) == len(steps) and 8 <= len(runs) <= 9 + ahead.limits.tokens
    assert all(len(row.times) == len(runs) for row in times[1].rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("read", [1, 7])
def test_interleaved_requests_do_not_change_each_other(ahead, plain, sampling, read):
    """Each request continues where it was, although the other one found a launched step."""
    want = list(plain.generate(IDS[:20], sampling, ()))
    first = ahead.generate(IDS[:20], sampling, ())
    have = [next(first) for _ in range(read)]
    assert generate_ids(ahead, IDS[:9], 5) == generate_ids(plain, IDS[:9], 5)
    have += [next(first) for _ in range(3)]
    last_logits(ahead, IDS[:40])
    assert have + list(first) == want


# ------------------------------------------------------------------- after an unread launched step


@pytest.mark.parametrize("read", [1, 2, 3, 11, 12, 13, 40])
def test_a_longer_prompt_after_an_early_stop(ahead, plain, read):
    """It computes the same tokens as without lookahead, and no more."""
    for engine in (ahead, plain):
        tokens = generate_ids(engine, IDS[:30], read)
    longer = [*IDS[:30], *tokens, *IDS[:9]]
    assert generate_ids(ahead, longer, 12) == generate_ids(plain, longer, 12)
    assert ahead.prefill_tokens == plain.prefill_tokens == 10


@pytest.mark.parametrize("tokens, requests", [(16, 25), (1, 12)])
def test_requests_in_any_order(path, tokens, requests):
    """With steps of one token, a ring has room for only the window and the next token."""
    ahead, plain = (make_engine(path, backends=(b,), tokens=tokens) for b in ("lazy", "reference"))
    rng = np.random.default_rng(8)
    for _ in range(requests):
        common, new = int(rng.integers(0, 90)), int(rng.integers(1, 25))
        prompt = [*IDS[:common], *(int(i) for i in rng.integers(3, 90, new))]
        count = int(rng.integers(1, CONTEXT + 1 - len(prompt)))
        assert generate_ids(ahead, prompt, count) == generate_ids(plain, prompt, count)
        if rng.integers(2):
            more = [*prompt, *IDS[:3]]
            have, want = (last_logits(e, more) for e in (ahead, plain))
            np.testing.assert_array_equal(have, want)


def test_an_interrupt_leaves_the_cache_valid(ahead, plain):
    found = ahead.generate(IDS[:30], GREEDY, ())
    first = [next(found) for _ in range(4)]

    def interrupted():
        raise KeyboardInterrupt

    device(ahead).queue.appendleft(interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(found)
    again = [*IDS[:30], *first]
    assert generate_ids(plain, IDS[:30], 4) == first
    assert generate_ids(ahead, again, 12) == generate_ids(plain, again, 12)
    assert ahead.prefill_tokens == 1


# ------------------------------------------------------------------------------------------ answers


def test_stop_conditions(tmp_path):
    """max_tokens, stop strings and stop token ids, one request after another with one cache."""
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
