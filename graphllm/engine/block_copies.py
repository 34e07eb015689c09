"""Copies of KV cache blocks on the device, for sequences that fork."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .. import ops
from ..graph.rewrite import root
from ..graph.tensor import Tensor, Var, feed
from ..model.batch import Limits
from .sequence_blocks import BlockCopy

FEW_COPIES, MAX_COPIES = 32, 256  # of one run: bounds of its two plans
COPIED = "copied."  # of the names of the outputs


def copy_outputs(pools: Mapping[str, Tensor], limits: Limits) -> dict[str, Tensor]:
    """Return by name the pools after copies of blocks.

    Args:
        pools: outputs ``kv.GROUP.LAYER.ENTRY`` of the graph: the pools after a step.
        limits: limits of the graph.
    """
    copies, found = Var("M", 1, MAX_COPIES), {}
    for name, pool in pools.items():
        group = name.split(".")[1]
        pairs = [feed(f"{end}.{group}", (copies,), "i32") for end in ("copy_from", "copy_to")]
        copied = ops.copy_blocks(root(pool), *pairs, block=limits.block)
        copied.scopes = pool.scopes  # so that a pin of the layer includes it
        found[f"{COPIED}{name}"] = copied
    return found


def copy_feeds(
    copies: Sequence[BlockCopy], groups: Iterable[str]
) -> Iterable[dict[str, np.ndarray]]:
    """Yield the feeds of the runs that make ``copies``, of which each group has as many."""
    pairs = {g: np.array([c[1:] for c in copies if c.group == g], np.int32) for g in groups}
    for at in range(0, max(map(len, pairs.values())), MAX_COPIES):
        feeds = {}
        for group, pair in pairs.items():
            part = pair[at : at + MAX_COPIES]
            feeds[f"copy_from.{group}"], feeds[f"copy_to.{group}"] = part[:, 0], part[:, 1]
        yield feeds
