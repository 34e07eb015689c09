"""Speculative decoding: drafts change the number of steps, and nothing else."""

from __future__ import annotations

import random

import pytest
import tiny_models as tiny
import windowed_model
from predicted_answers import predict_answers, speculate
from request_runs import answer, collect, ids_of, requests, run_at_random, run_interrupted

import graphllm
from graphllm.engine import runner
from graphllm.engine.completion import Sampled
from graphllm.engine.generation import Delivery, Generation
from graphllm.engine.prompt_lookup import PromptLookup
from graphllm.engine.request import Sampling
from graphllm.engine.speculation import Speculation
from graphllm.engine.step_times import StepTimes
from graphllm.errors import RequestError

SEED = 41


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("speculation"))


def speculating(path, fixed=3, backends=("cpu", "reference"), **limits):
    """An engine that computes so many draft tokens of each sequence; 0: as many as pay."""
    engine = windowed_model.make_engine(path, backends=backends, drafts=12, **limits)
    speculate(engine, fixed)
    return engine


# --------------------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("backend, fixed", [("cpu", 3), ("cpu", 0), ("lazy", 2)])
def test_random_requests_get_what_they_get_without_drafts(path, backend, fixed, monkeypatch):
    """Random arrival, cancellations, prefixes, windows, preemption, penalties, grammars, beams."""
    if backend == "lazy":
        import lazy_device

        lazy_device.install(monkeypatch)
    rng, backends = random.Random(SEED), (backend, "reference")
    asked = requests(rng, 64 if fixed == 3 else 24, processors=True, grammars=True)
    single = windowed_model.make_engine(path, backends=backends)
    want = [answer(single, *each) for each in asked]
    predict_answers(monkeypatch, asked, want)
    engine = speculating(path, fixed, backends, sequences=6, kv_blocks=22)
    have = run_at_random(engine, asked, rng)
    if backend == "cpu":
        assert have == want
    else:  # NumPy rounds log-probabilities differently for other numbers of rows
        assert list(map(ids_of, have)) == list(map(ids_of, want))
    assert engine.scheduler.preempted > 0 and engine.manager.hits > 0
    own = engine.batcher.speculation
    assert min(own.accepted, own.rejected) > 5 or not fixed
    assert set(engine.manager.held.values()) == {0}


def test_the_next_step_is_launched_before_results_are_delivered(path, monkeypatch):
    sampling = Sampling(temperature=0.7, max_tokens=40, seed=3)
    prompt = [5, 9, 30, 31, 32, 33]
    single = windowed_model.make_engine(path)
    want = answer(single, prompt, sampling)
    predict_answers(monkeypatch, [(prompt, sampling)], [want])
    engine, launched, completed = speculating(path), [], []
    complete = engine.scheduler.complete

    def listener(last: bool) -> None:
        launched.append(engine.batcher.runner.waiting)

    def completing(chunks) -> None:
        completed.append(engine.batcher.runner.waiting)
        complete(chunks)

    monkeypatch.setattr(engine.scheduler, "complete", completing)

    generation = engine.submit(prompt, sampling, (), delivery=Delivery(listener=listener))
    ids = []
    while not generation.done:
        engine.step()
        assert generation.delivered == generation.count - generation.undelivered
        ids += [event.token for event in generation.events if isinstance(event, Sampled)]
        generation.events.clear()
    assert [token for token in ids if token is not None] == ids_of(want)
    assert generation.accepted > 5 and sum(launched) > len(launched) // 2
    assert sum(completed) > len(completed) // 2
    assert engine.batcher.runner.waiting == 0 and generation.undelivered == 0
    assert not engine.step() and set(engine.manager.held.values()) == {0}


