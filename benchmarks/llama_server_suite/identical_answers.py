"""Tests of what those of llama.cpp's server leave out, run by run.py with its models.

That project skips its test of cached against uncached prompts, and has comments in the place of
those of parallel slots and of batch sizes at a temperature above 0: answers depend on them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import utils

PROMPTS = (
    "Write a very long book.",
    "Write another a poem.",
    "What is LLM?",
    "The sky is blue and I love it.",
    "Write another very long music lyrics.",
    "Write a very long joke.",
)


@pytest.fixture
def server() -> Iterator[Any]:
    """A server that has not started, to be configured."""
    made = utils.ServerPreset.tinyllama2()
    yield made
    made.stop()


def answer(server: Any, prompt: str, **more: Any) -> dict[str, Any]:
    """Return the answer to a prompt."""
    ask = {"prompt": prompt, "seed": 42, "n_predict": 48, "return_tokens": True, **more}
    found = server.make_request("POST", "/completion", data=ask)
    assert found.status_code == 200, found.body
    return found.body


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_and_uncached_prompts(server: Any, slots: int, temperature: float) -> None:
    """The same tokens from a prompt whose beginning, or all of it, is in the cache."""
    server.n_slots = slots
    server.start()
    long = " ".join(PROMPTS)
    fresh = answer(server, long, temperature=temperature)
    assert fresh["timings"]["cache_n"] == 0
    for more in ({}, {"cache_prompt": True}, {"cache_prompt": False}):
        again = answer(server, long, temperature=temperature, **more)
        assert again["timings"]["cache_n"] > 0
        assert again["tokens"] == fresh["tokens"]
    longer = [answer(server, long + " And?", temperature=temperature) for _ in range(2)]
    assert longer[0]["tokens"] == longer[1]["tokens"]


@pytest.mark.parametrize("slots, count", [(1, 3), (2, 2), (2, 4), (4, 2), (4, 6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parallel_slots(server: Any, slots: int, count: int, temperature: float) -> None:
    """The tokens of each prompt are those that it gets alone, cached or not."""
    server.n_slots = slots
    server.start()
    prompts = PROMPTS[:count]
    calls = [(lambda own: answer(server, own, temperature=temperature), (p,)) for p in prompts]
    fresh = utils.parallel_function_calls(calls)
    alone = [answer(server, own, temperature=temperature) for own in prompts]
    cached = utils.parallel_function_calls(calls)
    for found in zip(fresh, alone, cached):
        assert found[0]["tokens"] == found[1]["tokens"] == found[2]["tokens"]
        assert len(found[0]["content"]) > 10
    assert len({tuple(each["tokens"]) for each in alone}) == count
