"""The GPU as a device: operands as kernels see them, launches, and runs of steps as CUDA graphs.

Nothing here imports CuPy before a device is opened: what kernels are registered with can be looked
at, and their sources compiled, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ....debug import debug
from ....formats.quantization import check_scales
from ....graph.tensor import Dim, Meta, Var
from ....ops import get
from ... import Bound, Header, Operand, Options, kernel_context
from ...kernel_context import OperandRef
from .source import Function, load_or_compile_all
from .work import HostCall, Launch

MAX_GRAPH_ROWS = 64  # plans of at most so many rows are captured; larger ones are launched directly


class KernelContext(kernel_context.KernelContext[OperandRef]):
    """One step as a kernel builder receives it; see `graphllm.backends.kernel_context`.

    A builder returns a `Launch` or a `HostCall`, or a list of them that run one after the other.
    """

    def __init__(self, bound: Bound, header: Header, device: CudaDevice) -> None:
        super().__init__(bound, header)
        self.device = device

    def ref(self, operand: Operand) -> OperandRef:
        """Host operands (of transfers) are NumPy arrays, the others `memory.Buffer`."""
        buffer = operand.buffer
        start = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.address
        return OperandRef(int(start) + operand.meta.offset, operand.meta, operand)

    def live_address(self, dim: Dim) -> int:
        """The device address of an int64 that holds the dimension's value in each run."""
        if isinstance(dim, Var):
            return self.device.live(self._header, dim)
        return self.constant(np.array([dim], np.int64))

    def settled(self, *names: str) -> bool:
        """Whether the operands are inputs or states as the run finds them: see common.cuh."""
        operands = zip(get(self.node.op).params, self.node.src)
        return all(s is None or s.is_leaf for name, s in operands if name in names)

    def live_value(self, dim: Dim) -> int:
        """The dimension's value in the present run; for a `HostCall`."""
        return self._header.live(dim)

    @staticmethod
    def upper_bound(dim: Dim) -> int:
        """The largest value of the dimension: what grids are made for."""
        return dim.hi if isinstance(dim, Var) else dim

    def constant(self, table: np.ndarray) -> int:
        """The device address of a copy of ``table``; equal tables share one."""
        return self.device.constant(table)


class DevicePack:
    """A weight's rearrangement that runs on the GPU, as the ``pack`` of a kernel.

    ``nbytes(meta)``: of the packed form; ``launches(raw, packed, meta)``: what fills it, given the
    addresses of the stored bytes (dense rows) and of the result, which is zeros.
    """

    def __init__(
        self,
        nbytes: Callable[[Meta], int],
        launches: Callable[[int, int, Meta], Sequence[Launch]],
    ) -> None:
        self.nbytes, self.launches = nbytes, launches

    def __call__(self, raw: np.ndarray, meta: Meta) -> np.ndarray:
        raise TypeError("this form is made on the GPU")


