"""Draft tokens that the device accepts and predicts: the answers are those without drafts."""

from __future__ import annotations

import random

import lazy_device
import pytest
import windowed_model
from predicted_answers import look_up_on_device, predict_on_device, speculate
from request_runs import answer, collect, ids_of, requests, run_at_random, run_interrupted

from graphllm.engine.acceptance_rates import AcceptanceRates
from graphllm.engine.generation import Generation
from graphllm.engine.request import Sampling
from graphllm.profiler.record import Recorder

SEED = 43
PROMPT = [5, 9, 30, 31, 32, 33]


@pytest.fixture(autouse=True)
def _lazy_device(monkeypatch):
    lazy_device.install(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("device"))


def plain(path):
    return windowed_model.make_engine(path, backends=("lazy", "reference"))


def drafting(path, fixed, most=6, **limits):
    """An engine whose device looks drafts up; ``fixed``: their number, 0: as many as pay."""
    engine = windowed_model.make_engine(path, backends=("lazy", "reference"), drafts=most, **limits)
    speculate(engine, fixed)
    look_up_on_device(engine)
    return engine


@pytest.mark.parametrize("fixed, sequences, least", [(3, 1, 40), (0, 1, 40), (3, 2, 1)])
def test_random_requests_get_what_they_get_without_drafts(
    path, fixed, sequences, least, monkeypatch
):
    """Random arrival, cancellations, prefixes, windows, preemption, penalties, grammars, beams."""
    rng = random.Random(SEED)
    asked = requests(rng, 24, processors=True, grammars=True)
    single = plain(path)
    want = [answer(single, *each) for each in asked]
    predict_on_device(monkeypatch, asked, want)
    engine = drafting(path, fixed, sequences=sequences, kv_blocks=18)
    device, taken = engine.batcher.device_drafts, []
    note = device.note_drafts
    monkeypatch.setattr(device, "note_drafts", lambda s: (taken.append(device._taken), note(s)))
    have = run_at_random(engine, asked, rng, arrival=0.1)
    assert list(map(ids_of, have)) == list(map(ids_of, want))
    assert len(taken) > least and engine.batcher.speculation.accepted > 5 * bool(fixed)
    assert set(engine.manager.held.values()) == {0} and not device.waiting


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 117, 118, 119, 120])
def test_tokens_up_to_the_end_of_the_context(path, length, monkeypatch):
    prompt = windowed_model.IDS[:length]
    sampling = Sampling(max_tokens=200, temperature=0.9, seed=7)
    want = answer(plain(path), prompt, sampling)
    predict_on_device(monkeypatch, [(prompt, sampling)], [want])
    engine = drafting(path, 4)
    assert answer(engine, prompt, sampling) == want
    assert len(ids_of(want)) == windowed_model.CONTEXT - length + 1
    assert engine.batcher.speculation.accepted > 10 or length > 40


def test_a_step_is_launched_before_the_one_before_it_is_taken(path, monkeypatch):
    sampling = Sampling(max_tokens=60, temperature=0.7, seed=3)
    want = answer(plain(path), PROMPT, sampling)
    predict_on_device(monkeypatch, [(PROMPT, sampling)], [want])
    engine = drafting(path, 4)
    device, waiting = engine.batcher.device_drafts, []
    take = device._take

    def taking():
        waiting.append(device.waiting)
        return take()

    monkeypatch.setattr(device, "_take", taking)
    generation = engine.submit(PROMPT, sampling, ())
    assert collect(engine, {0: generation})[0] == want
    assert waiting.count(2) >= len(waiting) - 2 and len(waiting) < 50
    assert generation.accepted > 10 and generation.drafted > generation.accepted
    assert answer(engine, PROMPT, sampling) == want  # after a step that was launched in vain


@pytest.mark.parametrize("ids, accepted", [((5,), 60), ((5, 9), 0)])
def test_the_sequence_itself_is_looked_up(path, ids, accepted):
    """An answer of one id is predicted by the op; one of two ids at random mostly is not."""
    sampling = Sampling(max_tokens=100, temperature=2.0, seed=1, allowed_ids=ids)
    want, engine = answer(plain(path), PROMPT, sampling), drafting(path, 0)
    assert answer(engine, PROMPT, sampling) == want
    assert engine.batcher.speculation.accepted >= accepted


