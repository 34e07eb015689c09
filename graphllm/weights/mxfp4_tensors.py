"""MXFP4 as safetensors files of gpt-oss store it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ModelFileError
from ..formats.microscaling import MXFP4
from ..graph.tensor import Meta
from .weight_rules import sizes


class Mxfp4:
    """MXFP4 (OCP 2023) in two tensors, as gpt-oss stores it, repacked to GGUF's blocks.

    The first tensor is uint8 [E, rows, blocks, 16] with two neighbouring elements per byte, the
    first in the low half; the second is uint8 [E, rows, blocks], the exponents. ``rows`` selects
    the rows of the weight. The values do not change.
    """

    def __init__(self, rows: slice = slice(None)) -> None:
        self._rows = rows

    def meta(self, stored: Sequence[Meta]) -> Meta:
        shapes = [sizes(meta) for meta in stored]
        good = len(shapes) == 2 and len(shapes[1]) == 3 and shapes[0] == (*shapes[1], 16)
        if not good or {meta.dtype.numpy for meta in stored} != {np.dtype(np.uint8)}:
            raise ModelFileError(
                f"{' and '.join(map(str, stored))}: not blocks and scales of mxfp4"
            )
        experts, rows, blocks = shapes[1]
        kept = len(range(rows)[self._rows])
        return Meta.of((experts, kept, blocks * MXFP4.block), MXFP4)

    def raw(self, stored: Sequence[np.ndarray], metas: Sequence[Meta]) -> np.ndarray:
        pairs, scales = (
            raw.reshape(meta.shape)[:, self._rows] for raw, meta in zip(stored, metas, strict=True)
        )
        blocks = np.empty((*scales.shape, MXFP4.nbytes), np.uint8)
        blocks[..., 0] = scales
        for expert, each in zip(blocks, pairs):  # one expert at a time to save memory
            q = np.stack((each & 15, each >> 4), axis=-1).reshape(*each.shape[:-1], MXFP4.block)
            expert[..., 1:] = q[..., :16] | q[..., 16:] << 4
        return blocks.reshape(-1, scales.shape[-1] * MXFP4.nbytes)
