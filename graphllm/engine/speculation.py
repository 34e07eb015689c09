"""Speculative decoding: draft tokens are computed behind the last token of a sequence.

A draft token counts as accepted if it is the token that is sampled at its position. The noise of
sampling is a function of the position, so the answer is that of decoding without drafts, whatever
the temperature (`graphllm.ops.sampling`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from .generation import Generation
from .prompt_lookup import PromptLookup
from .sampling_feeds import Row
from .scheduler import Scheduler
from .sequence import Chunk
from .step_times import StepTimes

_LEAST_GAIN = 1.03  # expected gain below which no draft is computed
_LEAST_RATE = 0.1  # probability of a draft's acceptance below which it is not computed


class Drafter(Protocol):
    """Predicts the next tokens of requests."""

    def rates(self, row: Generation, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... predictions of a request all come true.

        At most ``count``; empty if there is no prediction.
        """

    def predict(self, rows: Sequence[Generation], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the next ``counts`` tokens of each request, or fewer."""

    def seconds(self, count: int) -> float:
        """Return the expected seconds of a prediction of at most ``count`` tokens a request."""

    def doubt(self) -> None:
        """Shorten these; see `StepTimes.doubt`."""

    def note_outcome(self, drafts: int, accepted: int) -> None:
        """Note how many of the drafts of a request were accepted."""


class LookUp:
    """Prompt look-up; see `Drafter`. It takes no time, and counts the outcomes by itself."""

    def rates(self, row: Generation, count: int) -> list[float]:
        return _lookup(row).rates(count)

    def predict(self, rows: Sequence[Generation], counts: Sequence[int]) -> list[tuple[int, ...]]:
        return [_lookup(row).predict(count) for row, count in zip(rows, counts)]

    def seconds(self, count: int) -> float:
        return 0.0

    def doubt(self) -> None:
        pass

    def note_outcome(self, drafts: int, accepted: int) -> None:
        pass


class Speculation:
    """Chooses the draft tokens of each decode step.

    With a fixed number, each sequence with a prediction gets that many. Otherwise the number is the
    one with the most expected tokens per second, often none, from the measured times of steps and
    the rates at which predictions came true.

    Args:
        scheduler: reserves the blocks of draft tokens.
        rows: maximum number of rows of a step: sequences and draft tokens.
        fixed: draft tokens of each sequence; 0 chooses their number.
        drafter: predicts them; None for prompt look-up.

    Attributes:
        predicting_s: seconds in which the draft tokens of the current step were predicted.
    """

    def __init__(
        self, scheduler: Scheduler, rows: int, fixed: int = 0, drafter: Drafter | None = None
    ) -> None:
        self._scheduler, self._rows, self._fixed = scheduler, rows, fixed
        self._drafter = drafter or LookUp()
        self._times = StepTimes()
        self.predicting_s = 0.0

    def extend(self, chunks: Sequence[Chunk], rows: Sequence[Row]) -> list[Chunk]:
        """Return the chunks of a decode step with draft tokens, for which blocks are reserved."""
        found, places = [*chunks], list[int]()
        asked, counts = list[Generation](), list[int]()
        for place, (row, count) in enumerate(zip(rows, self.choose(chunks, rows))):
            if count and self._scheduler.extend(chunks[place], count):
                assert isinstance(row, Generation)
                places.append(place)
                asked.append(row)
                counts.append(count)
        began = time.perf_counter()
        drafts = self._drafter.predict(asked, counts) if asked else []
        self.predicting_s = time.perf_counter() - began
        for place, row, own in zip(places, asked, drafts):
            found[place] = chunks[place]._replace(drafts=own)
            row.drafted += len(own)
        return found

    def choose(self, chunks: Sequence[Chunk], rows: Sequence[Row]) -> list[int]:
        """Return the number of draft tokens of each sequence of a decode step."""
        room = self._rows - len(rows)
        if any(row.processors or row.asks_candidates for row in rows):
            room = 0  # the host chooses tokens of this step
        context = self._scheduler.context
        most = [_most_drafts(row, chunk, room, context) for chunk, row in zip(chunks, rows)]
        rates = [
            self._drafter.rates(row, n) if n and isinstance(row, Generation) else []
            for row, n in zip(rows, most)
        ]
        if self._fixed:
            return [min(self._fixed, room // len(rows), len(each)) for each in rates]
        return self._most_profitable(rates, room, self._times, self._times.plain(len(rows)))

    def choose_ahead(self, row: Generation, ahead: int, room: int, times: StepTimes) -> int:
        """Return the number of draft tokens of a step that is launched ahead.

        Args:
            row: the request.
            ahead: rows of the steps in flight, whose drafts count as accepted.
            room: maximum number of draft tokens.
            times: expected times of the steps.
        """
        return self.choose_of(_lookup(row).rates(ahead + room)[ahead:] if room else [], times)

    def choose_of(self, rates: Sequence[float], times: StepTimes) -> int:
        """Return the number of draft tokens of a step, of which the first ones are accepted.

        Args:
            rates: probabilities that the first 1, 2, ... drafts are accepted.
            times: expected times of the steps.
        """
        if self._fixed:
            return min(self._fixed, len(rates))
        return self._most_profitable([rates], len(rates), times, times.expected(1))[0]

    def predict(self, row: Generation, count: int) -> tuple[int, ...]:
        """Return the next ``count`` tokens of a request that has a prediction."""
        return self._drafter.predict([row], [count])[0]

    def _most_profitable(
        self, rates: Sequence[Sequence[float]], room: int, times: StepTimes, plain: float
    ) -> list[int]:
        """Return the numbers of draft tokens with the most expected tokens per second.

        Args:
            rates: probabilities that the drafts of each sequence are accepted, descending.
            room: maximum number of draft tokens.
            times: expected times of steps.
            plain: expected seconds of the step without drafts; 0: unknown.
        """
        counts, sequences = [0] * len(rates), len(rates)
        ordered = [
            (rate, -depth, s)
            for s, each in enumerate(rates)
            for depth, rate in enumerate(each, 1)
            if rate > _LEAST_RATE
        ]
        ordered = sorted(ordered, reverse=True)[:room]
        if not ordered:
            return counts
        tokens, least, chosen = float(sequences), plain / sequences, 0
        least, longest = least / _LEAST_GAIN, 0
        expected = times.with_drafts(range(sequences + 1, sequences + len(ordered) + 1))
        for number, ((rate, depth, _), seconds) in enumerate(zip(ordered, expected), 1):
            tokens, longest = tokens + rate, max(longest, -depth)
            seconds += self._drafter.seconds(longest)
            if seconds / tokens < least:
                least, chosen = seconds / tokens, number
        if not chosen:
            times.doubt()
            self._drafter.doubt()
        for _, _, sequence in ordered[:chosen]:
            counts[sequence] += 1
        return counts

    def accept(
        self, chunks: Sequence[Chunk], sampled: Sequence[int]
    ) -> tuple[list[Chunk], list[int]]:
        """Append the accepted draft tokens to their sequences.

        Args:
            chunks: the step.
            sampled: the ids that its rows sampled.

        Returns:
            The chunks with the accepted drafts only, and the rows that are left.
        """
        found, kept, first = list[Chunk](), list[int](), 0
        for sequence, start, stop, samples, drafts in chunks:
            count, most = 0, len(drafts)
            while count < most and drafts[count] == sampled[first + count]:
                count += 1
            kept += range(first, first + count + 1)
            first += most + 1
            if most:
                self._drafter.note_outcome(most, count)
            sequence.tokens += drafts[:count]
            found.append(Chunk(sequence, start, stop + count, samples, drafts[:count]))
        return found, kept

    def note_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Note the time of a decode step, from its start before `extend` on."""
        drafts = sum(len(chunk.drafts) for chunk in chunks)
        self._times.note(len(chunks) + drafts, drafts > 0, seconds - self.predicting_s)
        self.predicting_s = 0.0


def _lookup(row: Row) -> PromptLookup:
    """Return the predictions for a request, up to date."""
    assert isinstance(row, Generation)
    if row.lookup is None:
        row.lookup = PromptLookup(row.sequence.tokens)
    row.lookup.update()
    return row.lookup


def may_have_drafts(row: Row) -> bool:
    """Whether draft tokens of a request may be computed.

    A grammar would have to consume them first, a source is no text that an answer repeats, and the
    first token after a prompt reports the end of the prefill.
    """
    if not isinstance(row, Generation) or not row.speculates or not row.count:
        return False
    return row.grammar is None and not row.sequence.source


def _most_drafts(row: Row, chunk: Chunk, room: int, context: int) -> int:
    """Return how many draft tokens of a request a step can compute; ``room``: of all requests."""
    if not may_have_drafts(row):
        return 0
    return max(0, min(room, row.sampling.max_tokens - row.count - 1, context - chunk.stop))
