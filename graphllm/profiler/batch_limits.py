"""Checks that a batch of sequences fits the context and the KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import check
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..engine.kv_memory import block_bytes
from ..errors import RequestError
from ..loading.load import RULES, backend_options, build_decoder, graph_limits, memory_left
from .planner import Planner

if TYPE_CHECKING:
    from ..model.batch import CacheSpec, Limits


def needed_blocks(group: CacheSpec, limits: Limits, lengths: Iterable[int]) -> int:
    """Return the blocks of a group with which sequences of these lengths run at the same time.

    The scheduler leaves one more block for each running sequence when it admits another one.
    """
    kept = limits.kept(group.window)
    return sum(min(kept, -(-length // limits.block) + 1) for length in lengths)


def kv_bytes(groups: Iterable[CacheSpec], limits: Limits, lengths: Sequence[int]) -> int:
    """Return the bytes of KV pools that hold sequences of these lengths at the same time.

    A group with a window has the blocks of all sequences in any case (`Limits.pool_blocks`).
    """
    total = 0
    for group in groups:
        blocks = needed_blocks(group, limits, lengths)
        if group.window:
            blocks = limits.pool_blocks(group.window)
        total += max(blocks, limits.kept(group.window)) * block_bytes(group, limits)
    return total


def sequence_bytes(groups: Iterable[CacheSpec], limits: Limits, length: int) -> int:
    """Return the bytes of KV pools that one of many sequences of this length needs.

    A group with a window keeps the blocks of a step, too, whatever the length is.
    """
    total = 0
    for group in groups:
        kept = limits.kept(group.window)
        blocks = kept if group.window else min(kept, -(-length // limits.block))
        total += blocks * block_bytes(group, limits)
    return total


def check_batch(
    groups: Iterable[CacheSpec], limits: Limits, requests: Sequence[tuple[int, int]]
) -> None:
    """Check that requests can be computed as one batch, without preemption.

    Args:
        groups: KV cache groups of the model.
        limits: limits of the graph.
        requests: number of tokens of each prompt, and of the tokens decoded after it.

    Raises:
        RequestError: there are too many requests, a prompt is empty, or they do not fit.
    """
    if not requests or not all(prompt for prompt, _ in requests):
        raise RequestError("the prompt has no tokens")
    if len(requests) > limits.sequences:
        raise RequestError(
            f"{len(requests)} requests are more than the {limits.sequences} that are computed at "
            "once",
            "max_sequences",
        )
    lengths = [prompt + decoded for prompt, decoded in requests]
    for (prompt, decoded), length in zip(requests, lengths):
        if length > limits.context:
            total = f"{prompt} prompt tokens and {decoded} decoded tokens"
            raise RequestError(f"{total} exceed the context of {limits.context}", "context")
    for group in groups:
        needed, have = needed_blocks(group, limits, lengths), limits.pool_blocks(group.window)
        if needed > have:
            raise RequestError(
                f"{len(requests)} requests with {sum(lengths)} tokens need {needed} blocks of the "
                f"KV cache, which has {have}",
                "kv_memory",
            )


def kv_memory_of(
    model: str | Path | Checkpoint, given: Mapping[str, Any], batches: Sequence[tuple[int, int]]
) -> int:
    """Return the bytes of a KV cache that holds each of some batches without preemption.

    Args:
        model: the model, of which no tensor is read.
        given: arguments of `load`, with the context and ``max_sequences`` of the largest batch.
        batches: tokens of a sequence, and number of sequences.

    Raises:
        RequestError: a sequence does not fit the model's context, or the cache of a batch does not
            fit the memory that the weights leave free on the first device.
        GraphllmError: as in `load`.
    """
    own = check({name: RULES[name] for name in given}, given)
    decoder = build_decoder(open_checkpoint(model), own["model_def"], own["type"])
    pinned = {"pins": own["place"], "strict": own["strict"]}
    device = own["device"]
    planner = Planner(decoder.weights, device, backend_options(own), None, **pinned)
    limits = decoder.limits(
        graph_limits(own["context"], own["kv_type"], device, own["max_sequences"])
    )
    needed, free = 0, memory_left(decoder, planner)
    for length, count in batches:
        if count > limits.tokens:
            raise RequestError(
                f"{count} sequences: a step computes at most {limits.tokens} tokens",
                "max_sequences",
            )
        if length > limits.context:
            what = f"sequences of {length} tokens exceed the model's context of {limits.context}"
            raise RequestError(what, "context")
        own_bytes = kv_bytes(decoder.caches, limits, [length] * count)
        if free is not None and own_bytes > free:
            raise RequestError(
                f"{count} sequences of {length} tokens need {own_bytes / 1e9:.2f} GB of KV cache, "
                f"and the weights leave {free / 1e9:.2f} GB free",
                "kv_memory",
            )
        needed = max(needed, own_bytes)
    return needed
