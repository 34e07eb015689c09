"""Requests of measurements: many prompts at once, which no token ends early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import GraphError

if TYPE_CHECKING:
    from ..engine.batcher import Recorders
    from ..engine.engine import Engine
    from ..engine.generation import Generation
    from ..engine.request import Sampling


@contextmanager
def submitted(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int
) -> Iterator[list[Generation]]:
    """Begin a request for each prompt; request i has the seed ``sampling.seed + i``.

    Requests that have not ended are cancelled at the end, also after an error or an interrupt. The
    caller holds the lock.
    """
    found: list[Generation] = []
    first = sampling.seed or 0
    with cancelled_at_end(engine, found):
        for index, ids in enumerate(prompts):
            own = replace(sampling, seed=first + index, max_tokens=max_tokens)
            found.append(engine.submit(ids, own, (), ()))
        yield found


@contextmanager
def cancelled_at_end(engine: Engine, generations: Iterable[Generation]) -> Iterator[None]:
    """Cancel ``generations``, which are read at the end only; they release their blocks."""
    try:
        yield
    finally:
        for each in generations:
            engine.cancel(each)
        engine.settle()


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
