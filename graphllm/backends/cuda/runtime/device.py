"""The CUDA device: operands with addresses, kernel launches, and segments of steps.

CuPy is imported only when a device is opened, so kernels can be registered, and their sources
compiled, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....debug import debug
from ....formats.quantization import check_scales
from ....graph.tensor import Dim, Meta, Var
from ... import Bound, Header, Operand, Options, kernel_context
from ...kernel_context import OperandRef
from . import pool_layout
from .dependencies import InFlight, Ordering, Region, region, written
from .source import load_or_compile_all
from .work import MOSTLY_SHARED, HostCall, Launch, Work

# Runs of plans with more rows are throttled: more than decode of 256 sequences, whose q_start has
# one element more.
MAX_UNTHROTTLED_ROWS = 257


@dataclass(frozen=True)
class SegmentFacts:
    """What a builder may know of the other steps of its segment.

    Attributes:
        ops: their ops.
        rows: rows that a result has at most, if the number of rows varies.
    """

    ops: frozenset[str]
    rows: int


class KernelContext(kernel_context.KernelContext[OperandRef]):
    """One step as a kernel builder receives it; see `graphllm.backends.kernel_context`.

    A builder returns a `Launch` or a `HostCall`, or a list of them that run in order.
    """

    def __init__(
        self, bound: Bound, header: Header, device: CudaDevice, in_flight: InFlight,
        segment: SegmentFacts,
    ) -> None:  # fmt: skip
        super().__init__(bound, header)
        self.device, self.segment = device, segment
        self.writes = written(bound)
        self._in_flight = in_flight

    @property
    def deterministic(self) -> bool:
        """Whether results must not depend on the number of tokens, see `Options`."""
        return self.device.options.deterministic

    def ref(self, operand: Operand) -> OperandRef:
        """The operand with its address; host operands (of copies) are NumPy arrays."""
        buffer = operand.buffer
        start = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.address
        return OperandRef(int(start) + operand.meta.offset, operand.meta, operand)

    def with_operand(self, name: str, ref: OperandRef) -> KernelContext:
        """A copy of the context with another operand called ``name``."""
        made = copy(self)
        made._operands = {**self._operands, name: ref}
        return made

    def live_address(self, dim: Dim) -> int:
        """Device address of an int64 that holds the dimension's value in each run."""
        if isinstance(dim, Var):
            return self.device.live(self._header, dim)
        return self.constant(np.array([dim], np.int64))

    def readable_before_wait(self, *names: str) -> bool:
        """Whether a kernel of this step may read these operands before it waits.

        True if neither the step itself nor a launch that may still run when the step starts writes
        them; see `dependencies`. Operands that were omitted do not count.
        """
        refs = [self._operands[name] for name in names]
        regions = [region(ref.operand) for ref in refs if ref is not None]
        own = any(wanted.overlaps(each) for wanted in regions for each in self.writes)
        return not own and not self._in_flight.writes_any(regions)

    def live_value(self, dim: Dim) -> int:
        """Value of the dimension in the present run, for a `HostCall`."""
        return self._header.live(dim)

    @staticmethod
    def upper_bound(dim: Dim) -> int:
        """Largest value of the dimension, for which grids are made."""
        return dim.hi if isinstance(dim, Var) else dim

    def constant(self, table: np.ndarray) -> int:
        """Device address of a copy of ``table``; equal tables share one."""
        return self.device.constant(table)


class DevicePack:
    """Packing of a weight that runs on the GPU, as the ``pack`` of a kernel.

    Attributes:
        nbytes: Meta -> bytes of the packed form.
        launches: (address of the stored bytes, in dense rows; address of the zeroed packed form;
            Meta) -> launches that fill it.
    """

    def __init__(
        self,
        nbytes: Callable[[Meta], int],
        launches: Callable[[int, int, Meta], Sequence[Launch]],
    ) -> None:
        self.nbytes, self.launches = nbytes, launches

    def __call__(self, raw: np.ndarray, meta: Meta) -> np.ndarray:
        raise TypeError("this weight is packed on the GPU")


