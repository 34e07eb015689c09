"""The reference backend: the NumPy body of every op, as declared.

It supports every unfused op and is the last in the order. It is also the oracle for the other
backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..backends.alignment import ALIGN
from ..errors import GraphError
from ..formats.quantization import Blocks, check_scales
from ..graph.tensor import Meta, Tensor, Var
from ..ops import OpDef, get
from ..system_info import free_bytes
from . import ANY, Backend, Bound, Header, Kernel, Operand, Options, TimestampLog


@cache
def _kernel(op: OpDef) -> Kernel:
    layout = dict.fromkeys((*op.params, "rest"), ANY)
    return Kernel("reference", op.name, op.name, op.reference, layout=layout)


class _Reference(Backend):
    def _find(self, node: Tensor, options: Options) -> Kernel | str:
        if get(node.op).fusion:
            return "the reference runs fused ops unfused"
        return _kernel(get(node.op))


def _view(buffer: np.ndarray, meta: Meta, rows: int) -> Any:
    """View the first ``rows`` rows of an operand in ``buffer`` as an array, or as Blocks."""
    shape = (rows, *meta.inner) if meta.shape else ()
    if 0 in shape:  # NumPy would check the offset against an empty buffer
        buffer, meta = np.zeros(0, np.uint8), Meta.of(shape, meta.dtype)
    if meta.dtype.numpy is not None:
        return np.ndarray(shape, meta.dtype.numpy, buffer, meta.offset, meta.strides)
    if meta.ndim < 2 or not meta.inner_contiguous:
        raise GraphError(f"{meta} is not rows of blocks")
    wide = (*shape[:-1], meta.dtype.row_nbytes(shape[-1]))
    raw: np.ndarray = np.ndarray(wide, np.uint8, buffer, meta.offset, (*meta.strides[:-1], 1))
    return Blocks(raw, meta.dtype, shape[-1])


def _rows(meta: Meta) -> int:
    assert isinstance(meta.rows, int), meta
    return meta.rows


class _Live:
    """View of an operand with its live shape; created once if the shape has no Var."""

    def __init__(self, operand: Operand, header: Header) -> None:
        self.operand, self.header = operand, header
        rows = operand.meta.rows
        if isinstance(rows, Var):
            header.slot(rows)
        self.fixed = None if isinstance(rows, Var) else _view(operand.buffer, operand.meta, rows)

    def __call__(self) -> Any:
        if self.fixed is not None:
            return self.fixed
        meta = self.operand.meta
        return _view(self.operand.buffer, meta, self.header.live(meta.rows))


class _Call:
    """One step: calls the NumPy body with views of the operands."""

    def __init__(self, step: Bound, header: Header) -> None:
        self.body, self.attrs = step.kernel.build, step.attrs
        self.inputs = [i and _Live(i, header) for i in step.inputs]
        in_place = get(step.node.op).alias(step.node) is not None
        self.out = None if in_place else _Live(step.out, header)

    def __call__(self) -> None:
        result = self.body(*(i and i() for i in self.inputs), **self.attrs)
        if self.out is None:
            return
        out = self.out()
        if isinstance(out, Blocks):
            out.raw[...] = result.raw
        else:
            out[...] = result


class _Segment:
    def __init__(self, steps: Sequence[Bound], header: Header) -> None:
        self.calls = [_Call(step, header) for step in steps]

    def run(self, log: TimestampLog | None) -> None:
        with np.errstate(all="ignore"):  # NaN and infinity are valid results, as on other backends
            self._run(log)

    def _run(self, log: TimestampLog | None) -> None:
        if log is None:
            for call in self.calls:
                call()
            return
        times = np.zeros(len(self.calls) + 1, np.int64)
        times[0] = time.perf_counter_ns()
        for index, call in enumerate(self.calls, 1):
            call()
            times[index] = time.perf_counter_ns()
        log.runs.append((times, times[:-1]))


class HostDevice:
    """Host memory: buffers are uint8 arrays, steps are NumPy calls."""

    memory = "host"

    def __init__(self) -> None:
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def alloc(self, nbytes: int) -> np.ndarray:
        """Return a zeroed buffer that is aligned to 64 bytes."""
        padded = np.zeros(nbytes + ALIGN, np.uint8)
        start = -padded.ctypes.data % ALIGN
        return padded[start : start + nbytes]

    def free(self) -> int | None:
        """See `graphllm.backends.contract.Device`."""
        return free_bytes()

    def writer(self, values: Sequence[tuple[Operand, np.ndarray]]) -> Callable[[], None]:
        """See `graphllm.backends.contract.Device`."""

        def write() -> None:
            for operand, data in values:
                view = _view(operand.buffer, operand.meta, _rows(operand.meta))
                target = view.raw if isinstance(view, Blocks) else view
                target[...] = data.reshape(target.shape)

        return write

    def copy_out(self, operand: Operand) -> np.ndarray:
        """Return a contiguous copy of the operand; for a block format uint8 [rows, row_bytes]."""
        view = _view(operand.buffer, operand.meta, _rows(operand.meta))
        return np.array(view.rows() if isinstance(view, Blocks) else view, order="C")

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """See `graphllm.backends.contract.Device`."""
        return lambda: self.copy_out(operand)

    def ring(self, operand: Operand) -> None:
        """See `graphllm.backends.contract.Device`; runs are synchronous, so there is no ring."""

    def prepare(
        self,
        pack: Callable[[np.ndarray, Meta], np.ndarray] | None,
        raw: np.ndarray,
        meta: Meta,
    ) -> np.ndarray:
        """Return the stored bytes, packed if there is ``pack``; without a copy if contiguous."""
        check_scales(raw, meta.dtype)
        if pack is not None:
            raw = pack(raw, meta)
        return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)

    def build(self, steps: Sequence[Bound], header: Header) -> _Segment:
        return _Segment(steps, header)


BACKEND = _Reference("reference", lambda: (True, "NumPy"), lambda options: HostDevice())