@pytest.mark.parametrize("most", [runner._MAX_KEPT, 2])
def test_steps_with_as_many_rows_share_a_loop(path, monkeypatch, most):
    """Also those of other requests, with other settings, and of plain steps between them."""
    monkeypatch.setattr(runner, "_MAX_KEPT", most)
    asked = [
        ([5, 9, 30 + 3 * seed, 31], Sampling(temperature=0.5 + seed / 4, max_tokens=40, seed=seed))
        for seed in range(4)
    ]
    single = windowed_model.make_engine(path)
    want = [answer(single, *each) for each in asked]
    predict_answers(monkeypatch, asked, want)
    engine, made = speculating(path), []
    make = engine.executor.decode_loop

    def counting(plan, feeds, env, *call, **more):
        made.append((env["T"], len(feeds)))
        return make(plan, feeds, env, *call, **more)

    monkeypatch.setattr(engine.executor, "decode_loop", counting)
    have = [collect(engine, {0: engine.submit(*each, ())})[0] for each in asked]
    assert have == want and engine.batcher.speculation.accepted > 20
    fed = [rows for rows, feeds in made if feeds > 2]
    assert len(set(fed)) == 3  # 1, 4, and 3 before the last token
    assert (len(fed) == 3) == (most > 2)
    engine.clear_cache()  # and loops
    assert answer(engine, *asked[0]) == want[0]
    assert len([rows for rows, feeds in made if feeds > 2]) > len(fed)


@pytest.mark.parametrize("where", ["take", "accept", "complete", "push"])
def test_an_interrupted_step_loses_and_repeats_nothing(path, monkeypatch, where):
    asked = requests(random.Random(SEED + 1), 12)
    single = windowed_model.make_engine(path)
    want = [answer(single, *each) for each in asked]
    predict_answers(monkeypatch, asked, want)
    engine = speculating(path, sequences=4)
    owner = {
        "take": engine.batcher.runner, "accept": engine.batcher.speculation,
        "complete": engine.scheduler, "push": Generation,
    }[where]  # fmt: skip
    live = {i: engine.submit(*each, ()) for i, each in enumerate(asked)}
    interrupts = run_interrupted(
        monkeypatch, engine, (owner, where), random.Random(SEED), live.values()
    )
    found = collect(engine, live)
    assert [found[index] for index in range(len(asked))] == want
    assert interrupts > 1 and engine.batcher.speculation.accepted


def test_answers_end_within_accepted_drafts(tmp_path):
    """At a stop string, a stop id, the last token asked for, or the end of the context."""
    path = tiny.write_tiny(tmp_path / "tiny.gguf", "llama", context=64)
    load = {"device": "cpu", "threads": 1, "max_sequences": 2}
    plain, llm = graphllm.load(path, **load), graphllm.load(path, speculate="6", **load)
    prompt = [5, 9, 30, 31, 32, 33, 5, 9, 30]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 99}
    text, ids = plain.generate(prompt, **greedy).text, llm.generate(prompt, **greedy).ids
    cases = [{}, {"max_tokens": 40, "logprobs": 2, "repeat_penalty": 1.1}]
    cases += [{"max_tokens": n} for n in range(1, 30, 4)]
    cases += [{"stop_ids": [ids[n]]} for n in (8, 20, 33)]
    cases += [{"stop": text[n : n + 3]} for n in (9, 25, 40)]
    for case in cases:  # one after the other, so that each finds the blocks of the last
        want, have = (each.generate(prompt, **greedy | case) for each in (plain, llm))
        for field in ("ids", "text", "finish_reason", "notes", "logprobs", "cached_tokens"):
            assert getattr(have, field) == getattr(want, field), (case, field)
    done = llm.generate(prompt, **greedy)
    timings = done.timings
    assert done.notes and 0 < timings.accepted_tokens <= timings.drafted_tokens
    assert "".join(llm.stream(prompt, **greedy)) == text


# -------------------------------------------------------------------------------------- draft model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft_models")
    return [
        tiny.write_llama(folder / f"{s}.gguf", tiny.llama_weights(s), "llama", "", 64)
        for s in (0, 1)
    ]


@pytest.mark.parametrize("speculate", ["5", "auto", "off"])
@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_changes_no_answer(models, same, speculate):
    """Requests at once, at any temperature; a model is its own best draft model."""
    load = {"device": "cpu", "threads": 1, "max_sequences": 3}
    plain = graphllm.load(models[0], **load)
    llm = graphllm.load(models[0], draft=models[not same], speculate=speculate, **load)
    prompts = [[5, 9, 30, 31], [7] * 20, [40, 41, 5]]
    for temperature in (0, 1.0):
        options = {"temperature": temperature, "ignore_eos": True, "max_tokens": 99, "seed": 3}
        want, have = ([llm.generate(p, **options) for p in prompts] for llm in (plain, llm))
        handles = [llm.submit(p, **options) for p in prompts]
        have += [handle.result() for handle in handles]
        assert [h.ids for h in have] == [w.ids for w in want] * 2
        if speculate == "5":
            drafted = sum(h.timings.drafted_tokens for h in have)
            accepted = sum(h.timings.accepted_tokens for h in have)
            assert drafted > 100 and (accepted == drafted if same else accepted < drafted / 2)
    draft = llm.draft
    llm.close()
    assert draft.closed


