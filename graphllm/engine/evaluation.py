"""Evaluation of one sequence without sampling: logits, traces and checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from ..compiler.plan import Plan
from ..errors import RequestError
from ..model.batch import source_length
from .forward_feeds import Feeds, Span, forward_feeds
from .program import Program
from .runner import Runner


class Evaluation:
    """Computes one sequence in steps, beginning with an empty cache.

    Its keys and values are not offered to later requests, since a caller may have patched values.
    Made by `Engine.evaluation`.
    """

    def __init__(
        self,
        runner: Runner,
        first: Sequence[int],
        prefix: int,
        vocab: int,
        make_room: Callable[[], None],
    ) -> None:
        """Begin with no token.

        Args:
            runner: runner of the engine.
            prefix: length of the sequence's bidirectional prefix.
            vocab: size of the vocabulary.
            make_room: called if the pools have not enough free blocks.
        """
        self._runner, self._prefix, self._vocab = runner, prefix, vocab
        self._make_room = make_room
        self._blocks = runner.manager.begin(first)
        self._blocks.private = True
        self._tokens: list[int] = []  # computed so far

    def release(self) -> None:
        """Give up the blocks."""
        self._runner.manager.release(self._blocks)

    def _feeds(self, tokens: Sequence[int], rows: np.ndarray) -> tuple[Feeds, dict[str, int]]:
        """As `forward_feeds`, for a step that appends ``tokens``."""
        start, stop = len(self._tokens), len(self._tokens) + len(tokens)
        if stop < self._prefix:
            raise RequestError(
                f"the first {self._prefix} tokens of the prompt are a bidirectional prefix, which "
                f"must be computed in one step; this step has {len(tokens)} tokens"
            )
        manager, last = self._runner.manager, min(stop + 1, self._runner.limits.context)
        if not manager.reserve(self._blocks, start, last):
            self._make_room()
            if not manager.reserve(self._blocks, start, last):
                raise RequestError(f"the KV cache is full: {stop} tokens do not fit")
        return forward_feeds(manager, [Span(tokens, start, self._prefix, self._blocks)], rows)

    def append(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Append ``tokens`` in one step of ``plan`` and return the outputs ``fetch``.

        ``rows``: indices of the tokens whose logits are computed.
        """
        out = self._run(plan, tokens, rows, fetch)
        self._append(tokens)
        return out

    def _append(self, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` were computed."""
        self._tokens += tokens
        self._runner.manager.commit(self._blocks, self._tokens)

    def _run(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        return self._runner.executor.run(plan, *self._feeds(tokens, rows), fetch=fetch)

    @property
    def whole(self) -> int:
        """Number of first tokens that one step must compute: those of a bidirectional prefix."""
        return self._prefix

    def encode(self, source: Sequence[int]) -> None:
        """Append a source, whose tokens have no logits."""
        self._runner.encode([self._source(source)])
        self._append(source)

    def append_source(
        self, plan: Plan, source: Sequence[int], fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Append a source by a plan that encodes it, and return the outputs ``fetch``."""
        feeds, env = self._runner.encode_feeds([self._source(source)])
        out = self._runner.executor.run(plan, feeds, env, fetch=fetch)
        self._append(source)
        return out

    def _source(self, source: Sequence[int]) -> Span:
        self._feeds(source, np.zeros(1))  # reserves its blocks
        return Span(source, 0, self._prefix, self._blocks)

    def logits(self, tokens: Sequence[int], last: bool = False) -> Iterator[np.ndarray]:
        """Yield logits [rows, vocab] of successive chunks of ``tokens``, or of the last token.

        Tokens of a source have none.
        """
        size, at = self._runner.limits.tokens if last else self._rows, source_length(tokens)
        if at:
            self.encode(tokens[:at])
        while at < len(tokens):
            chunk = tokens[at : max(at + size, self._prefix)]
            at += len(chunk)
            logits = self.step_logits(chunk, last)
            if not last or at == len(tokens):
                yield logits

    @property
    def _rows(self) -> int:
        """Maximum number of rows of logits that one step computes."""
        return self._runner.limits.logits_rows(self._vocab)

    def step_logits(self, tokens: Sequence[int], last: bool = False) -> np.ndarray:
        """Append ``tokens`` in one step and return logits [rows, vocab].

        ``last``: return the logits of the last token only. A step with more tokens than
        `MAX_LOGITS_BYTES` allows rows of logits (a long bidirectional prefix) is run several times.
        """
        rows = np.array([len(tokens) - 1]) if last else np.arange(len(tokens))
        most = 1 if last else self._rows
        wide = last or len(tokens) > most
        outputs = self._runner.logits_outputs
        plan = self._runner.plan(outputs, self._runner.limits.tokens if wide else most, 1, most)
        parts = [rows[at : at + most] for at in range(0, len(rows), most)]
        logits = [self._run(plan, tokens, part, ("logits",))["logits"] for part in parts]
        self._append(tokens)
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def programs(self, tokens: Sequence[int]) -> Iterator[Program]:
        """Yield the programs that compute all of ``tokens`` and the logits; none is run.

        The second program of an encoder-decoder reads the KV pools that the first one has written.

        Raises:
            RequestError: ``tokens`` does not fit one step.
        """
        if at := source_length(tokens):
            feeds, env = self._runner.encode_feeds([self._source(tokens[:at])])
            bounds = {"T": (1, at), "Q": (2, 2)}
            yield Program(self._runner.encoded, bounds, feeds, env | {"T": at, "Q": 2})
            self._append(tokens[:at])
        runner, rest = self._runner, tokens[at:]
        count, most = len(rest), min(runner.limits.tokens, self._rows)
        if count > most:
            raise RequestError(f"{count} tokens: one step takes 1 to {most}")
        bounds = {"T": (1, count), "S": (1, 1), "Q": (2, 2), "N": (1, count)}
        feeds, env = self._feeds(rest, np.arange(count))
        outputs = {name: runner.outputs[name] for name in runner.logits_outputs}
        yield Program(outputs, bounds, feeds, env | {"T": count, "S": 1, "Q": 2, "N": count})