class CudaDevice:
    """One GPU: its memory, its stream, loaded modules, and constants that plans share."""

    def __init__(self, options: Options, index: int = 0) -> None:
        from . import launch, staging

        self.memory, self.options = f"cuda:{index}", options
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None
        self.gpu = launch.Gpu(index)
        self._stager = staging.Stager(self.gpu)
        self._checks = ThreadPoolExecutor(1, "graphllm-weights")
        self._constants: dict[bytes, Any] = {}
        self._header: Any = None

    # -- memory
    def alloc(self, nbytes: int) -> Any:
        """A zeroed buffer, aligned to 256 bytes.

        Raises:
            OutOfMemory: the GPU has less memory left.
        """
        from .memory import Buffer

        self.gpu.use()
        return Buffer(nbytes, self.gpu.stream)

    def free(self) -> int | None:
        """Bytes that the driver can still allocate."""
        from .memory import free_bytes

        self.gpu.use()
        return free_bytes()

    def writer(self, values: Sequence[tuple[Operand, np.ndarray]]) -> Callable[[], None]:
        """See `graphllm.backends.Device`."""
        apart = any(pool_layout.scales_are_apart(operand.meta) for operand, _ in values)
        if apart or not all(data.flags.c_contiguous for _, data in values):
            return lambda: self._stager.sender(self._parts(values))()  # of copies of the data
        return self._stager.sender(self._parts(values))

    @staticmethod
    def _parts(values: Sequence[tuple[Operand, np.ndarray]]) -> list[tuple[np.ndarray, int]]:
        """The bytes of the data as the GPU stores them, views if possible, and their addresses."""
        parts = []
        for operand, data in values:
            assert operand.meta.contiguous, operand.meta
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            if pool_layout.scales_are_apart(operand.meta):
                raw = pool_layout.to_gpu(operand.meta, raw)
            parts.append((raw, operand.buffer.address + operand.meta.offset))
        return parts

    def copy_out(self, operand: Operand) -> np.ndarray:
        """A dense copy of the operand; of a block format its bytes, uint8 [rows, n]."""
        self.gpu.use()
        shape, strides, kind = kernel_context.numpy_layout(operand.meta)
        if 0 in shape:
            return np.empty(shape, kind)
        start = operand.meta.offset
        raw = operand.buffer[start : start + kernel_context.span(operand.meta)]
        dense = np.array(np.ndarray(shape, kind, raw.data, 0, strides), order="C")
        apart = pool_layout.scales_are_apart(operand.meta)
        return pool_layout.from_gpu(operand.meta, dense) if apart else dense

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """See `graphllm.backends.Device`."""
        return lambda: self.copy_out(operand)

    def ring(self, operand: Operand) -> Any:
        """See `graphllm.backends.Device`."""
        from .staging import Ring

        self.gpu.use()
        return Ring(operand.buffer.address + operand.meta.offset, operand.meta, self.gpu)

    def prepare(
        self, pack: Callable[[np.ndarray, Meta], np.ndarray] | None, raw: np.ndarray, meta: Meta
    ) -> Any:
        """The weight's buffer on the GPU, with its stored bytes or packed by ``pack``."""
        if isinstance(pack, DevicePack):
            return self._packed(pack, raw, meta)
        checks = self._checks.submit(check_scales, raw, meta.dtype)  # runs during the transfer
        stored = pack(raw, meta) if pack is not None else raw
        buffer = self.put(np.ascontiguousarray(stored).reshape(-1).view(np.uint8))
        checks.result()
        return buffer

    def put(self, data: np.ndarray) -> Any:
        """A new buffer with a copy of uint8 ``data``."""
        buffer = self.alloc(data.nbytes)
        self._stager.send(data, buffer.address)
        return buffer

    def _packed(self, pack: DevicePack, raw: np.ndarray, meta: Meta) -> Any:
        source, buffer = self.prepare(None, raw, meta), self.alloc(pack.nbytes(meta))
        for launch in pack.launches(source.address, buffer.address, meta):
            self.gpu.prepare(launch)()
        self.gpu.stream.synchronize()  # the stored form is freed on return
        return buffer

    def constant(self, table: np.ndarray) -> int:
        """Address of a copy of ``table`` that lives as long as the device."""
        raw = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        key = raw.tobytes()
        if key not in self._constants:
            self._constants[key] = self.put(raw)
        return self._constants[key].address

    def live(self, header: Header, var: Var) -> int:
        """Address of the live value of ``var``, which `Segment.run` updates."""
        if self._header is None:
            self._header = self.gpu.header(self.alloc(header.values.nbytes), header)
        assert self._header.header is header, "a device serves one executor"
        return self._header.address + 8 * header.slot(var)

    def transfer(self, source: int, target: int, nbytes: int, to_host: bool) -> None:
        """Copy between host and GPU in stream order; a copy to the host is waited for."""
        self.gpu.transfer(source, target, nbytes, to_host)

    # -- steps
    def build(self, steps: Sequence[Bound], header: Header) -> Any:
        """The steps as a `segment.Segment`, with all modules that it needs compiled and loaded."""
        from .segment import Segment

        self.gpu.use()
        work, contexts = self.work(steps, header)
        self._load([w for part in work for w in part if isinstance(w, Launch)])
        rows = [o.meta.rows for step in steps for o in (*step.inputs, step.out) if o is not None]
        large = any(row.hi > MAX_UNTHROTTLED_ROWS for row in rows if isinstance(row, Var))
        return Segment(
            self.gpu, work, header, lambda: self._header, large, self._load,
            (list(steps), contexts),
        )  # fmt: skip

    def work(
        self, steps: Sequence[Bound], header: Header
    ) -> tuple[list[list[Work]], list[KernelContext]]:
        """The launches and host calls of each step of a segment, and the steps' contexts."""
        in_flight, work, contexts = InFlight(), [], []
        rows = [step.out.meta.rows for step in steps if step.out is not None]
        segment = SegmentFacts(
            frozenset(step.node.op for step in steps),
            max((row.hi for row in rows if isinstance(row, Var)), default=0),
        )
        for step in steps:
            context = KernelContext(step, header, self, in_flight, segment)
            made = step.kernel.build(context)
            parts = [made] if isinstance(made, (Launch, HostCall)) else list(made)
            work.append([_ordered(part, context.writes, in_flight) for part in parts])
            contexts.append(context)
        return _with_one_share(work), contexts

    def _load(self, launches: Sequence[Launch]) -> None:
        """Load the launches' modules, and report progress on those that must be compiled."""
        wanted = dict.fromkeys((w.function.module, w.mostly_shared) for w in launches)
        pending = [each for each in wanted if not self.gpu.is_loaded(*each)]
        modules = dict.fromkeys(made for made, _ in pending)
        new = [made for made in modules if not self.gpu.is_cached(made)]
        for done, _ in enumerate(load_or_compile_all(new, self.gpu.arch)):
            self.progress("compiling kernels", done, len(new))
        for made, mostly_shared in pending:
            debug(4, f"{made}:\n{made.text}")
            self.gpu.load(made, mostly_shared)
        if new:
            self.progress("compiling kernels", len(new), len(new))


def _with_one_share(work: list[list[Work]]) -> list[list[Work]]:
    """All launches with `MOSTLY_SHARED` if one has it: a multiprocessor changes its share of shared
    memory only when it is idle, so a launch with another share could not overlap."""
    launches = [w for part in work for w in part if isinstance(w, Launch)]
    if not any(w.mostly_shared for w in launches):
        return work

    def shared(w: Work) -> Work:
        return replace(w, shared_percent=MOSTLY_SHARED) if isinstance(w, Launch) else w

    return [[shared(w) for w in part] for part in work]


def _ordered(work: Work, writes: tuple[Region, ...], in_flight: InFlight) -> Work:
    """The next work of a segment, without overlap if it prefetches what is still being written."""
    if isinstance(work, HostCall):
        in_flight.drain()  # the next launch is the first of a sequence, which does not overlap
        return work
    if 0 in work.grid:
        return work
    if in_flight.writes_any(region(ref.operand) for ref in work.prefetches):
        work = replace(work, programmatic=False)
    in_flight.add(writes, Ordering(work.programmatic, work.triggers_after_wait))
    return work
