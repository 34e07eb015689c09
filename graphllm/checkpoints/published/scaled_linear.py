"""A linear stored as int8 or e4m3 with float scales, and its joining into a row format."""

from __future__ import annotations

import numpy as np

from ...formats import ROW_FORMATS
from ...graph.dtype import DType
from ...weights.safetensors import Safetensors
from .stored_linear import Array, StoredLinear

WEIGHT = "weight"
TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"  # what has a scale of its own
TILE = 128  # rows and columns of a block
_MAX_COLUMNS = 1 << 17  # of int8: 127 * 127 times it is below 2^31
_STEP = 1 << 22  # elements that are checked and joined at once


class ScaledLinear(StoredLinear):
    """A weight [N, K] of one byte per element, with one scale for all, for each row, or for each
    block of 128 x 128.

    Args:
        file: The stored tensors.
        module: Path of the module.
        dtype: The row format of the weight.
        scale: Suffix of the tensor of scales, which multiply the elements.
        strategy: `TENSOR`, `CHANNEL` or `BLOCK`.
    """

    def __init__(
        self, file: Safetensors, module: str, dtype: DType, scale: str, strategy: str
    ) -> None:
        super().__init__(file, module, (WEIGHT, scale))
        self.dtype, self._scale = dtype, scale
        self._form = ROW_FORMATS[dtype.name]
        stored = "i8" if self._form.element == np.int8 else "f8_e4m3"
        shape = self.tensor(WEIGHT, None, stored).shape
        if len(shape) != 2 or 0 in shape:
            raise self.error(WEIGHT, f"has shape {list(shape)}, which is no matrix")
        if shape[1] % dtype.block:
            text = f"is a weight of {shape[0]} x {shape[1]}, whose rows are not whole blocks of"
            raise self.error(WEIGHT, f"{text} {dtype.block}")
        if self._form.element == np.int8 and shape[1] >= _MAX_COLUMNS:
            raise self.error(WEIGHT, f"has rows of {shape[1]}, too long for int32 sums")
        self.shape = (shape[0], shape[1])
        allowed, info = self._scale_shapes(strategy), file.tensors.get(self.name(scale))
        shape = info.shape if info and info.shape in allowed else allowed[0]
        self.check_floats(scale, shape)

    def _scale_shapes(self, strategy: str) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the tensor of scales may have."""
        rows, columns = self.shape
        if strategy == TENSOR:
            return (1,), (), (1, 1)
        if strategy == CHANNEL:
            return (rows, 1), (rows,)
        return ((-(-rows // TILE), columns // TILE),)

    def raw(self) -> Array:
        """See `StoredLinear.raw`; joined by tiles of rows."""
        rows, columns = self.shape
        d = self._row_scales()
        stored = self.file.raw(self.name(WEIGHT)).view(np.uint8).reshape(self.shape)
        made = np.empty((rows, self.dtype.row_nbytes(columns)), np.uint8)
        step = max(1, _STEP // columns)
        for start in range(0, rows, step):
            tile = slice(start, start + step)
            if self._form.element != np.int8:
                self._check_numbers(stored[tile], start)
            made[tile] = self._form.join(stored[tile].view(self._form.element), d[tile])
        made.flags.writeable = False
        return made

    def _row_scales(self) -> Array:
        """Return the scales of each row, float32 [N, n], which must be finite and positive."""
        scales = self.floats(self._scale)
        most = np.finfo(np.float32).max / (127 if self._form.element == np.int8 else 448)
        bad = ~np.isfinite(scales) | (scales <= 0) | (scales > most)
        if bad.any():
            at = [int(i) for i in np.argwhere(np.atleast_1d(bad))[0]]
            value = str(np.atleast_1d(scales)[tuple(at)]).replace("nan", "NaN")
            text = (
                f"element {at} is {value}: a scale must be finite and positive, at most {most:.3g}"
            )
            raise self.error(self._scale, text)
        rows = self.shape[0]
        if self._form.scaled_by_row:
            return np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
        return np.repeat(scales, TILE, axis=0)[:rows]

    def _check_numbers(self, tile: Array, first: int) -> None:
        """Raise ModelFileError for the first row that has a NaN; e4m3 has no infinities."""
        nan = (tile & 0x7F == 0x7F).any(axis=1)
        if nan.any():
            raise self.error(WEIGHT, f"row {first + int(nan.argmax())} has a NaN")
