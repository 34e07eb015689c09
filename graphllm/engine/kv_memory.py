"""Size of the KV pools: the number of blocks that a memory budget pays for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..arguments import as_int, invalid_argument
from ..errors import RequestError
from ..graph.tensor import Meta
from ..model.batch import CacheSpec, Limits

AUTO = "auto"
_AUTO_SHARE = 2  # "auto" takes at most 1 / this of the memory that the weights leave free


def check_kv_memory(name: str, value: Any) -> int | str:
    """Rule: "auto" or a number of bytes. RequestError otherwise."""
    number = as_int(value)
    if value == AUTO or (number is not None and number > 0):
        return value if number is None else number
    raise invalid_argument(name, value, "auto or a number of bytes")


def block_bytes(group: CacheSpec, limits: Limits) -> int:
    """Return the bytes of one block of a cache group, in all of its layers."""
    rows = (
        Meta.of((limits.block, *shape), limits.kv_dtype).nbytes for shape in group.entries.values()
    )
    return len(group.layers) * sum(rows)


def kv_budget(kv_memory: int | str, free: int | None) -> int | None:
    """Return the bytes that the KV cache may take; None if unknown.

    Args:
        kv_memory: bytes, or "auto": half of what is free.
        free: bytes that the weights leave free; None if unknown.
    """
    if kv_memory != AUTO:
        return int(kv_memory)
    return None if free is None else free // _AUTO_SHARE


def kv_blocks(
    caches: Iterable[CacheSpec], limits: Limits, kv_memory: int | str, free: int | None
) -> int:
    """Return `Limits.kv_blocks` for a budget.

    Args:
        caches: KV cache groups of the model.
        limits: limits of the graph.
        kv_memory: bytes, or "auto": enough for all sequences at full length, but at most half of
            what is free, and at least one sequence.
        free: bytes that the weights leave free; None if unknown.

    Raises:
        RequestError: the budget is too small for one sequence.
    """
    groups = list(caches)
    growing = sum(block_bytes(group, limits) for group in groups if not group.window)
    most = limits.sequences * limits.blocks
    windows = (group for group in groups if group.window)
    fixed = sum(limits.pool_blocks(g.window) * block_bytes(g, limits) for g in windows)
    if kv_memory == AUTO:
        if free is None or not growing:
            return most
        return max(limits.blocks, min(most, (free // _AUTO_SHARE - fixed) // growing))
    needed = fixed + limits.blocks * growing
    if int(kv_memory) < needed:
        raise RequestError(
            f"kv_memory = {kv_memory} is too small: {limits.sequences} sequences, of which one has "
            f"{limits.context} tokens, need {needed} bytes",
            "kv_memory",
        )
    return min(most, (int(kv_memory) - fixed) // growing) if growing else most