@pytest.mark.parametrize("where", ["step", "accept", "complete", "push"])
def test_an_interrupted_step_loses_and_repeats_nothing(path, monkeypatch, where):
    asked = requests(random.Random(SEED + 1), 6)
    want = [answer(plain(path), *each) for each in asked]
    predict_on_device(monkeypatch, asked, want)
    engine = drafting(path, 3)
    owner = {
        "step": engine.batcher.device_drafts, "accept": engine.batcher.speculation,
        "complete": engine.scheduler, "push": Generation,
    }[where]  # fmt: skip
    rng, interrupts = random.Random(SEED), 0
    for request, wanted in zip(asked, want):
        generation = engine.submit(*request, ())
        interrupts += run_interrupted(monkeypatch, engine, (owner, where), rng, [generation])
        assert ids_of(collect(engine, {0: generation})[0]) == ids_of(wanted)
    assert interrupts > 1 and engine.batcher.speculation.accepted


def test_recorded_steps_have_drafts_of_the_host(path, monkeypatch):
    sampling = Sampling(max_tokens=20, temperature=0.7, seed=3)
    want = answer(plain(path), PROMPT, sampling)
    predict_on_device(monkeypatch, [(PROMPT, sampling)], [want])
    engine = drafting(path, 4)
    engine.batcher.meter = Recorder()
    assert answer(engine, PROMPT, sampling) == want
    assert not engine.batcher.device_drafts._loops and engine.batcher.speculation.accepted > 5


def test_a_device_that_does_not_run_ahead_is_fed_by_the_host(path, monkeypatch):
    sampling = Sampling(max_tokens=20, temperature=0.7, seed=3)
    engine = windowed_model.make_engine(path, backends=("reference",))
    want = answer(engine, PROMPT, sampling)
    predict_on_device(monkeypatch, [(PROMPT, sampling)], [want])
    engine = windowed_model.make_engine(path, backends=("reference",), drafts=6)
    speculate(engine, 3)
    look_up_on_device(engine)
    assert answer(engine, PROMPT, sampling) == want
    assert not engine.batcher.device_drafts._supported and engine.batcher.speculation.accepted > 5


def test_rates_of_acceptance_follow_the_outcomes():
    rates = AcceptanceRates()
    before = rates.rates(15)
    assert len(before) == 15 and before == sorted(before, reverse=True) and rates.rates(0) == []
    for _ in range(60):
        rates.note(4, 2)  # the third one is wrong, and nothing is known about the fourth
    first, second, third, fourth = rates.rates(4)
    assert first > 0.97 and second > 0.95 and third < 0.05 and fourth < 0.05 * third
    assert rates.rates(5)[4] == pytest.approx(0.9 * fourth)
    for _ in range(60):
        rates.note(1, 0)
    assert rates.rates(1)[0] < 0.03 and rates.rates(2)[1] < 0.03
    rates.note(0, 0)


def test_requests_after_each_other_and_a_reset(path, monkeypatch):
    """Loops and feeds of one request serve the next; after a reset they are made again."""
    asked = [(PROMPT, Sampling(max_tokens=30, temperature=0.7, seed=seed)) for seed in range(4)]
    asked += [(PROMPT, Sampling(max_tokens=30, temperature=0.7, seed=5, min_tokens=9, logprobs=3))]
    want = [answer(plain(path), *each) for each in asked]
    predict_on_device(monkeypatch, asked, want)
    engine, made = drafting(path, 3), []
    make = engine.executor.decode_loop

    def counting(*call, **more):
        made.append(call)
        return make(*call, **more)

    monkeypatch.setattr(engine.executor, "decode_loop", counting)

    def run(request):
        return collect(engine, {0: engine.submit(*request, ())})[0]

    assert [run(request) for request in asked[:3]] == want[:3]
    device = engine.batcher.device_drafts
    assert len(device._loops) == 4 and len(made) < 4 + 2 * 3  # of 1, 2, 4 and 7 rows
    assert list(map(ids_of, map(run, asked[3:]))) == list(map(ids_of, want[3:]))
    assert len(device._loops) == 8
    engine.batcher.make_room()
    assert not device._loops and run(asked[0]) == want[0] and len(device._loops) == 4
