"""`BatchRunner`: runs outputs of an encoder over batches of packed sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import numpy as np

from ..compiler.plan import HOST, Plan
from ..graph.tensor import Tensor
from ..runtime.decode_loop import DecodeLoop
from ..runtime.executor import Executor
from ..runtime.recorder import Recorder
from .packing import batch_feeds, pack

HOST_TOKENS = 1024  # of a batch on the CPU, unless a single text may be longer
_GPU_TOKENS = 32768  # of a batch on a GPU, whose products of many tokens are faster
_LEAST_GPU_TOKENS = 64  # of the smallest plan on a GPU


def on_host(executor: Executor) -> bool:
    """Return whether the first usable backend computes in the host's memory."""
    return executor.backends[0].memory == HOST


def batch_tokens(executor: Executor, max_length: int) -> int:
    """Return the maximum number of tokens of a batch.

    Args:
        executor: runs the batches.
        max_length: maximum number of tokens of a sequence.
    """
    return max(HOST_TOKENS if on_host(executor) else _GPU_TOKENS, max_length)


class BatchRunner:
    """Packs sequences into batches and runs them: on the CPU in one plan, on a GPU in buckets."""

    def __init__(
        self, executor: Executor, outputs: Mapping[str, Tensor], tokens: int, first_position: int
    ) -> None:
        """Keep the arguments.

        Args:
            executor: executor of the placed graph.
            outputs: outputs by name, of inputs as those of `model.encoder.EncoderBatch`.
            tokens: maximum number of tokens of a batch.
            first_position: position of the first token of a sequence.
        """
        self._executor, self._outputs, self._tokens = executor, outputs, tokens
        self._first_position, self._on_host = first_position, on_host(executor)

    def feeds(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the inputs of one batch; ``types``: token types, zeros by default."""
        return batch_feeds(sequences, self._first_position, types)

    def batches(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
        """Yield the indices of the sequences of each batch, and its feeds.

        On a GPU, the feeds of a batch are made while the one before it runs.
        """

        def feeds(batch: list[int]) -> dict[str, np.ndarray]:
            own = [types[i] for i in batch] if types is not None else None
            return self.feeds([sequences[i] for i in batch], own)

        batches = [*pack([*map(len, sequences)], self._tokens)]
        if self._on_host or len(batches) < 2:
            yield from ((batch, feeds(batch)) for batch in batches)
            return
        with ThreadPoolExecutor(1) as worker:
            ahead = worker.submit(feeds, batches[0])
            for batch, after in zip_longest(batches, batches[1:]):
                own = ahead.result()
                if after:
                    ahead = worker.submit(feeds, after)
                yield batch, own

    def run(
        self, names: Sequence[str], feeds: dict[str, np.ndarray], recorder: Recorder | None
    ) -> list[np.ndarray]:
        """Run a batch and return the outputs ``names``."""
        plan, env = self._plan(names, feeds)
        found = self._executor.run(plan, feeds, env, recorder)
        return [found[name] for name in names]

    def run_batches(
        self,
        names: Sequence[str],
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None,
        recorder: Recorder | None,
    ) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Yield the indices of the sequences of each batch, and its outputs ``names``.

        A batch is launched before the outputs of the one before it are read, if the device can.
        Arguments as for `batches` and `run`.
        """
        waiting = deque[tuple[list[int], DecodeLoop]]()
        for batch, feeds in self.batches(sequences, types):
            plan, env = self._plan(names, feeds)
            run = self._executor.decode_loop(plan, feeds, env, names[0], recorder, others=names[1:])
            run.launch()
            waiting.append((batch, run))
            if len(waiting) > run.lookahead:
                yield _taken(*waiting.popleft())
        while waiting:
            yield _taken(*waiting.popleft())

    def _plan(
        self, names: Sequence[str], feeds: dict[str, np.ndarray]
    ) -> tuple[Plan, dict[str, int]]:
        """Return the plan of a batch, and the number of its (query, key) pairs.

        On a GPU it is the plan of the next power of two tokens.
        """
        lengths = np.diff(feeds["q_start"]).astype(np.int64)
        env, tokens = {"kv_sum": int((lengths * lengths).sum())}, int(lengths.sum())
        outputs = {name: self._outputs[name] for name in names}
        if self._on_host:
            return self._executor.compile(outputs), env
        most = min(self._tokens, max(_LEAST_GPU_TOKENS, 1 << (tokens - 1).bit_length()))
        return self._executor.compile(outputs, {"T": (1, most), "Q": (2, most + 1)}), env


def _taken(batch: list[int], run: DecodeLoop) -> tuple[list[int], list[np.ndarray]]:
    return batch, [run.take(), *run.take_others()]
