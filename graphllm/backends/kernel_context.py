"""Arguments of kernel builders: operands with addresses, and selection rules that backends share.

The device of a backend derives its own `OperandRef` and `KernelContext` from these classes, and
defines what an address is and where live values and constants are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from ..graph.dtype import DType
from ..graph.fused_op import results
from ..graph.tensor import WEIGHT, Meta, Tensor
from ..ops import get
from . import Bound, Header, Operand, Options


@dataclass(frozen=True)
class OperandRef:
    """An operand as a kernel receives it: address of the first element, and layout."""

    address: int
    meta: Meta
    operand: Operand

    @property
    def dtype(self) -> DType:
        return self.meta.dtype

    @property
    def row_stride(self) -> int:
        """Bytes from one row (index of axis 0) to the next."""
        return self.meta.strides[0] if self.meta.ndim else 0

    @property
    def width(self) -> int:
        """Elements per row: product of all axes but the first."""
        return prod(self.meta.inner)


S = TypeVar("S", bound=OperandRef)


class KernelContext(Generic[S]):
    """One step as a kernel builder receives it; operands by name as ``ctx.x`` or ``ctx.op("x")``.

    Attributes:
        inputs: all operands in order, None where one is omitted.
        rest: operands of a variadic op beyond the named ones.
        out: the result.
        attrs: attributes of the node.
        node: the node.
        scratch: address of the step's workspace; 0 if it has none.
    """

    def __init__(self, bound: Bound, header: Header) -> None:
        op = get(bound.node.op)
        count = len(op.params)
        self.inputs = [None if o is None else self.ref(o) for o in bound.inputs]
        refs = self.inputs + [None] * (count - len(self.inputs))
        self._operands = dict(zip(op.params, refs))
        self._header = header
        self.rest = [ref for ref in refs[count:] if ref is not None]
        self.out = self.ref(bound.out)
        self.attrs = bound.attrs
        self.node = bound.node
        self.scratch = self.ref(bound.scratch).address if bound.scratch is not None else 0

    def ref(self, operand: Operand) -> S:
        """Return the operand with its address on this device."""
        raise NotImplementedError

    def op(self, name: str) -> S | None:
        """Return the operand called ``name``, None if it is omitted."""
        return self._operands[name]

    def need(self, name: str) -> S:
        """Return the operand called ``name``, which must not be omitted."""
        ref = self._operands[name]
        assert ref is not None, name
        return ref

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_operands"][name]
        except KeyError:
            raise AttributeError(name) from None

    def address(self, name: str) -> int:
        """Return the address of an operand, 0 if it is omitted."""
        return address(self._operands[name])

    @property
    def results(self) -> list[S]:
        """Results of a fused op that are in the op's buffer, in order."""
        views = [v for v in results(self.node) if v.base is self.node]
        base, start = self.out.operand, self.node.meta.offset
        metas = [replace(v.meta, offset=base.meta.offset + v.meta.offset - start) for v in views]
        return [self.ref(Operand(meta, base.buffer)) for meta in metas]


def address(ref: OperandRef | None) -> int:
    """Return the address of an operand, 0 for None."""
    return ref.address if ref is not None else 0


def numpy_layout(meta: Meta) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype]:
    """Return shape, strides and dtype of an array over an operand whose shape has no Var.

    A block format is viewed as rows of uint8.
    """
    shape: tuple[Any, ...] = meta.shape
    if meta.dtype.numpy is not None:
        return shape, meta.strides, meta.dtype.numpy
    wide = (shape[0], prod(shape[1:-1]) * meta.dtype.row_nbytes(shape[-1]))
    return wide, (*meta.strides[:1], 1), np.dtype(np.uint8)


def span(meta: Meta) -> int:
    """Return the bytes from the first to past the last element; the shape has no Var."""
    shape, strides, kind = numpy_layout(meta)
    return 0 if 0 in shape else sum((d - 1) * s for d, s in zip(shape, strides)) + kind.itemsize


# -------------------------------------------------------------------------------- selection rules


def requires_row(node: Tensor, options: Options) -> str | None:
    """Selection rule of kernels whose second operand is one row, or one element, for all rows."""
    a, b = node.sources
    return None if a.shape != b.shape else "b has as many rows as a"


def requires_equal_shapes(node: Tensor, options: Options) -> str | None:
    """Selection rule of kernels of two operands with equal shapes."""
    a, b = node.sources
    return None if a.shape == b.shape else "b is one row"


def requires_constant_factors(node: Tensor, options: Options) -> str | None:
    """Selection rule of kernels that read the values of ``factors`` when they are built."""
    factors = node.src[get(node.op).params.index("factors")]
    fits = factors is None or factors.base.op == WEIGHT
    return None if fits else "factors is not a weight"
