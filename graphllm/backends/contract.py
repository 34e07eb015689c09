"""The backend contract: kernels, bound operands, devices and the backend that registers them.

A backend registers kernels by op:

    @BACKEND.kernel("rms_norm", dtypes={"x": "f32", "w": "f32"}, layout={"x": "rows"})
    def rms_norm(ctx): ...

This registration is the only statement of support: `Backend.select` returns a kernel, or the reason
why there is none. The arguments and the result of a kernel builder are private to the backend and
its device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..errors import GraphError
from ..graph.tensor import WEIGHT, Dim, Meta, Tensor, Var
from ..ops import OpDef, get
from .probe_results import ProbeResults

Progress = Callable[[str, int, int], None]  # (task, units done, units in total)
Pack = Callable[[np.ndarray, Meta], np.ndarray]  # (stored bytes, their Meta) -> packed bytes


def packed_nbytes(pack: Pack | None, meta: Meta) -> int:
    """Return the bytes of a weight that is packed by ``pack``: what that states as ``nbytes``, a
    function of Meta, or the bytes of the stored form."""
    stated: Callable[[Meta], int] | None = getattr(pack, "nbytes", None)
    return meta.bound().nbytes if stated is None else stated(meta.bound())


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """Execution options that a user can set; part of the key of every plan.

    Attributes:
        linear: products with integer weight formats: "integer" (quantise activations), "float", or
            "auto" (integer where the backend has such a kernel).
        threads: number of CPU threads; 0 uses every available core.
        without: names of fusion rules to disable, or "all".
        no_kernels: kernels to disable, as "backend:op".
        deterministic: use only kernels whose results for a token have the same bits at any number
            of tokens.
        low_mem: read experts from the mapped model file, and keep no packed copy of them.
        prefill: arithmetic of linears in steps of many tokens: "auto", or "fp8" (products of e4m3,
            with a scale for each token and each row of weights).
    """

    linear: str = "auto"
    threads: int = 0
    without: tuple[str, ...] = ()
    no_kernels: tuple[str, ...] = ()
    deterministic: bool = False
    low_mem: bool = False
    prefill: str = "auto"


# ----------------------------------------------------------------------------------------- kernels

# Layouts that a kernel requires of an operand: none; each row (all axes but the first) contiguous;
# contiguous as a whole.
ANY, ROWS, CONTIGUOUS = "any", "rows", "contiguous"


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op on one backend.

    Attributes:
        backend, op, name: names of the backend, the op and the kernel.
        build: the decorated builder.
        dtypes: dtypes accepted for operands, by name; an operand not listed may have any dtype.
        layout: layout required of operands, by name, `CONTIGUOUS` if not listed. The compiler
            inserts a copy where an operand has another layout.
        when: returns why the kernel cannot run a node; None if it can.
        lower: replaces the sources of a node before the kernel receives them, for example a float
            activation by its quantised form. It must accept its own result.
        pack: for weight operands, how the device rearranges the stored bytes once, at load.
        scratch: bytes of workspace that one run needs; part of the arena.
    """

    backend: str
    op: str
    name: str
    build: Callable[..., Any]
    dtypes: Mapping[str, Collection[str]] = field(default_factory=dict)
    layout: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[Tensor, Options], str | None] | None = None
    lower: Callable[[Tensor, Options], tuple[Tensor | None, ...]] | None = None
    pack: Mapping[str, Pack] = field(default_factory=dict)
    scratch: Callable[[Tensor, Options], int] | None = None

    def unsupported_reason(self, node: Tensor, options: Options) -> str | None:
        """Return why this kernel cannot run ``node``, from Meta and attributes; None if it can."""
        op = get(node.op)
        for index, source in enumerate(node.src):
            if source is None:
                continue
            name = op.operand(index)
            allowed = self.dtypes.get(name)
            if allowed is not None and source.dtype.name not in allowed:
                return f"{name} is {source.dtype}, not {' or '.join(allowed)}"
            if name in self.pack and source.base.op != WEIGHT:
                return f"{name} is not a weight"
        return self.when(node, options) if self.when else None

    def needs_layout(self, op: OpDef, index: int, meta: Meta) -> bool:
        """Return whether operand ``index`` must be made contiguous first."""
        wanted = self.layout.get(op.operand(index), CONTIGUOUS)
        if wanted == ANY:
            return False
        return not (meta.inner_contiguous if wanted == ROWS else meta.contiguous)