class CudaDevice:
    """One GPU: its memory, one stream, modules, and what plans share."""

    def __init__(self, options: Options, index: int = 0) -> None:
        from . import launch, memory

        self.memory = f"cuda:{index}"
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None
        self.gpu = launch.Gpu(index)
        self._stager = memory.Stager(self.gpu.stream)
        self._checks = ThreadPoolExecutor(1, "graphllm-weights")
        self._constants: dict[bytes, Any] = {}
        self._header: Any = None

    # -- memory
    def alloc(self, nbytes: int) -> Any:
        """A zeroed buffer, aligned to 256 bytes. OutOfMemory: the GPU has not so much left."""
        from .memory import Buffer

        self.gpu.use()
        return Buffer(nbytes, self.gpu.stream)

    def free(self) -> int | None:
        """Bytes that the driver would give now."""
        from .memory import free_bytes

        self.gpu.use()
        return free_bytes()

    def copy_in(self, operand: Operand, data: np.ndarray) -> None:
        """Write ``data`` there; it may be changed as soon as this returns."""
        self.gpu.use()
        assert operand.meta.contiguous, operand.meta
        kind = operand.meta.dtype.numpy or np.dtype(np.uint8)
        raw = np.ascontiguousarray(data, kind).reshape(-1).view(np.uint8)
        self._stager.send(raw, operand.buffer.address + operand.meta.offset)

    def copy_out(self, operand: Operand) -> np.ndarray:
        """A dense copy of the operand; for a block format its bytes, [rows, n]."""
        self.gpu.use()
        shape, strides, kind = kernel_context.numpy_layout(operand.meta)
        if 0 in shape:
            return np.empty(shape, kind)
        start = operand.meta.offset
        raw = operand.buffer[start : start + kernel_context.span(operand.meta)]
        return np.array(np.ndarray(shape, kind, raw.data, 0, strides), order="C")

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """See `graphllm.backends.Device`."""
        return lambda: self.copy_out(operand)

    def ring(self, operand: Operand) -> Any:
        """See `graphllm.backends.Device`."""
        from .memory import Ring

        self.gpu.use()
        return Ring(operand.buffer.address + operand.meta.offset, operand.meta, self.gpu.stream)

    def prepare(
        self, pack: Callable[[np.ndarray, Meta], np.ndarray] | None, raw: np.ndarray, meta: Meta
    ) -> Any:
        """The stored bytes on the GPU, or as ``pack`` (or a `DevicePack`) rearranges them."""
        if isinstance(pack, DevicePack):
            return self._packed(pack, raw, meta)
        checks = self._checks.submit(check_scales, raw, meta.dtype)  # while they are on their way
        stored = pack(raw, meta) if pack is not None else raw
        buffer = self.put(np.ascontiguousarray(stored).reshape(-1).view(np.uint8))
        checks.result()
        return buffer

    def put(self, data: np.ndarray) -> Any:
        """A buffer with uint8 ``data``."""
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
        """The address of a copy of ``table`` that lives as long as the device."""
        raw = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
        key = raw.tobytes()
        if key not in self._constants:
            self._constants[key] = self.put(raw)
        return self._constants[key].address

    def live(self, header: Header, var: Var) -> int:
        """The address of the live value of ``var``, which `Segment.run` brings up to date."""
        if self._header is None:
            self._header = self.gpu.header(self.alloc(header.values.nbytes), header)
        assert self._header.header is header, "a device serves one executor"
        return self._header.address + 8 * header.slot(var)

    def transfer(self, source: int, target: int, nbytes: int, to_host: bool) -> None:
        """Copy between host and GPU, in order with the stream; to the host, and wait for it."""
        self.gpu.transfer(source, target, nbytes, to_host)

    # -- steps
    def build(self, steps: Sequence[Bound], header: Header) -> Any:
        """The steps as a segment. Compiles, or loads from the disk, the modules that it needs."""
        from .launch import Segment

        self.gpu.use()
        contexts = [KernelContext(step, header, self) for step in steps]
        work = []
        for step, place in zip(steps, contexts):
            made = step.kernel.build(place)
            work.append([made] if isinstance(made, (Launch, HostCall)) else list(made))
        self._load([w.function for part in work for w in part if isinstance(w, Launch)])
        rows = [o.meta.rows for step in steps for o in (*step.inputs, step.out) if o is not None]
        small = all(row.hi <= MAX_GRAPH_ROWS for row in rows if isinstance(row, Var))
        return Segment(
            self.gpu, work, lambda: self._header, small, self._load, (list(steps), contexts)
        )

    def _load(self, functions: Sequence[Function]) -> None:
        """Have the functions' modules on the GPU, telling of those that must be compiled."""
        pending = list(
            dict.fromkeys(f.module for f in functions if not self.gpu.is_loaded(f.module))
        )
        new = [made for made in pending if not self.gpu.is_cached(made)]
        for done, _ in enumerate(load_or_compile_all(new, self.gpu.arch)):
            self.progress("compiling kernels", done, len(new))
        for made in pending:
            debug(4, f"{made}:\n{made.text}")
            self.gpu.load(made)
        if new:
            self.progress("compiling kernels", len(new), len(new))
