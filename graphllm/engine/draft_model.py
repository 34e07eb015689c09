"""Draft tokens from a second, smaller model.

Leviathan et al. 2023, Chen et al. 2023. The draft model samples with the seed, the positions and
the settings of the request, so the noise of each token is that of the model itself: where both
have similar distributions, they mostly sample the same token, at any temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from ..errors import GraphError
from .engine import Engine
from .generation import Generation
from .sequence import ActiveSequence

_INITIAL_RATE = 0.7  # probability that a draft is accepted if those before it were
_WEIGHT = 1 / 16  # of the last outcome, or of the last time, in a mean
_DOUBT = 0.995  # see `DraftModel.doubt`


class DraftModel:
    """Predictions of a draft model; see `speculation.Drafter`.

    Each prediction is a request of the draft model's engine that continues the tokens of a request.
    Their common beginning is found in its KV cache, so a prediction computes the tokens since the
    last full block at most, and those predicted.

    Args:
        engine: engine of the draft model, which serves no other requests.
        most: maximum number of draft tokens of a sequence.
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine = engine
        self._rates = [_INITIAL_RATE] * most  # by position, given that those before were accepted
        self._seconds = 0.0  # mean time of a prediction per token of its longest sequence

    def rates(self, row: Generation, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... drafts of a request are all accepted.

        At most ``count``, and as many as fit the context of the draft model.
        """
        room = self._engine.limits.context - len(row.sequence.tokens)
        return list(accumulate(self._rates[: max(0, min(count, room))], mul))

    def seconds(self, count: int) -> float:
        """Return the expected seconds of a prediction of at most ``count`` tokens a sequence."""
        return self._seconds * count

    def doubt(self) -> None:
        """Shorten the expected time, which was too long to predict; see `StepTimes.doubt`."""
        self._seconds *= _DOUBT

    def predict(self, rows: Sequence[Generation], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the next ``counts`` tokens of each request.

        A request for which the draft model fails, as with logits that are not finite, gets none and
        goes on without draft tokens; its `Generation.note` says so.
        """
        began, engine = time.perf_counter(), self._engine
        asked = [_continued(row, count) for row, count in zip(rows, counts)]
        try:
            for each in asked:
                engine.batcher.submit(each)
            while not all(each.done for each in asked):
                if not engine.step():
                    raise GraphError("the draft model has nothing to compute")
        finally:
            for each in asked:
                if not each.done:
                    engine.cancel(each)
        for row, each in zip(rows, asked):
            if error := each.fault or each.error:
                row.speculates, row.note = False, f"no more draft tokens: {error}"
        if all(each.prefill_tokens <= engine.limits.block for each in asked):  # no new prompt
            self._note_time((time.perf_counter() - began) / max(counts))
        return [
            tuple(each.sequence.tokens[len(row.sequence.tokens) :]) if row.speculates else ()
            for each, row in zip(asked, rows)
        ]

    def _note_time(self, seconds: float) -> None:
        if self._seconds:  # other programs may hold it up
            seconds = min(seconds, 2 * self._seconds)
        self._seconds += (seconds - self._seconds) * (_WEIGHT if self._seconds else 1)

    def note_outcome(self, drafts: int, accepted: int) -> None:
        """Note how many of the drafts of a sequence were accepted."""
        for at in range(min(drafts, accepted + 1)):
            self._rates[at] += ((at < accepted) - self._rates[at]) * _WEIGHT


def _continued(row: Generation, count: int) -> Generation:
    """Return a request for the next ``count`` tokens of ``row``, with its noise and settings."""
    own = row.sequence
    sequence = ActiveSequence([*own.tokens], own.prompt_tokens, prefix=own.prefix)
    sampling = replace(
        row.sampling.unlimited(), max_tokens=row.count + count, logprobs=None, prompt_logprobs=None,
        forced_ids=(), forced_eos_id=None,
    )  # fmt: skip
    context = len(own.tokens) + count
    found = Generation(sequence, sampling, row.settings, (), None, context)
    found.count = row.count
    return found
