"""Perplexity of a text, with the meaning of llama.cpp's perplexity tool.

The text is cut into chunks of ``context`` tokens. Each is computed with an empty cache, and with
the BOS token in place of its first token if the model uses one. The tokens after the first one of
the second half are predicted, so that at least half a chunk precedes each. The perplexity is
exp(mean negative log-likelihood) of all predicted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..engine.finite_check import non_finite_error
from ..engine.packed_evaluation import PackedEvaluation, Passage, Rows
from ..errors import RequestError
from ..loading.loaded_model import LoadedModel
from ..model.batch import Limits

MIN_CONTEXT = 4
_MAX_CHUNKS = 64  # of a step

# Called with the number of finished chunks, of all chunks, and the perplexity so far.
ChunkProgress = Callable[[int, int, float], None]


def chunks_per_step(context: int) -> int:
    """Return how many chunks of ``context`` tokens a step computes: ``max_sequences`` of `load`."""
    return max(1, min(_MAX_CHUNKS, Limits.tokens // max(1, context)))


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text.

    Attributes:
        value: exp(mean negative log-likelihood).
        standard_error: standard error of ``value``, if tokens were independent.
        context: tokens of a chunk.
        logprobs: log-probabilities of the predicted tokens, float64 [chunks, tokens of each].
    """

    value: float
    standard_error: float
    context: int
    logprobs: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, logprobs: np.ndarray, context: int) -> Perplexity:
        """Return the perplexity of tokens with these log-probabilities [chunks, n]."""
        value = _perplexity(logprobs)
        return cls(value, value * standard_error(logprobs), context, logprobs)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.logprobs)

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return self.logprobs.size

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm perplexity --json`` prints.

        Null for a value that is not finite, since a token has probability 0.
        """
        return {
            "perplexity": finite_or_none(self.value),
            "standard_error": finite_or_none(self.standard_error),
            "context": self.context,
            "chunks": self.chunks,
            "tokens": self.tokens,
        }

    def table(self) -> str:
        """Return the perplexity as text."""
        return (
            f"{self.chunks} chunks of {self.context} tokens, {self.tokens} tokens predicted\n"
            f"PPL = {self.value:.4f} ± {self.standard_error:.5f}"
        )


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of ``values``; NaN if a value is infinite."""
    with np.errstate(invalid="ignore"):
        return float(np.std(values)) / math.sqrt(max(1, values.size - 1))


def finite_or_none(value: float) -> float | None:
    """Return what JSON has for a number."""
    return value if math.isfinite(value) else None


def first_predicted(context: int) -> int:
    """Return the index of the first predicted token of a chunk."""
    return context // 2 + 1


def split_text(
    llm: LoadedModel, text: str | Sequence[int], context: int, most: int | None = None
) -> np.ndarray:
    """Return the chunks of a text, int32 [chunks, context], as they are computed.

    Tokens after the last whole chunk are dropped.

    Args:
        llm: the model.
        text: a text, in which special tokens stay text, or token ids.
        context: tokens of a chunk.
        most: maximum number of chunks.

    Raises:
        RequestError: the text has fewer tokens than two chunks, as llama.cpp requires; a chunk
            does not fit the model's context; an id is not in the vocabulary.
    """
    check_context(llm, context)
    if isinstance(text, str):
        ids = encode_text(llm, text)
    else:
        ids = list(text)
        llm.check_ids(ids)
    if len(ids) < 2 * context:
        raise RequestError(
            f"the text has {len(ids)} tokens; chunks of {context} need at least {2 * context}: "
            "use a longer text or a smaller context",
            "context",
        )
    count = len(ids) // context
    count = count if most is None else min(count, most)
    chunks = np.array(ids[: count * context], np.int32).reshape(count, context)
    if (bos := _added_bos(llm)) is not None:
        chunks[:, 0] = bos
    return chunks


def encode_text(llm: LoadedModel, text: str) -> list[int]:
    """Return the token ids of a text, after a BOS token if the model uses one; no EOS token."""
    bos = _added_bos(llm)
    return ([] if bos is None else [bos]) + llm.tokenizer.encode(text)


