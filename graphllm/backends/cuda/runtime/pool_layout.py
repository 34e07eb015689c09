"""Layout of quantised pools of keys and values on the GPU.

Elsewhere a row of such a pool has blocks, or heads, each with its scale. On the GPU it has the
elements of all heads and then all scales, so that kernels load elements in aligned vectors.
"""

from __future__ import annotations

import numpy as np

from ....graph.dtype import CACHED
from ....graph.tensor import Meta

_SCALE = 2  # bytes of a block's scale, which comes before its elements


def scales_are_apart(meta: Meta) -> bool:
    """Whether ``meta`` is a quantised pool: slots of heads."""
    return meta.dtype.quantised and meta.dtype.name in CACHED and len(meta.shape) == 3


def scales_offset(meta: Meta) -> int:
    """Bytes from a slot to its scales on the GPU; ``meta`` may have the first columns of slots."""
    kind, (heads, width) = meta.dtype, meta.inner
    if not kind.quantised:
        return 0
    if kind.tail:
        return heads * width
    return meta.strides[0] // kind.nbytes * (kind.nbytes - _SCALE)


def to_gpu(meta: Meta, rows: np.ndarray) -> np.ndarray:
    """Bytes of the rows of such a pool as the GPU stores them, of the same shape."""
    count, unit, tail = _units(meta)
    parts = rows.reshape(-1, count, unit)
    first, last = np.split(parts, [unit - tail if tail else _SCALE], 2)
    apart = [
        part.reshape(len(parts), count * part.shape[2])
        for part in ((first, last) if tail else (last, first))
    ]
    return np.concatenate(apart, 1).reshape(rows.shape)


def from_gpu(meta: Meta, rows: np.ndarray) -> np.ndarray:
    """The inverse of `to_gpu`."""
    count, unit, tail = _units(meta)
    apart = rows.reshape(-1, count * unit)
    size = count * (unit - (tail or _SCALE))
    elements = apart[:, :size].reshape(len(apart), count, size // count)
    scales = apart[:, size:].reshape(len(apart), count, unit - size // count)
    parts = (elements, scales) if tail else (scales, elements)
    return np.concatenate(parts, 2).reshape(rows.shape)


def _units(meta: Meta) -> tuple[int, int, int]:
    """Parts of a row that have a scale, the bytes of each, and those of a scale at the end."""
    (heads, width), kind = meta.inner, meta.dtype
    if kind.tail:
        return heads, kind.row_nbytes(width), kind.tail
    return heads * width // kind.block, kind.nbytes, 0
