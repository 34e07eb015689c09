"""The RMS norm of one token as linears around it compute it together; see split_norm.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.arguments import ArgumentStruct
from ..runtime.device import OperandRef

ROWS = 32  # of a thread block of the linear before the norm: a block of int8
_ARGUMENT = ArgumentStruct("split_norm.cuh", "SplitNorm")


@dataclass(frozen=True)
class SplitNorm:
    """A norm, and where the linear before it leaves what those after it need.

    Attributes:
        weight: weight of the norm.
        row: address of the int8.
        squares: address of the sums of squares, float32.
        eps: the norm's.
    """

    weight: OperandRef
    row: int
    squares: int
    eps: float

    def argument(self) -> bytes:
        """The struct SplitNorm."""
        return _ARGUMENT.pack(
            weight=self.weight.address, row=self.row, squares=self.squares,
            width=int(self.weight.meta.shape[0]),  # type: ignore[arg-type]
            eps=self.eps,
        )  # fmt: skip