def _added_bos(llm: LoadedModel) -> int | None:
    """Return the BOS id that texts begin with, None if the model uses none or has no tokenizer."""
    tokenizer = llm.tokenizer if llm.file.has_vocabulary else None
    return tokenizer.bos_id if tokenizer is not None and tokenizer.add_bos else None


def no_progress(done: int, total: int, value: float) -> None:
    """Show no progress; see `ChunkProgress`."""


def perplexity(
    llm: LoadedModel, chunks: np.ndarray, progress: ChunkProgress = no_progress
) -> Perplexity:
    """Return the perplexity of chunks, which `split_text` makes.

    The device returns one log-probability for each predicted token.

    Args:
        llm: the model.
        chunks: token ids int32 [chunks, context].
        progress: called after each chunk.

    Raises:
        NumericError: the logits are not finite.
        RequestError: a chunk does not fit the model's context.
    """
    found = evaluate_chunks(
        llm, chunks, PackedEvaluation.logprobs, lambda ids, values: values[:, None], progress
    )
    return Perplexity.of(found[..., 0], chunks.shape[1])


def evaluate_chunks(
    llm: LoadedModel,
    chunks: np.ndarray,
    evaluate: Callable[[PackedEvaluation, Sequence[Passage]], Generator[Rows, None, None]],
    measure: Callable[[np.ndarray, np.ndarray], np.ndarray],
    progress: ChunkProgress,
) -> np.ndarray:
    """Return measured values of all predicted tokens, float64 [chunks, tokens of each, columns].

    Args:
        llm: the model, which runs no other request meanwhile.
        chunks: token ids int32 [chunks, context].
        evaluate: method of `PackedEvaluation` that gives a row for each predicted token.
        measure: returns columns for tokens [n] and their rows [n, ...], in the order of the text;
            the first column is the log-probability.
        progress: called after each chunk.

    Raises:
        NumericError: the logits are not finite.
        RequestError: a chunk does not fit the model's context.
    """
    count, context = chunks.shape
    check_context(llm, context)
    first, found = first_predicted(context), np.empty((0, 0, 0))
    passages = [Passage(chunk.tolist(), first) for chunk in chunks]
    with llm.engine.lock.hold("perplexity"):
        with closing(evaluate(llm.engine.packed_evaluation(), passages)) as evaluated:
            for index, start, rows in evaluated:
                stop = start + len(rows)
                values = measure(chunks[index, start:stop], rows)
                if not found.size:
                    found = np.full((count, context - first, values.shape[1]), np.nan)
                found[index, start - first : stop - first] = values
                if np.isnan(values[:, 0]).any():
                    break
                if stop == context:
                    progress(index + 1, count, _perplexity(found[: index + 1, :, 0]))
        _check_finite(llm, chunks, found[..., 0])
    return found


def check_context(llm: LoadedModel, context: int) -> None:
    """Raise RequestError if chunks of ``context`` tokens cannot be computed."""
    if not MIN_CONTEXT <= context <= llm.limits.context:
        raise RequestError(
            f"chunks of {context} tokens: the model takes {MIN_CONTEXT} to {llm.limits.context}",
            "context",
        )


def _check_finite(llm: LoadedModel, chunks: np.ndarray, logprobs: np.ndarray) -> None:
    """Raise NumericError if a log-probability is NaN, since the logits before it are not finite.

    Args:
        llm: the model; the caller holds the engine's lock.
        chunks: token ids.
        logprobs: log-probabilities of the predicted tokens, up to the first NaN.
    """
    bad = np.argwhere(np.isnan(logprobs))
    if len(bad):
        index, at = bad[0]
        stop = first_predicted(chunks.shape[1]) + int(at)
        raise non_finite_error(llm.engine, chunks[index, :stop].tolist())


def _perplexity(logprobs: np.ndarray) -> float:
    """Return exp(mean negative log-likelihood), infinity if that is beyond the range of floats."""
    mean = -float(logprobs.mean())
    return math.exp(mean) if mean < 700 else math.inf
