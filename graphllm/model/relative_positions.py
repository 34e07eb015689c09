"""Buckets of relative positions (T5; Raffel et al. 2020, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import ModelFileError
from ..graph.dtype import F32
from ..graph.tensor import Meta
from ..weights.weight_rules import View, WeightRule
from .config import EncoderDecoderConfig
from .config_keys import Keys

MAX_REACH = 1 << 15
MAX_BIASES = 1 << 24


def bucket_sizes(keys: Keys) -> tuple[int, int]:
    """Read the number of buckets, and the distance from which on all are in the last one.

    ConfigError: they are too large, or leave no bucket that holds several distances.
    """
    buckets = keys.positive("relative_attention_num_buckets", 32)
    reach = keys.positive("relative_attention_max_distance", 128)
    if not 4 <= buckets <= MAX_REACH:
        text = f"= {buckets} is not in 4..{MAX_REACH}"
        raise keys.error("relative_attention_num_buckets", text)
    if not buckets < 2 * reach <= 2 * MAX_REACH:
        text = f"= {reach} with {buckets} buckets is not in {buckets // 2 + 1}..{MAX_REACH}"
        raise keys.error("relative_attention_max_distance", text)
    return buckets, reach


def relative_buckets(reach: int, buckets: int, bidirectional: bool) -> np.ndarray:
    """Return the bucket of each distance of key and query from -reach to reach.

    Half of the buckets, for bidirectional attention of those of either sign, hold one distance
    each. The others grow logarithmically up to ``reach``, transformers' ``max_distance``.
    """
    distance = np.arange(-reach, reach + 1)
    later = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        later = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    # In float32, as transformers does, since borders of buckets are exact powers.
    growth = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    scaled = growth / np.float32(math.log(reach / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + scaled.astype(np.int64), buckets - 1)
    return later + np.where(distance < exact, distance, far)


class BiasByDistance(View):
    """Biases [buckets, heads] as [heads, 2 * reach + 1], by distance; see `relative_buckets`."""

    def __init__(self, reach: int, buckets: int, bidirectional: bool) -> None:
        index = relative_buckets(reach, buckets, bidirectional)
        self._shape = buckets, len(index)
        super().__init__(lambda stored: stored[index].T)

    def meta(self, stored: Sequence[Meta]) -> Meta:
        one, (buckets, distances) = stored[0], self._shape
        if len(one.shape) != 2 or one.shape[0] != buckets:
            raise ModelFileError(f"shape {one.shape} is not {buckets} buckets by heads")
        kind = F32 if one.dtype.quantised else one.dtype
        made = Meta.of((one.shape[1], distances), kind)
        if made.bound().size > MAX_BIASES:
            raise ModelFileError(f"shape {one.shape} makes more than {MAX_BIASES} biases")
        return made


def bias_rules(config: EncoderDecoderConfig, path: str) -> tuple[WeightRule, ...]:
    """Return the rules that store biases by distance, not by bucket.

    Args:
        config: Configuration.
        path: Name of the tensors, with a place for "encoder" or "decoder".
    """
    assert config.encoder is not None
    sides = (("encoder", config.encoder.attention, True), ("decoder", config.attention, False))
    return tuple(
        WeightRule(a.bias_name, path.format(side), BiasByDistance(a.bias_reach, a.bias_buckets, b))
        for side, a, b in sides
    )
