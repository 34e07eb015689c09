"""Requests of measurements: many prompts at once, which no token ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import GraphError

if TYPE_CHECKING:
    from ..engine.batcher import Recorders
    from ..engine.engine import Engine
    from ..engine.generation import Generation
    from ..engine.request import Sampling


def submit_all(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int
) -> list[Generation]:
    """Begin a request for each prompt; request i has the seed ``sampling.seed + i``."""
    first, found = sampling.seed or 0, []
    for index, ids in enumerate(prompts):
        own = replace(sampling, seed=first + index, max_tokens=max_tokens)
        found.append(engine.submit(ids, own, (), ()))
    return found


def run_step(
    engine: Engine, generations: Sequence[Generation], recorders: Recorders | None = None
) -> None:
    """Run a step. Raise the error of a request that it ended, such as NumericError.

    The caller holds the lock.
    """
    more = engine.step(recorders)
    for each in generations:
        if each.error is not None:
            raise each.error
        if each.fault is not None:
            raise each.fault
    if not more:
        raise GraphError("a request waits, but there is nothing to compute")


def finish(engine: Engine, generations: Sequence[Generation]) -> None:
    """Run steps until the requests have ended. For the errors see `run_step`."""
    while not all(each.done for each in generations):
        run_step(engine, generations)
