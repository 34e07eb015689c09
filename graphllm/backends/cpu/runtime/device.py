"""The CPU as a device: host memory, kernels bound to operands, programs for the thread pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ....formats.quantization import check_scales
from ....graph.tensor import Dim, Meta, Var
from ....system_info import free_bytes
from ... import Bound, Header, Operand, Options, TimestampLog, kernel_context
from ..kernels.weight_packing import allocate
from .argument_block import argument_words
from .barriers import barrier_flags, is_short
from .cores import thread_count
from .jit import HEADER_WORDS, Kernel
from .parallel_compiler import compile_kernels
from .step_interpreter import BARRIER, COUNTER_WORDS, ONE_THREAD, TIMESTAMPS, Entry, ProgramHeader
from .thread_pool import THREAD_POOL

_ALIGN = 64


@dataclass(frozen=True)
class Launch:
    """A kernel and its argument block.

    Attributes:
        arguments: a NamedTuple that the kernel reads by name (see `argument_block`), or plain
            64-bit words.
        overlaps_previous: a thread may start this launch before the other threads have finished the
            previous launch of the step.
    """

    kernel: Kernel
    arguments: Sequence[Any]
    overlaps_previous: bool = False


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


class CompiledProgram:
    """A program for the thread pool: entries and argument blocks at fixed addresses.

    Args:
        threads: number of threads that run the program.
        launches: launches of each step.
        flags: flags of the last entry of each step; see `barriers.barrier_flags`.
        keep: objects that the addresses in the argument blocks point into.
        short: see `ThreadPool.run`.
    """

    def __init__(
        self,
        threads: int,
        launches: Sequence[Sequence[Launch]],
        flags: Sequence[int],
        keep: object,
        short: bool = False,
    ) -> None:
        self._threads, self._short = threads, short
        self._keep = (keep, _kernels(launches))
        self._blocks: list[np.ndarray] = []
        count = len(self._keep[1])
        self._counters = np.zeros((count, COUNTER_WORDS), np.int64)
        entries: list[Entry] = []
        for index, (parts, flag) in enumerate(zip(launches, flags), 1):
            for launch in parts:
                counter = int(self._counters[len(self._blocks)].ctypes.data)
                words = argument_words(launch.arguments)
                block = np.array([counter, THREAD_POOL.control, *words], np.int64)
                self._blocks.append(block)
                address = int(block.ctypes.data) + 8 * HEADER_WORDS
                if launch.overlaps_previous:
                    entries[-1] = entries[-1]._replace(flags=flag & ONE_THREAD)
                # Launches of a step wait for each other, unless one thread runs them all.
                between = flag & ONE_THREAD or BARRIER
                entries.append(Entry(launch.kernel.address, address, -1, between))
            last = entries.pop() if parts else Entry(0, 0, -1, 0)
            entries.append(last._replace(timestamp=index, flags=flag))
        self._entries = np.array(entries, np.int64).reshape(-1, len(Entry._fields))
        self._size = len(flags)
        header = ProgramHeader(
            entries=int(self._entries.ctypes.data),
            entry_count=len(entries),
            timestamps=0,
            counters=int(self._counters.ctypes.data),
            counter_count=count,
        )
        self._words = np.array(header, np.int64)
        self._address = int(self._words.ctypes.data)

    def run(self, log: TimestampLog | None) -> None:
        """See `graphllm.backends.Segment`. Without a log no timestamps are taken."""
        if log is None:
            THREAD_POOL.run(self._address, self._threads, self._short)
            return
        times = np.zeros(self._size + 1, np.int64)
        self._words[TIMESTAMPS] = int(times.ctypes.data)
        try:
            THREAD_POOL.run(self._address, self._threads, self._short)
        finally:
            self._words[TIMESTAMPS] = 0
        log.runs.append((times, times[:-1]))


def _kernels(launches: Sequence[Sequence[Launch]]) -> list[Kernel]:
    return [launch.kernel for parts in launches for launch in parts]


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

    def copy_in(self, operand: Operand, data: np.ndarray) -> None:
        view = _array(operand)
        view[...] = data.reshape(view.shape)

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
        """Return the stored bytes themselves (mapped if they are), or rearranged by ``pack``."""
        if pack is None:
            check_scales(raw, meta.dtype)
            return raw
        packed = pack(raw, meta).reshape(-1).view(np.uint8)
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
        needed = dict.fromkeys([*_kernels(launches), *THREAD_POOL.kernels])
        missing = [kernel for kernel in needed if not kernel.compiled and not kernel.load()]
        if missing:
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
