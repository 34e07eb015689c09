"""Random requests, and engines that run them alone or at random times."""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import suppress

import numpy as np
import pytest
from windowed_model import CONTEXT

from graphllm.engine.completion import Found, Sampled
from graphllm.engine.engine import Engine
from graphllm.engine.generation import Generation
from graphllm.engine.request import Sampling
from graphllm.engine.step_result import TokenLogprobs

Request = tuple[list[int], Sampling]
Answer = list[int | TokenLogprobs]


def favour_low_ids(ids: list[int], logits: np.ndarray) -> np.ndarray:
    """A logits processor."""
    logits[: len(ids)] += 1
    return logits


def requests(
    rng: random.Random, count: int, processors: bool = False, grammars: bool = False
) -> list[Request]:
    """Return random prompts, some of which share a prefix, and settings.

    ``processors``: some have a logits processor. ``grammars``: some have a grammar; see `submit`.
    """
    made: list[Request] = []
    for seed in range(count):
        prompt = [rng.randrange(3, 90) for _ in range(rng.choice([1, 2, 7, 16, 33, 60]))]
        if made and rng.random() < 0.4:
            prompt = (rng.choice(made)[0] + prompt)[: CONTEXT - 20]
        more = {"repeat_penalty": 1.3, "frequency_penalty": 0.2} if seed % 3 == 0 else {}
        if seed % 8 == 1:
            more["logprobs"] = seed % 5
        if seed % 16 == 5:
            more["prompt_logprobs"] = seed % 3
        if processors and seed % 16 == 10:
            more["processors"] = [favour_low_ids]
        if grammars and seed % 8 == 4:
            more["regex"] = "( ?[a-z]{2,9} [0-9]{1,3};){1,6}"
        settings = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.3]), max_tokens=rng.randrange(1, 40), seed=seed,
            top_k=rng.choice([0, 5, 40]), top_p=rng.choice([0.9, 1.0]), **more,
        )  # fmt: skip
        if seed % 8 == 7:
            beams = rng.choice([2, 3, 4])
            settings = Sampling(
                beams=beams, n=beams, max_tokens=rng.randrange(1, 12), length_penalty=0.8,
                early_stopping=rng.choice([True, False, "never"]), stop_ids=range(40, 60),
                banned_ids=(7, 8), seed=seed,
            )  # fmt: skip
        made.append((prompt, settings))
    return made


def submit(engine: Engine, prompt: list[int], settings: Sampling, **more: int) -> Generation:
    """Submit a request without EOS ids. One with a grammar gets the ``tokenizer`` of the engine."""
    tokenizer = engine.tokenizer if settings.has_grammar else None
    return engine.submit(prompt, settings, (), tokenizer=tokenizer, **more)


def answer(engine: Engine, prompt: list[int], settings: Sampling) -> Answer:
    """Return what a request gets alone, with an empty cache."""
    engine.clear_cache()
    return collect(engine, {0: submit(engine, prompt, settings)})[0]


def ids_of(found: Answer) -> list[int]:
    """Return the sampled ids of an answer."""
    return [each if isinstance(each, int) else each.id for each in found]


def logprobs_of(found: list[Answer]) -> list[float]:
    """Return all log-probabilities of some answers."""
    return [each.logprob for ids in found for each in ids if isinstance(each, TokenLogprobs)]


def take(generation: Generation, found: Answer) -> None:
    """Move the sampled ids of a generation, or their log-probabilities, to ``found``.

    Each answer of a beam search ends with the id -1 and its score. Once the generation has ended,
    log-probabilities of the prompt follow.
    """
    while generation.events:
        event = generation.events.popleft()
        if isinstance(event, Found):
            for each in event.answers:
                found += [*each.ids, TokenLogprobs(-1, each.score)]
        elif isinstance(event, Sampled) and event.token is not None:
            found.append(event.token if event.logprobs is None else event.logprobs)
    if generation.done:
        found += generation.prompt_logprobs


def collect(engine: Engine, live: dict[int, Generation]) -> dict[int, Answer]:
    """Run steps until all generations have ended; return what each got."""
    found: dict[int, Answer] = {index: [] for index in live}
    while not all(generation.done for generation in live.values()):
        assert engine.step()
    for index, generation in live.items():
        take(generation, found[index])
    return found


def run_at_random(
    engine: Engine, asked: list[Request], rng: random.Random, arrival: float = 0.4
) -> list[Answer]:
    """Submit requests at random times, and cancel copies of some of them.

    ``arrival``: probability that one more arrives before a step.
    """
    found, live, waiting, cancelled = {}, {}, list(range(len(asked))), []
    while waiting or live:
        while waiting and rng.random() < arrival:
            index = waiting.pop(0)
            live[index] = submit(engine, *asked[index], priority=rng.randrange(2))
            found[index] = []
            if rng.random() < 0.2:
                cancelled.append(submit(engine, *rng.choice(asked)))
        if cancelled and rng.random() < 0.3:
            engine.cancel(cancelled.pop(rng.randrange(len(cancelled))))
        engine.step()
        engine.manager.check()
        for index, generation in list(live.items()):
            take(generation, found[index])
            if generation.done:
                del live[index]
    for generation in cancelled:
        engine.cancel(generation)
    engine.settle()
    return [found[index] for index in range(len(asked))]


def run_interrupted(
    patch: pytest.MonkeyPatch, engine: Engine, method: tuple[object, str], rng: random.Random,
    generations: Collection[Generation],
) -> int:  # fmt: skip
    """Run steps until all generations have ended; return the number of interrupts.

    A fifth of the calls of ``method``, an owner and a name, are interrupted, before or after them.
    """
    owner, name = method
    real, interrupts = getattr(owner, name), 0

    def interrupting(*call):
        nonlocal interrupts
        after = rng.random() < 0.5
        result = real(*call) if after else None
        if rng.random() < 0.2:
            interrupts += 1
            raise KeyboardInterrupt
        return result if after else real(*call)

    while not all(generation.done for generation in generations):
        patch.setattr(owner, name, interrupting)
        with suppress(KeyboardInterrupt):
            engine.step()
        patch.setattr(owner, name, real)
    return interrupts
