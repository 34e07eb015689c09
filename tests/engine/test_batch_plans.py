"""Plans that are bound before requests need them."""

from __future__ import annotations

import random

import pytest
import windowed_model
from request_runs import requests, run_at_random

from graphllm.engine.batch_plans import bind_batch_plans
from graphllm.engine.request import Sampling
from graphllm.runtime import executor

PLAIN = Sampling(temperature=0.8, top_k=9, max_tokens=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("sequences", [1, 2, 5])
@pytest.mark.parametrize("tokens", [24, 600])
def test_batches_of_plain_requests_compile_nothing(path, sequences, tokens, monkeypatch):
    """Prompts of all lengths, which arrive at any time; chunks of several prompts in a step."""
    engine = windowed_model.make_engine(path, sequences=sequences, tokens=tokens, kv_blocks=60)
    engine.prepare()
    seen = []
    bind_batch_plans(engine, lambda what, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(seen[-1][1]))

    def refuse(*args: object) -> None:
        raise AssertionError("a plan was compiled, or bound")

    monkeypatch.setattr(executor, "compile_plan", refuse)
    monkeypatch.setattr(engine.executor, "_bind", refuse)
    rng = random.Random(sequences)
    asked = [(prompt, PLAIN) for prompt, _ in requests(rng, 60)]
    run_at_random(engine, asked, rng)
    engine.executor.close()
