"""`DecoderStates`: hidden states of whole sequences from a decoder, for embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..errors import RequestError
from ..model.batch import Batch, Limits
from ..model.decoder import Decoder
from ..runtime.executor import Executor
from .batch_runner import HOST_TOKENS
from .block_manager import BlockManager
from .encoder_engine import EncoderEngine, EncoderEvaluation
from .forward_feeds import Span, forward_feeds
from .packing import pack

SEQUENCES = 64  # of a step


class DecoderStates(EncoderEngine):
    """Runs a decoder as `EncoderEngine` runs an encoder: each sequence in one step.

    The KV cache holds the sequences of the step only.
    """

    def __init__(self, decoder: Decoder, executor: Executor, max_length: int) -> None:
        """Build and place the graph; ``max_length``: maximum number of tokens of a sequence."""
        tokens = max(HOST_TOKENS, max_length)
        blocks = -(-tokens // Limits.block) + SEQUENCES  # of each sequence one may be half empty
        limits = Limits(tokens, SEQUENCES, tokens, kv_dtype="f32", kv_blocks=blocks, one_step=True)
        batch = Batch(decoder.caches, limits)
        self._place(executor, tokens, lambda: {"hidden": decoder.build_states(batch)})
        sizes = {c.name: limits.pool_blocks(c.window) for c in decoder.caches}
        self._manager = BlockManager(decoder.caches, sizes, limits.block, limits.blocks)

    def hidden(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """Return the hidden states [tokens, dim] of each sequence, after the final norm.

        Args:
            sequences: token ids of each sequence.
            types: not used: decoders have no token types.
        """
        found: list[np.ndarray] = []
        for at in range(0, len(sequences), SEQUENCES):
            found += self._step(sequences[at : at + SEQUENCES])
        return found

    def hidden_by_batch(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Yield the indices and hidden states of the sequences of each batch; see `hidden`."""
        for batch in pack([*map(len, sequences)], self.limits.tokens):
            yield batch, self.hidden([sequences[i] for i in batch])

    def _step(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        manager = self._manager
        spans = [Span(ids, 0, 0, manager.begin(ids[:1])) for ids in sequences]
        try:
            for span in spans:
                span.blocks.private = True
                if not manager.reserve(span.blocks, 0, len(span.tokens)):
                    raise RequestError(f"{sum(map(len, sequences))} tokens do not fit a step")
            feeds, env = forward_feeds(manager, spans, rows=np.zeros(1))
            hidden = self._run("hidden", feeds, env)
        finally:
            for span in spans:
                manager.release(span.blocks)
        return np.split(hidden, feeds["q_start"][1:-1])

    @contextmanager
    def evaluation(self, tokens: Sequence[int]) -> Iterator[EncoderEvaluation]:
        """Raise RequestError: `graphllm.LLM.load` loads the decoder for that."""
        raise RequestError("this is not supported for embeddings; load the decoder with LLM.load")
        yield  # a context manager is a generator
