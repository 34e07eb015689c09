"""Encode the rows of a tensor in another format, with the scales of least error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..backends import Options
from ..backends.cpu.runtime.cores import thread_count
from ..backends.cpu.runtime.scale_search import search_scales
from ..checkpoints.quantize_on_load import Converter, check_finite, check_range
from ..formats import BLOCK_FORMATS
from ..formats.quantization import Blocks
from ..formats.scale_search import round_scales
from ..graph.dtype import F32, DType
from ..graph.tensor import Meta

Array = np.ndarray

_TILE = 1 << 18  # elements that a thread searches at a time: 1 MB, which the L2 cache holds
_SLAB = 1 << 24  # elements that are converted without a search at a time


def encode_blocks(x: Array, dtype: DType, importance: Array | None) -> Array:
    """Return finite float32 [rows, K] as blocks, uint8 [rows, row_bytes].

    Args:
        x: Rows of whole blocks, contiguous.
        dtype: A block format.
        importance: float32 [K], weights of the squared errors of the columns; None for those of the
            format.
    """
    form = BLOCK_FORMATS[dtype.name]
    search = form.search if importance is None else form.weighted_search
    values, blocks = x.reshape(-1, dtype.block), np.empty(x.size // dtype.block, form.layout)
    with np.errstate(all="ignore"):  # values next to zero, and scales beyond the range of float16
        scales = None
        if search is not None:
            found = search_scales(x, importance, search, dtype.block)
            scales = round_scales(*found, search, importance is not None)
        for name, field in form.encode(values, scales).items():
            blocks[name] = field
    return blocks.view(np.uint8).reshape(len(x), dtype.row_nbytes(x.shape[1]))


class Encoder:
    """Encodes tensors on several threads; a context manager.

    Formats with a search are encoded in tiles, each on one thread. All others are converted as on
    load.
    """

    def __init__(self, threads: int) -> None:
        options = Options(threads=threads)
        self._threads, self._convert = thread_count(options), Converter(None, options)
        self._pool = ThreadPoolExecutor(self._threads)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode(
        self, name: str, values: Blocks, wanted: DType, importance: Array | None
    ) -> Iterator[Array]:
        """Yield the rows of a matrix in the format ``wanted``, uint8 [rows, row_bytes] at a time.

        Args:
            name: The tensor, for messages.
            values: The matrix.
            wanted: A format whose blocks divide the rows.
            importance: float32 [K] of each column, or None.

        Raises:
            ModelFileError: A value is infinite or NaN, or beyond the range of ``wanted``.
        """
        form = BLOCK_FORMATS.get(wanted.name)
        search = form and (form.search if importance is None else form.weighted_search)
        if not search:
            yield from self._converted(name, values, wanted)
            return
        step, waiting = max(1, _TILE // values.elements), deque[Future[Array]]()
        for first in range(0, len(values), step):
            tile = values[first : first + step]
            args = name, tile, first, wanted, importance
            waiting.append(self._pool.submit(self._searched, *args))
            if len(waiting) > 2 * self._threads:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()

    @staticmethod
    def _searched(
        name: str, tile: Blocks, first: int, wanted: DType, importance: Array | None
    ) -> Array:
        x = np.ascontiguousarray(tile.dequantise())
        if not np.isfinite(x).all():
            check_finite(tile, name, first)
        made = encode_blocks(x, wanted, importance)
        check_range(Blocks(made, wanted, tile.elements), name, first)
        return made

    def _converted(self, name: str, values: Blocks, wanted: DType) -> Iterator[Array]:
        step = max(1, _SLAB // values.elements)
        for first in range(0, len(values), step):
            slab = values[first : first + step]
            if slab.dtype.quantised:
                floats = slab.dequantise()
                slab = Blocks(floats.view(np.uint8), F32, values.elements)
            meta = Meta.of((len(slab), slab.elements), slab.dtype)
            yield self._convert(slab.raw, meta, wanted, name, first)
