"""`EncoderEngine`: runs batches of an encoder, and evaluates single sequences for observers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .. import ops
from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import record_scope_values
from ..graph.tensor import Tensor
from ..model.encoder import Encoder, EncoderBatch
from ..ops.pooling import POOLINGS
from ..runtime.executor import Executor
from ..runtime.recorder import Recorder
from .batch_runner import BatchRunner, batch_tokens, on_host
from .pooling import pool
from .program import Program

HEAD_ROWS = 64  # that a head computes at once, since a row of a vocabulary's logits is long


@dataclass(frozen=True)
class EncoderLimits:
    """``tokens``: maximum number of tokens of a batch, and so of a sequence."""

    tokens: int


class EncoderEngine:
    """Runs an encoder. The caller sees to it that one call runs at a time.

    A GPU pools hidden states itself, which saves most of the copies to the host.

    Attributes:
        executor: executor of the placed graph.
        outputs: outputs of the graph by name.
        scope_values: values of the encoder's scopes, its head excepted.
        limits: limits of the graph.
        recorder: recorder of all runs; None runs them without recording.
    """

    def __init__(self, encoder: Encoder, executor: Executor, max_length: int) -> None:
        """Build and place the graph; ``max_length``: maximum number of tokens of a sequence."""
        tokens = batch_tokens(executor, max_length)
        batch = EncoderBatch(tokens, tokens, HEAD_ROWS)
        pooled_by = None if on_host(executor) else batch.q_start
        self._place(executor, tokens, lambda: encoder.build(batch), pooled_by)
        outputs = self.outputs | self._pooled
        self._runner = BatchRunner(executor, outputs, tokens, encoder.cfg.position_offset)

    def _place(
        self,
        executor: Executor,
        tokens: int,
        build: Callable[[], dict[str, Tensor]],
        pooled_by: Tensor | None = None,
    ) -> None:
        """Build and place the graph.

        Args:
            executor: runs it.
            tokens: maximum number of tokens of a batch.
            build: returns its outputs.
            pooled_by: starts of the sequences, to pool in the graph; None pools on the host.
        """
        self.executor, self.limits = executor, EncoderLimits(tokens)
        with record_scope_values() as values:
            self.outputs = build()
        used = set(toposort([self.outputs["hidden"]]))
        self.scope_values = {scope: node for scope, node in values.items() if node in used}
        self.recorder: Recorder | None = None
        self._pooled: dict[str, Tensor] = {}
        if pooled_by is not None:
            hidden = self.outputs["hidden"]
            self._pooled = {f"pooled.{n}": ops.pool(hidden, pooled_by, kind=n) for n in POOLINGS}
        executor.place_model(self.outputs | self._pooled)

    def plans(self) -> dict[str, Plan]:
        """Return the plan of each output for the largest batch."""
        return {n: self.executor.compile({n: node}) for n, node in self.outputs.items()}

    def prepare(self) -> None:
        """Bind all plans: pack their weights and compile their kernels."""
        for plan in self.plans().values():
            self.executor.bind(plan)

    def hidden(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """Return the hidden states [tokens, dim] of each sequence of one batch.

        Args:
            sequences: token ids of each sequence, at most ``limits.tokens`` in all.
            types: token types of each sequence; zeros by default.
        """
        return self._hidden(self._runner.feeds(sequences, types))

    def _hidden(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        (hidden,) = self._runner.run(("hidden",), feeds, self.recorder)
        return np.split(hidden, feeds["q_start"][1:-1])

    def hidden_by_batch(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Yield the indices and hidden states of the sequences of each batch.

        Sequences without tokens are left out. Arguments as for `hidden`, of any number of tokens.
        """
        for batch, feeds in self._runner.batches(sequences, types):
            yield batch, self._hidden(feeds)

    def pooled_by_batch(
        self,
        kinds: Sequence[str],
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yield the indices of the sequences of each batch, and their rows [n, len(kinds) * dim].

        Arguments as for `hidden_by_batch`; ``kinds``: see `pooling.pool`.
        """
        if not self._pooled:
            for batch, hidden in self.hidden_by_batch(sequences, types):
                yield batch, np.stack([pool(rows, kinds) for rows in hidden])
            return
        names = [f"pooled.{kind}" for kind in kinds]
        for batch, found in self._runner.run_batches(names, sequences, types, self.recorder):
            yield (
                batch,
                np.concatenate(found, axis=1)[:-1],
            )  # no sequence starts at the last q_start

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the head's logits [R, labels] for hidden states [R, dim]."""
        starts = range(0, len(rows), HEAD_ROWS)
        parts = [self._run("logits", {"rows": rows[at : at + HEAD_ROWS]}, {}) for at in starts]
        none = np.zeros((0, self.outputs["logits"].meta.inner[0]), np.float32)
        return np.concatenate([none, *parts])

    def _run(self, name: str, feeds: dict[str, np.ndarray], env: dict[str, int]) -> np.ndarray:
        """Run the plan of the largest batch."""
        plan = self.executor.compile({name: self.outputs[name]})
        return self.executor.run(plan, feeds, env, self.recorder)[name]

    @contextmanager
    def evaluation(self, tokens: Sequence[int]) -> Iterator[EncoderEvaluation]:
        """Evaluate one sequence. RequestError: it is empty or too long."""
        if not 0 < len(tokens) <= self.limits.tokens:
            raise RequestError(f"{len(tokens)} tokens: the encoder takes 1 to {self.limits.tokens}")
        yield EncoderEvaluation(self, tokens, self._runner.feeds([tokens]))


class EncoderEvaluation:
    """Evaluates one sequence, as `engine.evaluation.Evaluation` does for decoders.

    Attributes:
        whole: number of tokens that one step must compute: all.
    """

    def __init__(
        self, engine: EncoderEngine, tokens: Sequence[int], feeds: dict[str, np.ndarray]
    ) -> None:
        self._engine, self.whole, self._feeds = engine, len(tokens), feeds

    def append(
        self, plan: Plan, tokens: Sequence[int], rows: np.ndarray, fetch: Collection[str]
    ) -> dict[str, np.ndarray]:
        """Run ``plan`` over the sequence and return the outputs ``fetch``."""
        return self._engine.executor.run(plan, self._feeds, {"kv_sum": self.whole**2}, fetch=fetch)

    def programs(self, tokens: Sequence[int]) -> Iterator[Program]:
        """Yield the programs that compute ``tokens``: the encoder, then its head, if it has one.

        The head gets the first hidden states of the sequence.
        """
        count, outputs = self.whole, self._engine.outputs
        env = {"T": count, "Q": 2, "kv_sum": count**2}
        bounds = {"T": (1, count), "Q": (2, 2)}
        yield Program({"hidden": outputs["hidden"]}, bounds, self._feeds, env)
        if "logits" in outputs:
            rows = self._engine.hidden([tokens])[0][:HEAD_ROWS]
            bounds, feeds = {"R": (1, len(rows))}, {"rows": rows}
            yield Program({"logits": outputs["logits"]}, bounds, feeds, {"R": len(rows)})
