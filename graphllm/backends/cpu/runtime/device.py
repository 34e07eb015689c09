"""The CPU as a device: host memory, kernels bound to operands, programs for the thread team."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....formats.quantization import check_scales
from ....graph.tensor import Dim, Meta, Var
from ....system_info import free_bytes
from ... import Bound, Header, Operand, Options, TimestampLog, kernel_context
from ..kernels.weight_packing import allocate
from .barriers import barrier_flags, is_short
from .isa import thread_count
from .jit import HEADER_WORDS, Kernel
from .step_interpreter import BARRIER, COUNTER_WORDS, ENTRY_WORDS, ONE_THREAD, TIMESTAMPS
from .thread_pool import THREAD_POOL

_ALIGN = 64


@dataclass(frozen=True)
class Launch:
    """A kernel and the 64-bit words of its argument block.

    ``joined``: a thread may begin with it before the others have finished the step's launch before.
    """

    kernel: Kernel
    words: Sequence[int]
    overlaps_previous: bool = False


class OperandRef(kernel_context.OperandRef):
    """See `graphllm.backends.kernel_context`."""

    def array(self) -> np.ndarray:
        """The values now, for an operand whose shape has no Var (a small weight, say)."""
        return _array(self.operand)


class KernelContext(kernel_context.KernelContext[OperandRef]):
    """One step as a kernel builder receives it; see `graphllm.backends.kernel_context`.

    A builder returns a `Launch`, or several that run one after the other.
    """

    def __init__(self, bound: Bound, header: Header, threads: int) -> None:
        super().__init__(bound, header)
        self.threads = threads
        self.kept: list[np.ndarray] = []

    def ref(self, operand: Operand) -> OperandRef:
        start = int(operand.buffer.ctypes.data)
        return OperandRef(start + operand.meta.offset, operand.meta, operand)

    def live(self, dim: Dim) -> int:
        """The address of an int64 that holds the dimension's value in each run."""
        if isinstance(dim, Var):
            return int(self._header.values.ctypes.data) + 8 * self._header.slot(dim)
        return self.keep(np.array([dim], np.int64))

    def keep(self, table: np.ndarray) -> int:
        """The address of an array that lives as long as the plan."""
        self.kept.append(table)
        return int(table.ctypes.data)


class CompiledProgram:
    """Steps ready for the team: entries and argument blocks that stay where they are.

    ``launches`` and ``flags`` (see meetings.py): one for each step. ``keep``: what the argument
    blocks, which hold nothing but addresses, point at. ``short``: see `Team.run`.
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
        self._tickets = np.zeros((count, COUNTER_WORDS), np.int64)
        entries: list[tuple[int, int, int, int]] = []
        for index, (parts, flag) in enumerate(zip(launches, flags), 1):
            for launch in parts:
                tickets = int(self._tickets[len(self._blocks)].ctypes.data)
                block = np.array([tickets, THREAD_POOL.control, *launch.words], np.int64)
                self._blocks.append(block)
                address = int(block.ctypes.data) + 8 * HEADER_WORDS
                if launch.overlaps_previous:
                    entries[-1] = (*entries[-1][:3], flag & ONE_THREAD)
                # Parts of a step wait for each other, unless one thread runs them all.
                between = flag & ONE_THREAD or BARRIER
                entries.append((launch.kernel.address, address, -1, between))
            address, words = entries.pop()[:2] if parts else (0, 0)
            entries.append((address, words, index, flag))
        self._entries = np.array(entries, np.int64).reshape(-1, ENTRY_WORDS)
        self._size = len(flags)
        where = int(self._entries.ctypes.data), int(self._tickets.ctypes.data)
        self._words = np.array([where[0], len(entries), 0, where[1], count], np.int64)
        self._address = int(self._words.ctypes.data)

    def run(self, log: TimestampLog | None) -> None:
        """See `graphllm.backends.Segment`. Without a log the program has no place for times."""
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
    """Host memory and a team of threads. ``progress``, if set, is told of kernels to compile."""

    memory = "host"

    def __init__(self, options: Options) -> None:
        self.threads = thread_count(options)
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def alloc(self, nbytes: int) -> np.ndarray:
        """A zeroed uint8 array, aligned to 64 bytes; a large one in huge pages if possible."""
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
        """See `graphllm.backends.Device`: nothing runs ahead."""

    def prepare(
        self, pack: Callable[[np.ndarray, Meta], np.ndarray] | None, raw: np.ndarray, meta: Meta
    ) -> np.ndarray:
        """The stored bytes where they lie (mapped, if they are), or as ``pack`` rearranges them."""
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
        """A program for the team. Compiles, or loads from the cache, the kernels that it needs."""
        contexts = [KernelContext(step, header, self.threads) for step in steps]
        launches = []
        for step, place in zip(steps, contexts):
            made = step.kernel.build(place)
            launches.append([made] if isinstance(made, Launch) else list(made))
        pending = {k: None for k in _kernels(launches) if not k.compiled}
        total = len(pending)
        for done, each in enumerate(pending):
            loaded = each.load()
            self.progress("loading kernels" if loaded else "compiling kernels", done, total)
            if not loaded:
                each.compile()
        if total:
            self.progress("compiling kernels", total, total)
        keep = (list(steps), contexts, header)
        return CompiledProgram(self.threads, launches, barrier_flags(steps), keep, is_short(steps))


def _array(operand: Operand) -> np.ndarray:
    """The operand, whose shape has no Var, as an array; a block format as uint8 rows."""
    shape, strides, kind = kernel_context.numpy_layout(operand.meta)
    if 0 in shape:  # NumPy checks offsets against a buffer that may hold nothing
        return np.empty(shape, kind)
    return np.ndarray(shape, kind, operand.buffer.data, operand.meta.offset, strides)
