"""KL divergence of a model from a base model, measured on the predicted tokens of a text.

For each of these tokens: its log-probabilities under both models, the divergence sum p_base
(ln p_base - ln q) of the model's distribution q, and whether both have the same most likely token.
`Divergence` makes llama.cpp's statistics of them. Rows of logits are on the host for this, at most
64 MB at a time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..backends.cpu.runtime.cores import thread_count
from ..engine.packed_evaluation import PackedEvaluation
from ..loading.loaded_model import LoadedModel
from .base_file import BaseFile, BaseFileWriter, decode, encode, vocabulary_digest
from .divergence_report import Divergence
from .perplexity import ChunkProgress, Perplexity, evaluate_chunks, no_progress

_MIN_LOGPROB = np.float32(-16)  # base tokens below it do not count, as in llama.cpp


def save_base(
    llm: LoadedModel, chunks: np.ndarray, path: str | os.PathLike[str],
    progress: ChunkProgress = no_progress,
) -> Perplexity:  # fmt: skip
    """Write the log-probabilities of a model to a base file, and return its perplexity.

    Args:
        llm: the model.
        chunks: token ids int32 [chunks, context].
        path: the file; an existing one is replaced once the new one is complete.
        progress: called after each chunk.

    Raises:
        RequestError: the file cannot be written, or a chunk does not fit the model's context.
        NumericError: the logits are not finite.
    """
    digest = vocabulary_digest(llm.tokenizer if llm.file.has_vocabulary else None)
    writer = BaseFileWriter(path, chunks, llm.decoder.cfg.vocab, digest)
    with writer, ThreadPoolExecutor(thread_count(llm.executor.options)) as workers:

        def store(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
            rows = writer.new_rows(len(ids))
            logprobs = list(workers.map(_encode_row, logits, rows, ids))
            writer.write(rows)
            return np.array(logprobs)[:, None]

        found = evaluate_chunks(llm, chunks, PackedEvaluation.logits, store, progress)
    return Perplexity.of(found[..., 0], chunks.shape[1])


def compare_with_base(
    llm: LoadedModel, base: BaseFile, most: int | None = None,
    progress: ChunkProgress = no_progress,
) -> Divergence:  # fmt: skip
    """Return the divergence of a model from the base model whose log-probabilities a file has.

    Args:
        llm: the model.
        base: the file; its rows are read from the first to the last.
        most: maximum number of chunks.
        progress: called after each chunk, with the perplexity of ``llm``.

    Raises:
        RequestError: the file was written with another vocabulary, or its chunks do not fit the
            model's context.
        ModelFileError: the file is malformed.
        NumericError: the logits are not finite.
    """
    base.check_model(llm.decoder.cfg.vocab, llm.tokenizer if llm.file.has_vocabulary else None)
    with ThreadPoolExecutor(thread_count(llm.executor.options)) as workers:

        def compare(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
            rows = base.read_rows(len(ids))
            return np.array(list(workers.map(_compare_row, logits, rows, ids)))

        found = evaluate_chunks(llm, base.tokens[:most], PackedEvaluation.logits, compare, progress)
    return Divergence(base.context, *np.moveaxis(found, -1, 0))


def _encode_row(logits: np.ndarray, row: np.void, token: int) -> float:
    """Store the log-probabilities of a row, and return that of ``token``."""
    logprobs = log_softmax(logits)
    if not np.isnan(logprobs[token]):
        encode(logprobs, token, row)
    return float(logprobs[token])


def _compare_row(logits: np.ndarray, row: np.void, token: int) -> tuple[float, ...]:
    """Return the log-probability of ``token``, that of the base, the divergence, and 1 if both
    have the same most likely token."""
    logprobs, base = log_softmax(logits), decode(row)
    same = logprobs.argmax() == base.argmax()
    found = logprobs[token], row["token"], kl_divergence(logprobs, base), same
    return tuple(map(float, found))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities f32 [vocab] of one row; NaN if the logits are not finite."""
    with np.errstate(invalid="ignore"):  # of infinity less infinity
        shifted = logits - logits.max()
        shifted -= np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return shifted


def kl_divergence(logprobs: np.ndarray, base: np.ndarray) -> float:
    """Return the KL divergence of log-probabilities f32 [vocab] from those of the base."""
    likely = base > _MIN_LOGPROB
    own = base[likely]
    return float((np.exp(own) * (own - logprobs[likely])).sum(dtype=np.float64))
