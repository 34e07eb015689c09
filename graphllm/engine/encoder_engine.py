"""`EncoderEngine`: runs batches of an encoder, and evaluates single sequences for observers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..compiler.plan import Plan
from ..errors import RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import record_scope_values
from ..graph.tensor import Tensor
from ..model.encoder import Encoder, EncoderBatch
from ..runtime.executor import Executor
from ..runtime.recorder import Recorder
from .packing import batch_feeds
from .program import Program

HEAD_ROWS = 64  # that a head computes at once, since a row of a vocabulary's logits is long


@dataclass(frozen=True)
class EncoderLimits:
    """``tokens``: maximum number of tokens of a batch, and so of a sequence."""

    tokens: int


class EncoderEngine:
    """Runs an encoder. The caller sees to it that one call runs at a time.

    Attributes:
        executor: executor of the placed graph.
        outputs: outputs of the graph by name.
        scope_values: values of the encoder's scopes, its head excepted.
        limits: limits of the graph.
        recorder: recorder of all runs; None runs them without recording.
    """

    def __init__(self, encoder: Encoder, executor: Executor, tokens: int) -> None:
        """Build and place the graph; ``tokens``: maximum number of tokens of a batch."""
        self._first_position = encoder.cfg.position_offset
        batch = EncoderBatch(tokens, tokens, HEAD_ROWS)
        self._place(executor, tokens, lambda: encoder.build(batch))

    def _place(
        self, executor: Executor, tokens: int, build: Callable[[], dict[str, Tensor]]
    ) -> None:
        self.executor, self.limits = executor, EncoderLimits(tokens)
        with record_scope_values() as values:
            self.outputs = build()
        used = set(toposort([self.outputs["hidden"]]))
        self.scope_values = {scope: node for scope, node in values.items() if node in used}
        self.recorder: Recorder | None = None
        executor.place_model(self.outputs)

    def plans(self) -> dict[str, Plan]:
        """Return the plan of each output."""
        return {n: self.executor.compile({n: node}) for n, node in self.outputs.items()}

    def prepare(self) -> None:
        """Bind all plans: pack their weights and compile their kernels."""
        for plan in self.plans().values():
            self.executor.bind(plan)

    def hidden(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """Return the hidden states [tokens, dim] of each sequence of a batch.

        Args:
            sequences: token ids of each sequence.
            types: token types of each sequence; zeros by default.
        """
        feeds = batch_feeds(sequences, self._first_position, types)
        env = {"kv_sum": sum(len(ids) ** 2 for ids in sequences)}
        hidden = self._run("hidden", feeds, env)
        return np.split(hidden, feeds["q_start"][1:-1])

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the head's logits [R, labels] for hidden states [R, dim]."""
        starts = range(0, len(rows), HEAD_ROWS)
        parts = [self._run("logits", {"rows": rows[at : at + HEAD_ROWS]}, {}) for at in starts]
        none = np.zeros((0, self.outputs["logits"].meta.inner[0]), np.float32)
        return np.concatenate([none, *parts])

    def _run(self, name: str, feeds: dict[str, np.ndarray], env: dict[str, int]) -> np.ndarray:
        plan = self.executor.compile({name: self.outputs[name]})
        return self.executor.run(plan, feeds, env, self.recorder)[name]

    @contextmanager
    def evaluation(self, tokens: Sequence[int]) -> Iterator[EncoderEvaluation]:
        """Evaluate one sequence. RequestError: it is empty or too long."""
        if not 0 < len(tokens) <= self.limits.tokens:
            raise RequestError(f"{len(tokens)} tokens: the encoder takes 1 to {self.limits.tokens}")
        yield EncoderEvaluation(self, self._first_position, tokens)


class EncoderEvaluation:
    """Evaluates one sequence, as `engine.evaluation.Evaluation` does for decoders.

    Attributes:
        whole: number of tokens that one step must compute: all.
    """

    def __init__(self, engine: EncoderEngine, first_position: int, tokens: Sequence[int]) -> None:
        self._engine, self.whole = engine, len(tokens)
        self._feeds = batch_feeds([tokens], first_position)

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
