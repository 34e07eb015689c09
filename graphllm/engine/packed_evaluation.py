"""Evaluation of many sequences in packed steps: how likely their tokens are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from .forward_feeds import Span, forward_feeds
from .prompt_logprobs import LOGITS, LOGPROBS
from .runner import Runner


@dataclass(frozen=True)
class Passage:
    """A sequence, and the tokens of it that a model has to predict.

    Attributes:
        ids: token ids.
        first: index of the first token to predict, at least 1; the last one is the last token.
    """

    ids: Sequence[int]
    first: int


# Index of the passage, index of the first token to predict, and a row of values for each token.
Rows = tuple[int, int, np.ndarray]


class PackedEvaluation:
    """Computes many sequences, several of them in a step where they are short enough.

    Values of a passage do not depend on the other passages of a step (on CUDA, with
    ``deterministic``): its steps end at fixed positions, and its rows of logits are computed apart
    from theirs. The last token of a passage is not computed, since nothing follows it. Keys and
    values are not offered to later requests. Made by `Engine.packed_evaluation`.

    Args:
        runner: runner of the engine.
        prefix: returns the length of a sequence's bidirectional prefix.
        make_room: called if the pools have not enough free blocks.
    """

    def __init__(
        self,
        runner: Runner,
        prefix: Callable[[Sequence[int]], int],
        make_room: Callable[[], None],
    ) -> None:
        self._runner, self._prefix, self._make_room = runner, prefix, make_room

    def logprobs(self, passages: Sequence[Passage]) -> Generator[Rows, None, None]:
        """Yield log-probabilities f32 [n] of the tokens to predict, in the order of the passages.

        NaN where the logits are not finite. RequestError: a passage does not fit the context, or
        has a bidirectional prefix.
        """
        for index, first, values in self._rows(passages, LOGPROBS):
            yield index, first, values[:, 0]

    def logits(self, passages: Sequence[Passage]) -> Generator[Rows, None, None]:
        """Yield logits f32 [n, vocab] before the tokens to predict, at most 64 MB at a time.

        RequestError: as for `logprobs`.
        """
        yield from self._rows(passages, LOGITS)

    def _rows(self, passages: Sequence[Passage], output: str) -> Iterator[Rows]:
        """Compute ``output``, one of those of `prompt_outputs`, from the hidden states."""
        executor = self._runner.executor
        plan = executor.compile({output: self._runner.outputs[output]})
        most, feeds_ids = plan.vars["P"].hi, output == LOGPROBS
        for index, first, hidden in self._hidden(passages):
            for at in range(0, len(hidden), most):
                own = hidden[at : at + most]
                feeds = {"prompt.hidden": own}
                if feeds_ids:
                    ids = passages[index].ids[first + at : first + at + len(own)]
                    feeds["prompt.ids"] = np.array(ids, np.int32)[:, None]
                yield index, first + at, executor.run(plan, feeds)[output]

    def _hidden(self, passages: Sequence[Passage]) -> Iterator[Rows]:
        """Yield hidden states f32 [n, width] of the tokens before those to predict."""
        for passage in passages:
            self._check(passage)
        for indices in self._groups(passages):
            group = [passages[index] for index in indices]
            for found in self._run(group):
                yield from ((indices[number], first, rows) for number, first, rows in found)

    def _check(self, passage: Passage) -> None:
        count, context = len(passage.ids), self._runner.limits.context
        if not 1 <= passage.first < count:
            raise RequestError(f"{count} tokens: none at or after index {passage.first}")
        if count > context:
            raise RequestError(f"{count} tokens do not fit a context of {context}", "context")
        if prefix := self._prefix(passage.ids):
            raise RequestError(
                f"the first {prefix} tokens attend to later ones, so they have no log-probabilities"
            )

    def _groups(self, passages: Sequence[Passage]) -> Iterator[list[int]]:
        """Yield the indices of passages that are computed together.

        They fit one step, and the KV pools. A passage that takes several steps is alone.
        """
        limits, group, tokens, blocks = self._runner.limits, list[int](), 0, 0
        for index, passage in enumerate(passages):
            own = len(passage.ids) - 1
            own_blocks = -(-own // limits.block)
            fits = (
                len(group) < limits.sequences
                and tokens + own <= limits.tokens
                and blocks + own_blocks <= limits.pool_blocks(0)
            )
            if group and not fits:
                yield group
                group, tokens, blocks = [], 0, 0
            group.append(index)
            tokens, blocks = tokens + own, blocks + own_blocks
        if group:
            yield group

    def _run(self, group: Sequence[Passage]) -> Iterator[list[Rows]]:
        """Compute passages, and yield what each step gives."""
        manager, step = self._runner.manager, self._runner.limits.tokens
        computed = [passage.ids[:-1] for passage in group]
        blocks = [manager.begin(ids[:1]) for ids in computed]
        try:
            for each in blocks:
                each.private = True
            for start in range(0, max(map(len, computed)), step):
                parts = [ids[start : start + step] for ids in computed]
                hidden = self._step([Span(part, start, 0, own) for part, own in zip(parts, blocks)])
                yield _predictions(group, parts, start, hidden)
                for ids, own, part in zip(computed, blocks, parts):
                    manager.commit(own, ids[: start + len(part)])
        finally:
            for each in blocks:
                manager.release(each)

    def _step(self, spans: Sequence[Span]) -> np.ndarray:
        """Compute one step and return its hidden states f32 [T, width]."""
        runner = self._runner
        if not self._reserve(spans):
            self._make_room()
            if not self._reserve(spans):
                count = sum(len(span.tokens) for span in spans)
                raise RequestError(f"the KV cache is full: {count} more tokens do not fit")
        size = runner.bucket(len(spans))
        plan = runner.plan([*runner.pools, "hidden"], runner.limits.tokens, size, 1)
        feeds, env = forward_feeds(runner.manager, spans, rows=np.zeros(1))
        return runner.executor.run(plan, feeds, env, fetch=("hidden",))["hidden"]

    def _reserve(self, spans: Sequence[Span]) -> bool:
        return all(self._runner.manager.reserve(s.blocks, s.start, s.stop) for s in spans)


def _predictions(
    group: Sequence[Passage], parts: Sequence[Sequence[int]], start: int, hidden: np.ndarray
) -> list[Rows]:
    """Return the rows of ``hidden`` from which tokens of each passage are predicted.

    Args:
        group: the passages of the step.
        parts: the tokens of each that the step computed.
        start: position of the first of these tokens.
        hidden: hidden states of all of them.
    """
    found, end = list[Rows](), 0
    for index, (passage, part) in enumerate(zip(group, parts)):
        begin, end = end, end + len(part)
        skipped = max(0, passage.first - 1 - start)
        if skipped < len(part):
            found.append((index, start + skipped + 1, hidden[begin + skipped : end]))
    return found
