"""Row formats: weights of one byte per element, with scales per row or per 128 elements of a row.

Published W8A8 and FP8 checkpoints store matrices [N, K] in int8 or e4m3 with one float scale per
tensor, per output channel (row) or per tile of 128 x 128. Here the scales travel with the rows, so
that rows can be sliced and joined like those of any other format. A row of K elements is stored in
two planes::

    q   K int8 or e4m3
    d   float32, one for the row, or one for each 128 elements

x = d * q. The scale of a tensor or tile is repeated for each of its rows. The format of a matrix
also determines that of the activations which it is multiplied with, as those checkpoints state it:
`RowFormat.activation`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph.dtype import DTYPES, DType, register
from .activations import A8_ROW, E4M3, F8_128, F8_ROW, quantise_act, scaled, split_act
from .block_format import BLOCK_FORMATS, WEIGHT_FORMATS

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class RowFormat:
    """A row format.

    Attributes:
        dtype: name and size.
        element: type of q, int8 or `E4M3`.
        activation: format of the quantised activations. Its blocks are those of the weights.
        fallback: format that quantisation uses instead for rows that are not whole blocks.
    """

    dtype: DType
    element: np.dtype
    activation: DType
    fallback: str = "bf16"

    @property
    def name(self) -> str:
        return self.dtype.name

    @property
    def scaled_by_row(self) -> bool:
        """Whether there is one scale for the row; else there is one for each block."""
        return self.dtype.tail > 0

    def split(self, raw: Array) -> tuple[Array, Array]:
        """Return q [rows, K] and d float32 [rows, scales] of uint8 [rows, row_bytes], as views."""
        elements = self.elements(raw.shape[1])
        return raw[:, :elements].view(self.element), raw[:, elements:].view("<f4")

    def elements(self, row_bytes: int) -> int:
        """Number of elements of a row of ``row_bytes``."""
        return (row_bytes - self.dtype.tail) // self.dtype.nbytes * self.dtype.block

    def join(self, q: Array, d: Array) -> Array:
        """Return rows, uint8 [rows, row_bytes], of their planes; see `split`."""
        made = np.empty((len(q), self.dtype.row_nbytes(q.shape[1])), np.uint8)
        elements, scales = self.split(made)
        elements[:], scales[:] = q, d
        return made

    def decode(self, raw: Array) -> Array:
        """Return uint8 [rows, row_bytes] as float32 [rows, K]: d * q, rounded once."""
        return scaled(*self.split(raw))

    def encode(self, x: Array) -> Array:
        """Quantise finite float32 [rows, K] to uint8 [rows, row_bytes], as activations are."""
        raw = quantise_act(x, self.activation)
        return self.join(*split_act(raw, self.activation, x.shape[1])[:2])


ROW_FORMATS: dict[str, RowFormat] = {}  # by name, in order of declaration


def declare(dtype: DType, element: np.dtype, activation: DType) -> DType:
    """Declare a row format and return its dtype; see `RowFormat`."""
    made = ROW_FORMATS[dtype.name] = RowFormat(register(dtype), element, activation)
    WEIGHT_FORMATS[dtype.name] = made.dtype
    return made.dtype


W8A8 = declare(DType("w8a8", 32, 32, tail=4), np.dtype(np.int8), A8_ROW)
FP8 = declare(DType("fp8", 32, 32, tail=4), E4M3, F8_ROW)
FP8_128 = declare(DType("fp8_128", 128, 128 + 4), E4M3, F8_128)


def activation_of(weights: DType) -> DType | None:
    """Return the format of the quantised activations that a quantised weight format is multiplied
    with; None for a block format that only floats are multiplied with."""
    block = BLOCK_FORMATS.get(weights.name)
    return block.activation if block else ROW_FORMATS[weights.name].activation


def fallback_of(weights: DType) -> DType | None:
    """Return the format that replaces a quantised one for rows that are not whole blocks of it;
    None if none is declared."""
    block, row = BLOCK_FORMATS.get(weights.name), ROW_FORMATS.get(weights.name)
    name = block.fallback if block else row.fallback if row else None
    return DTYPES[name] if name else None