# ---------------------------------------------------------------------------------- bound operands


@dataclass(frozen=True)
class Operand:
    """A tensor in memory.

    ``buffer`` is the device's handle (on the host a uint8 array). The elements start at byte
    ``meta.offset`` of the buffer and have the strides ``meta.strides``.
    """

    meta: Meta
    buffer: Any


@dataclass(frozen=True)
class Bound:
    """One step of a plan with memory for every operand, as `Device.build` receives it."""

    node: Tensor
    kernel: Kernel
    inputs: tuple[Operand | None, ...]
    out: Operand
    scratch: Operand | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        return self.node.attrs


class Header:
    """Live values of the Vars of a run: an int64 array that kernels read, with a slot per Var."""

    SLOTS = 16

    def __init__(self) -> None:
        self.values = np.zeros(self.SLOTS, np.int64)
        self._slots: dict[str, int] = {}

    def slot(self, var: Var) -> int:
        """Return the index of the value of ``var``; Vars of one name share a slot."""
        if var.name not in self._slots and len(self._slots) == self.SLOTS:
            raise GraphError(f"{var.name}: an executor's graphs may have {self.SLOTS} Vars by name")
        return self._slots.setdefault(var.name, len(self._slots))

    def set(self, env: Mapping[str, int]) -> None:
        """Set the live values by name; names without a slot are ignored."""
        for name, value in env.items():
            if name in self._slots:
                self.values[self._slots[name]] = value

    def live(self, dim: Dim) -> int:
        """Return the live value of a dimension."""
        return int(self.values[self._slots[dim.name]]) if isinstance(dim, Var) else dim


@dataclass
class TimestampLog:
    """Timestamps of a segment's runs, in nanoseconds on the clock of `time.perf_counter_ns`.

    ``runs`` has for each run two int64 arrays: the start of the run followed by the end of each
    step [n + 1], and the start of each step [n]. A step may start before its predecessor ends.
    ``collect()`` waits for runs that are in flight and appends their timestamps.

    If ``blocks`` is a list, a backend with `Backend.block_times` appends for each run a list with
    an entry per step: a tuple with the `block_times.BlockTimes` of each launch, or None for a step
    with calls of a library, whose blocks are unknown.
    """

    runs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    collect: Callable[[], None] = lambda: None
    blocks: list[list[Any]] | None = None


# ----------------------------------------------------------------------------------------- devices


class Segment(Protocol):
    """Consecutive steps on one device, ready to run."""

    def run(self, log: TimestampLog | None) -> None:
        """Run all steps, or launch them (see `Device.ring`), with timestamps if there is a ``log``.

        KeyboardInterrupt stops the run early.
        """


class Ring(Protocol):
    """Asynchronous copies of one operand to the host.

    Copies, runs and writes (`Device.writer`) take effect in the order of the calls.
    """

    lookahead: int  # runs that may be launched before the copy of an earlier run is taken

    def put(self) -> None:
        """Start a copy of the operand's value after the runs launched so far."""

    def take(self) -> np.ndarray:
        """Wait for the oldest copy that has not been taken, and return it."""


class Device(Protocol):
    """An instance of a backend: owns buffers and runs steps."""

    memory: str  # devices whose memory has the same name may share buffers
    progress: Progress  # called during long work

    def alloc(self, nbytes: int) -> Any:
        """Return a zeroed buffer, aligned to at least 64 bytes. MemoryError or OutOfMemory."""

    def free(self) -> int | None:
        """Return the bytes that can still be allocated; None if unknown."""

    def writer(self, values: Sequence[tuple[Operand, np.ndarray]]) -> Callable[[], None]:
        """Return a function that writes data of each operand's shape to it, for repeated calls.

        For a block format the data are its rows as uint8. Each call writes what the arrays hold at
        the time; the caller may change it when the call returns.
        """

    def copy_out(self, operand: Operand) -> np.ndarray:
        """Return a copy of the operand, whose shape has no Var, as a NumPy array."""

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """Return a prepared `copy_out` of one operand, for repeated calls."""

    def ring(self, operand: Operand) -> Ring | None:
        """Return a ring for the value that each run leaves in the operand.

        None if `Segment.run` returns only when all steps are done.
        """

    def prepare(self, pack: Pack | None, raw: np.ndarray, meta: Meta) -> Any:
        """Return the device's buffer for a weight with the stored bytes ``raw`` [rows, row_bytes].

        ModelFileError for a block with an infinite or NaN scale
        (`graphllm.formats.quantization.check_scales`).
        """

    def build(self, steps: Sequence[Bound], header: Header) -> Segment: ...


