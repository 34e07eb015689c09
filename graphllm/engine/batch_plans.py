"""The plans of steps of any number of sequences, which are bound before a server starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..compiler.plan import Plan

if TYPE_CHECKING:
    from .engine import Engine


def bind_batch_plans(engine: Engine, progress: Callable[[str, int, int], None]) -> None:
    """Bind the plans that batches of requests with plain settings need.

    The first step that needs a plan would otherwise compile and bind it, which takes some
    hundredths of a second, in which all requests wait. Not bound: plans of requests that ask for
    log-probabilities, biases, penalties, filters or a grammar.

    Args:
        engine: the engine, after `Engine.prepare`. The caller holds its lock.
        progress: called with "preparing batches", plans that are bound, and their number.
    """
    plans = [*dict.fromkeys(_batch_plans(engine))]
    for done, plan in enumerate(plans):
        progress("preparing batches", done, len(plans))
        engine.executor.bind(plan)


def _batch_plans(engine: Engine) -> Iterator[Plan]:
    """Yield the plans of one sequence, and of all powers of two up to the largest batch.

    Steps decode; compute prompts to their ends, with or without sequences that do not sample; or
    compute parts of prompts.
    """
    runner, limits, count = engine.batcher.runner, engine.limits, 1
    while True:
        size = runner.bucket(count)
        yield engine.decode_plan(size)
        for tokens in (limits.plan_tokens(1), limits.tokens):
            yield runner.plan(["ids"], tokens, size, size)
            if size > 1:
                yield runner.plan(["sampled"], tokens, size, size)
            yield runner.plan(runner.pools, tokens, size)
        if runner.encodes:
            yield runner.encode_plan(size)
        if count >= limits.sequences:
            return
        count *= 2