def test_draft_models_that_cannot_predict(models, tmp_path):
    token = next(i for i, piece in enumerate(tiny.VOCAB["pieces"]) if len(piece) > 4)
    piece = tiny.VOCAB["pieces"][token].encode()
    other = tmp_path / "other.gguf"
    other.write_bytes(models[1].read_bytes().replace(piece, b"x" * len(piece), 1))
    with pytest.raises(RequestError, match=f"token {token} is not the same"):
        graphllm.load(models[0], draft=other, device="cpu")


# -------------------------------------------------------------------------------------- predictions


def longest_match(tokens):
    """Position behind the latest of the longest matches of the end, of 2 to 32 tokens; 0: none."""
    best = 0, 0
    for at in range(2, len(tokens)):
        length = 0
        while length < min(at, 32) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, at))
    return best[1] if best[0] >= 2 else 0


def test_predictions_follow_the_longest_match():
    rng = random.Random(7)
    for _ in range(40):
        tokens = [rng.randrange(6) for _ in range(rng.randrange(60))]
        source = longest_match(tokens)
        lookup = PromptLookup(tokens)
        lookup.update()
        assert bool(lookup.rates(3)) == bool(source)
        if source:
            period = tokens[source:]
            assert lookup.predict(9) == tuple((period * 9)[:9])


def test_rates_follow_the_outcomes_and_tokens_may_be_taken_back():
    tokens = [1, 2, 3, 4, 5, 6] * 2
    lookup = PromptLookup(tokens)
    lookup.update()
    before = lookup.rates(4)
    assert before == sorted(before, reverse=True) and lookup.predict(4) == (1, 2, 3, 4)
    for token in [1, 2, 3, 4, 5, 6] * 20:
        tokens.append(token)
        lookup.update()
    assert lookup.rates(4)[3] > 0.9 > before[3]
    tokens.append(9)
    lookup.update()
    assert lookup.rates(4) == []
    del tokens[3:]
    tokens += [1, 2]
    lookup.update()
    assert lookup.predict(2) == (3, 1)


# --------------------------------------------------------------------------------- number of drafts


def chosen(times, rates):
    return Speculation(None, 16)._most_profitable(rates, 15, times, times.plain(len(rates)))


def test_as_many_drafts_as_the_times_of_steps_make_worth_while():
    sure, unsure = [0.99**n for n in range(1, 16)], [0.4**n for n in range(1, 16)]
    times = StepTimes()
    assert chosen(times, [sure]) == [0]  # nothing is known
    for rows in (1, 1, 1, 16, 16):
        times.note(rows, rows > 1, 1.0)
    assert chosen(times, [sure]) == [15] and sum(chosen(times, [sure, unsure])) == 15
    for rows in (4, 4, 8, 8, 12, 12, 16, 16) * 6:
        times.note(rows, True, 1 + 0.5 * rows)
    assert chosen(times, [unsure]) == [0] and chosen(times, [sure])[0] > 10
    for rows in (4, 4, 8, 8, 12, 12, 16, 16) * 6:
        times.note(rows, True, 1 + 1.5 * rows)
    assert chosen(times, [sure]) == [0]
    while not any(chosen(times, [sure])):  # an estimate that is never confirmed loses its weight
        pass


def test_the_change_between_kinds_of_steps_has_its_cost():
    times, rates = StepTimes(), [0.6, 0.3]
    for drafted in [False, False] + [True, False, False] * 40:
        times.note(3 if drafted else 1, drafted, 1.1 if drafted else 1.0)
    assert any(chosen(times, [rates]))
    times.note(1, False, 1.0)
    for _ in range(40):
        times.note(3, True, 1.1)
        times.note(1, False, 2.0)
        times.note(1, False, 1.0)
    assert not any(chosen(times, [rates]))
    times.note(3, True, 1.1)
    assert any(chosen(times, [rates]))  # now it is the other change that costs