Measure = Callable[[int, Progress], ProbeResults]  # (bytes of the memory probes, progress)


class Backend:
    """A kind of device, and its kernels.

    Attributes:
        name: name of the backend.
        probe: returns (usable, description or the reason why it is not usable).
        open_device: opens a device.
        expected: returns whether the user expects the backend to be used (its packages are
            installed, and no setting hides its devices), so that a reason is worth reporting.
        memory: name of the memory of its devices, for plans made on a machine without one.
        measure: measures the ceilings of the device, see `graphllm.profiler.roofline`; None if the
            backend has no probes.
        load: imports the modules that register kernels, at the first use of ``kernels``.
        half_tolerance: by op, the tolerance of kernels that multiply f16 or bf16 operands without
            upcasting, where it is above the op's own, see `graphllm.profiler.diff.deviation`.
        block_times: whether its segments record the times of thread blocks.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], tuple[bool, str]],
        open_device: Callable[[Options], Device],
        expected: Callable[[], bool] = lambda: True,
        memory: str = "host",
        measure: Measure | None = None,
        load: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.memory = name, memory
        self.probe, self.expected = probe, expected
        self.open_device, self.measure = open_device, measure
        self._load, self._loaded = load, False
        self._kernels: dict[str, list[Kernel]] = {}
        self.half_tolerance: Mapping[str, float] = {}
        self.block_times = False

    @property
    def kernels(self) -> dict[str, list[Kernel]]:
        """Registered kernels by op; at its first use the modules that register them are imported.

        Registering uses none of it, as a module of kernels may be the first one that is imported.
        """
        if not self._loaded:
            self._loaded = True
            try:
                self._load()
            except BaseException:
                self._loaded = False
                raise
        return self._kernels

    def available(self) -> tuple[bool, str]:
        """Return (usable, description or the reason why it is not usable)."""
        return self.probe()

    def kernel(
        self,
        op: str,
        *,
        name: str = "",
        dtypes: Mapping[str, str | Collection[str]] | None = None,
        layout: Mapping[str, str] | None = None,
        **rules: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated builder as a kernel for ``op``.

        It replaces a kernel of the same name. The first registered kernel that can run a node is
        selected.

        Args:
            op: name of the op.
            name: name of the kernel, by default the builder's.
            dtypes: name of an operand -> a dtype name, or several; a mapping of formats is not
                copied, so that formats declared later are accepted.
            layout: see `Kernel`.
            rules: other fields of `Kernel`.
        """
        allowed = {k: (v,) if isinstance(v, str) else v for k, v in (dtypes or {}).items()}

        def register(build: Callable[..., Any]) -> Callable[..., Any]:
            kernel = Kernel(
                self.name, op, name or build.__name__, build, allowed, layout or {}, **rules
            )
            others = [k for k in self._kernels.get(op, ()) if k.name != kernel.name]
            self._kernels[op] = [*others, kernel]
            return build

        return register

    def select(self, node: Tensor, options: Options) -> Kernel | str:
        """Return the kernel for ``node``, or the reason why there is none.

        The selection never depends on live values.
        """
        switch = f"{self.name}:{node.op}"
        if switch in options.no_kernels:
            return f"switched off ({switch})"
        return self._find(node, options)

    def _find(self, node: Tensor, options: Options) -> Kernel | str:
        candidates = self.kernels.get(node.op)
        if not candidates:
            return f"{self.name} has no kernel for {node.op}"
        reasons = []
        for kernel in candidates:
            reason = kernel.unsupported_reason(node, options)
            if reason is None:
                return kernel
            reasons.append(f"{kernel.name}: {reason}" if len(candidates) > 1 else reason)
        return "; ".join(dict.fromkeys(reasons))
