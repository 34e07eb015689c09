"""The CPU as a device: host memory, kernels bound to operands, programs for the thread pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ....graph.tensor import Dim, Meta, Var
from ....system_info import free_bytes
from ... import Bound, Header, Operand, Options, kernel_context
from ..kernels.weight_packing import check_scales
from .barriers import barrier_flags, is_short
from .cores import thread_count
from .host_memory import allocate
from .program import CompiledProgram, Launch, kernels_of
from .thread_pool import THREAD_POOL

_ALIGN = 64


class OperandRef(kernel_context.OperandRef):
    """See `graphllm.backends.kernel_context`."""

    def array(self) -> np.ndarray:
        """Present values of an operand whose shape has no Var, such as a small weight."""
        return _array(self.operand)


class KernelContext(kernel_context.KernelContext[OperandRef]):
    """One step as a kernel builder receives it; see `graphllm.backends.kernel_context`.

    A builder returns a `Launch`, or several, which run in order.
    """

    def __init__(self, bound: Bound, header: Header, threads: int) -> None:
        super().__init__(bound, header)
        self.threads = threads
        self.kept: list[np.ndarray] = []

    def ref(self, operand: Operand) -> OperandRef:
        start = int(operand.buffer.ctypes.data)
        return OperandRef(start + operand.meta.offset, operand.meta, operand)

    def live(self, dim: Dim) -> int:
        """Address of an int64 that holds the value of the dimension during each run."""
        if isinstance(dim, Var):
            return int(self._header.values.ctypes.data) + 8 * self._header.slot(dim)
        return self.keep(np.array([dim], np.int64))

    def keep(self, table: np.ndarray) -> int:
        """Keep an array alive as long as the plan, and return its address."""
        self.kept.append(table)
        return int(table.ctypes.data)


class CpuDevice:
    """Host memory and the thread pool.

    ``progress``, if set, is called with (activity, done, total) while kernels are prepared.
    """

    memory = "host"

    def __init__(self, options: Options) -> None:
        self.threads = thread_count(options)
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def alloc(self, nbytes: int) -> np.ndarray:
        """Zeroed uint8 array, aligned to 64 bytes; in huge pages if it is large and they exist."""
        return allocate(nbytes)

    def free(self) -> int | None:
        """See `graphllm.backends.Device`."""
        return free_bytes()

    def writer(self, values: Sequence[tuple[Operand, np.ndarray]]) -> Callable[[], None]:
        """See `graphllm.backends.Device`."""
        views = [(_array(operand), data) for operand, data in values]

        def write() -> None:
            for view, data in views:
                view[...] = data.reshape(view.shape)

        return write

    def copy_out(self, operand: Operand) -> np.ndarray:
        return _array(operand).copy()

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """See `graphllm.backends.Device`."""
        return _array(operand).copy

    def ring(self, operand: Operand) -> None:
        """See `graphllm.backends.Device`; the CPU never runs ahead of the host."""

    def prepare(
        self, pack: Callable[[np.ndarray, Meta], np.ndarray] | None, raw: np.ndarray, meta: Meta
    ) -> np.ndarray:
        """Return the stored bytes themselves (mapped if they are), or rearranged by ``pack``, which
        may return them, too."""
        if pack is None:
            check_scales(raw, meta.dtype)
            return raw
        packed = pack(raw, meta)
        if packed is raw:
            return raw
        packed = packed.reshape(-1).view(np.uint8)
        if packed.ctypes.data % _ALIGN == 0:
            return packed
        aligned = self.alloc(packed.nbytes)
        aligned[:] = packed
        return aligned

    def build(self, steps: Sequence[Bound], header: Header) -> CompiledProgram:
        """Build a program; compile the kernels it needs, or load them from the cache."""
        contexts = [KernelContext(step, header, self.threads) for step in steps]
        launches = []
        for step, context in zip(steps, contexts):
            built = step.kernel.build(context)
            launches.append([built] if isinstance(built, Launch) else list(built))
        needed = dict.fromkeys([*kernels_of(launches), *THREAD_POOL.kernels])
        missing = [kernel for kernel in needed if not kernel.compiled and not kernel.load()]
        if missing:
            from .parallel_compiler import compile_kernels

            show = partial(self.progress, "compiling kernels")
            compile_kernels(missing, self.threads, show)
        keep = (list(steps), contexts, header)
        return CompiledProgram(self.threads, launches, barrier_flags(steps), keep, is_short(steps))


def _array(operand: Operand) -> np.ndarray:
    """View an operand whose shape has no Var as an array; a block format as rows of uint8."""
    shape, strides, kind = kernel_context.numpy_layout(operand.meta)
    if 0 in shape:  # NumPy checks the offset against a buffer that may be empty
        return np.empty(shape, kind)
    return np.ndarray(shape, kind, operand.buffer.data, operand.meta.offset, strides)
