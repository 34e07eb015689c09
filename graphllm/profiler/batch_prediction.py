"""Prediction of many sequences: prefill, decode, and how many fit the KV memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.forward_feeds import kv_pairs
from .batch_limits import sequence_bytes
from .bench import step_bytes
from .step_times import TimePredictor

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model.batch import CacheSpec, Limits


@dataclass(frozen=True)
class BatchPrediction:
    """Prediction of a batch of sequences.

    Attributes:
        sequences: number of sequences.
        depth: tokens of each prompt, and in the cache of each sequence before the decode step.
        prefill_s: seconds of the prefill of all prompts; None if a measurement is missing.
        step_s: seconds of a decode step of all sequences; None if a measurement is missing.
        nbytes: bytes of weights and cache that the decode step moves.
        sequence_bytes: bytes of the KV cache of one sequence with ``depth`` + 1 tokens.
        fits: number of such sequences that the KV memory holds; None if its size is unknown.
    """

    sequences: int
    depth: int
    prefill_s: float | None
    step_s: float | None
    nbytes: float
    sequence_bytes: int
    fits: int | None


def predict_batch(
    engine: Engine, groups: Iterable[CacheSpec], sequences: int, depth: int, room: int | None,
    threads: int,
) -> BatchPrediction:  # fmt: skip
    """Predict a batch.

    Args:
        engine: the engine, whose plans are compiled but not run.
        groups: KV cache groups of the model.
        sequences: number of sequences.
        depth: tokens of each prompt.
        room: bytes of the KV cache; None if unknown.
        threads: number of CPU threads.
    """
    size = sequence_bytes(groups, engine.limits, depth + 1)
    return BatchPrediction(
        sequences=sequences,
        depth=depth,
        prefill_s=predict_prefill(engine, [depth] * sequences, threads),
        step_s=predict_step(engine, [depth] * sequences, threads),
        nbytes=step_bytes(engine.decode_plan(sequences), depth + 1, sequences),
        sequence_bytes=size,
        fits=None if room is None or not size else room // size,
    )


def predict_step(engine: Engine, lengths: Sequence[int], threads: int) -> float | None:
    """Predict the seconds of a decode step after ``lengths`` cached tokens of each sequence."""
    count = len(lengths)
    plan = engine.decode_plan(count)
    env = {"T": count, "S": count, "Q": count + 1, "N": count}
    env["kv_sum"] = sum(lengths) + count
    return TimePredictor.of([plan], threads).seconds(plan, env)


def predict_prefill(engine: Engine, lengths: Sequence[int], threads: int) -> float | None:
    """Predict the seconds of the prefill of prompts of these lengths, computed as one batch."""
    total = 0.0
    for env in prefill_steps(engine.limits, lengths):
        plan = engine.prefill_plan(env["S"])
        own = TimePredictor.of([plan], threads).seconds(plan, env)
        if own is None:
            return None
        total += own
    return total


def prefill_steps(limits: Limits, lengths: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the values of the Vars of each step of a prefill, as the scheduler packs them.

    Prompts go in order; chunks end at the end of a prompt or at a multiple of the block.
    """
    chunks: list[tuple[int, int, bool]] = []  # cached tokens, tokens, whether the prompt ends
    left, border = limits.tokens, math.gcd(limits.tokens, limits.block)
    for length in lengths:
        at = 0
        while at < length:
            stop = min(length, at + left)
            if stop < length:
                stop = max(at, stop - stop % border)
            if stop > at:
                chunks.append((at, stop - at, stop == length))
                left -= stop - at
                at = stop
            if at < length:  # the step is full
                yield _step(chunks)
                chunks, left = [], limits.tokens
    if chunks:
        yield _step(chunks)


def _step(chunks: Sequence[tuple[int, int, bool]]) -> dict[str, int]:
    count = len(chunks)
    pairs = sum(kv_pairs(at, tokens) for at, tokens, _ in chunks)
    env = {"T": sum(tokens for _, tokens, _ in chunks), "S": count, "Q": count + 1}
    return {**env, "N": max(1, sum(ends for *_, ends in chunks)), "kv_sum": pairs}
