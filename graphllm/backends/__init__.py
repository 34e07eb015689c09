"""What a backend is: a registry of kernels, and a device that runs plans of them.

A backend is one directory (or module) here, or a third party's under the entry-point group
``graphllm.backends``, that exposes ``BACKEND``. It registers kernels by op:

    @BACKEND.kernel("rms_norm", dtypes={"x": "f32", "w": "f32"}, layout={"x": "rows"})
    def rms_norm(step): ...

That registration is the only statement of support: `Backend.select` returns a kernel, or says in
words why there is none. What the decorated function receives and returns is between the backend and
its own device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np

from ..debug import debug
from ..errors import GraphError, PlacementError, RequestError
from ..graph.tensor import WEIGHT, Dim, Meta, Tensor, Var
from ..ops import OpDef, get, registry
from .order import ORDER
from .probe_results import ProbeResults

# ------------------------------------------------------------------------------------- the choices


@dataclass(frozen=True)
class Options:
    """What a user may choose about execution; part of every plan's key.

    ``linear``: auto or integer (quantise activations for integer formats) or float. ``threads``: 0
    means the usable cores. ``without``: names of fusion rules to leave out, or ``all``.
    ``no_kernels``: kernels that are passed over, as ``backend:op``.
    """

    linear: str = "auto"
    threads: int = 0
    without: tuple[str, ...] = ()
    no_kernels: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------- kernels

# How an operand must lie in memory: anything goes; each row (all axes but the first) contiguous;
# wholly contiguous.
ANY, ROWS, CONTIGUOUS = "any", "rows", "contiguous"


@dataclass(frozen=True)
class Kernel:
    """One way to run one op on one backend.

    ``layout``: what each operand must look like (by name; contiguous if not named); the compiler
    inserts a layout op where it does not. ``lower``: replaces sources before the kernel sees them,
    such as a float activation by its quantised form; it must accept its own result. ``pack``: for
    weight operands, how the device rearranges the stored bytes, once, at load. ``scratch``: bytes
    of workspace that one run needs, counted in the arena.
    """

    backend: str
    op: str
    name: str
    build: Callable[..., Any]
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layout: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[Tensor, Options], str | None] | None = None
    lower: Callable[[Tensor, Options], tuple[Tensor | None, ...]] | None = None
    pack: Mapping[str, Callable[[np.ndarray, Meta], np.ndarray]] = field(default_factory=dict)
    scratch: Callable[[Tensor, Options], int] | None = None

    def unsupported_reason(self, node: Tensor, options: Options) -> str | None:
        """Why this kernel cannot run ``node``, by its Meta and attributes; None when it can."""
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
        """Whether operand ``index`` must be made contiguous first."""
        wanted = self.layout.get(op.operand(index), CONTIGUOUS)
        if wanted == ANY:
            return False
        return not (meta.inner_contiguous if wanted == ROWS else meta.contiguous)


# ---------------------------------------------------------------------------------- bound operands


@dataclass(frozen=True)
class Operand:
    """A tensor with its place: ``buffer`` is the device's handle (host: a uint8 array), and the
    elements lie ``meta.offset`` bytes into it, at ``meta.strides``."""

    meta: Meta
    buffer: Any


@dataclass(frozen=True)
class Bound:
    """One step of a plan with every operand in place, as a device's ``build`` receives it."""

    node: Tensor
    kernel: Kernel
    inputs: tuple[Operand | None, ...]
    out: Operand
    scratch: Operand | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        return self.node.attrs


class Header:
    """The live values of the Vars of a run: an int64 array that kernels read, and its names."""

    SLOTS = 16

    def __init__(self) -> None:
        self.values = np.zeros(self.SLOTS, np.int64)
        self._slots: dict[str, int] = {}

    def slot(self, var: Var) -> int:
        if var.name not in self._slots and len(self._slots) == self.SLOTS:
            raise GraphError(f"{var.name}: an executor's graphs may have {self.SLOTS} Vars by name")
        return self._slots.setdefault(var.name, len(self._slots))

    def set(self, env: Mapping[str, int]) -> None:
        for name, value in env.items():
            if name in self._slots:
                self.values[self._slots[name]] = value

    def live(self, dim: Dim) -> int:
        return int(self.values[self._slots[dim.name]]) if isinstance(dim, Var) else dim


@dataclass
class TimestampLog:
    """Times of a segment's runs, in nanoseconds on the clock of `time.perf_counter_ns`.

    ``runs``: of each run int64 (begin and ends [n + 1], starts [n]): when it began and each step
    ended; when each step started, which may be before the one before it has ended. ``collect`` waits
    for the runs that are not over, and adds theirs.
    """

    runs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    collect: Callable[[], None] = lambda: None


class Segment(Protocol):
    """Consecutive steps on one device, ready to run."""

    def run(self, log: TimestampLog | None) -> None:
        """Run all steps, or begin to: see `Device.ring`. With a ``log``, note their times in it,
        and otherwise run as without. KeyboardInterrupt stops early."""


class Ring(Protocol):
    """Copies of one operand on their way to the host. Copies, runs and `Device.copy_in` take effect
    in the order in which they were asked for."""

    lookahead: int  # runs that may be begun before the copy of an earlier one is taken

    def put(self) -> None:
        """Begin a copy of the operand, as the runs before leave it."""

    def take(self) -> np.ndarray:
        """The oldest copy that was not taken, once it is there."""

    def clear(self) -> None:
        """Forget the copies that were not taken."""


class Device(Protocol):
    """An instance of a backend: where buffers live and steps run."""

    memory: str  # buffers may be shared between devices whose memory has the same name
    progress: Callable[[str, int, int], None]  # told about long work: what, done, total

    def alloc(self, nbytes: int) -> Any:
        """A zeroed buffer, aligned to 64 bytes at least. MemoryError or OutOfMemory."""

    def free(self) -> int | None:
        """Bytes that can still be allocated; None where that is not known."""

    def copy_in(self, operand: Operand, data: np.ndarray) -> None:
        """Write ``data`` (of the operand's shape; a block dtype's rows as uint8) there."""

    def copy_out(self, operand: Operand) -> np.ndarray:
        """A copy of the operand, whose shape has no Var, as a NumPy array."""

    def reader(self, operand: Operand) -> Callable[[], np.ndarray]:
        """`copy_out` of one operand, to be called again and again: after every token, say."""

    def ring(self, operand: Operand) -> Ring | None:
        """Where the next run may be begun before the last is over: how to read what each leaves in
        the operand. None where `Segment.run` returns when all is done."""

    def prepare(
        self, pack: Callable[[np.ndarray, Meta], np.ndarray] | None, raw: np.ndarray, meta: Meta
    ) -> Any:
        """The device's buffer for a weight whose stored bytes are ``raw`` [rows, row_bytes].

        ModelFileError for a block with an infinite or NaN scale (`quant.check_scales`).
        """

    def build(self, steps: Sequence[Bound], header: Header) -> Segment: ...


Measure = Callable[
    [int, Callable[[str, int, int], None]], ProbeResults
]  # (bytes to go over, progress)


class Backend:
    """A kind of device. ``probe`` says whether it is usable here, and why not, in words.

    ``expected``: whether the user expects it to be used (its packages are installed, and no setting
    hides its devices), so that the reason why it is unusable is worth reporting.
    ``memory``: what its devices work in, for plans that are made where there is none.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], tuple[bool, str]],
        open_device: Callable[[Options], Device],
        expected: Callable[[], bool] = lambda: True,
        memory: str = "host",
    ) -> None:
        self.name, self.memory = name, memory
        self.probe = probe
        self.open_device = open_device
        self.expected = expected
        self.kernels: dict[str, list[Kernel]] = {}
        # What it gives at best, if it can tell; see `graphllm.profiler.roofline`.
        self.measure: Measure | None = None
        # By op: how far off its kernels may be that multiply halves (f16, bf16) as such, where that
        # is further than the op's own tolerance; see `graphllm.profiler.diff.deviation`.
        self.half_tolerance: Mapping[str, float] = {}

    def available(self) -> tuple[bool, str]:
        """(usable, what it is or why it is not)."""
        return self.probe()

    def kernel(
        self,
        op: str,
        *,
        name: str = "",
        dtypes: Mapping[str, str | Sequence[str]] | None = None,
        layout: Mapping[str, str] | None = None,
        **rules: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated builder as a kernel for ``op``, in place of one of the same name;
        the first to fit is chosen.

        ``dtypes`` maps an operand's name to a dtype name or several; see `Kernel` for the rest.
        """
        allowed = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in (dtypes or {}).items()}

        def register(build: Callable[..., Any]) -> Callable[..., Any]:
            kernel = Kernel(
                self.name, op, name or build.__name__, build, allowed, layout or {}, **rules
            )
            others = [k for k in self.kernels.get(op, ()) if k.name != kernel.name]
            self.kernels[op] = [*others, kernel]
            return build

        return register

    def select(self, node: Tensor, options: Options) -> Kernel | str:
        """The kernel for ``node``, or the reason in words. Never looks at runtime values."""
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


# ----------------------------------------------------------------------------------------- look-up


@cache
def find(name: str) -> Backend:
    """The backend called ``name``: one of this package, or a third party's. PlacementError."""
    if name in ORDER:
        return importlib.import_module(f"{__name__}.{name}").BACKEND
    for entry in entry_points(group="graphllm.backends"):
        if entry.name == name:
            return _third_party(entry)
    known = ", ".join([*ORDER, *(e.name for e in entry_points(group="graphllm.backends"))])
    raise PlacementError(f"unknown backend {name!r}; known: {known}")


def fallbacks(name: str) -> list[str]:
    """The backend called ``name``, and in order those that run what it cannot: all that come after
    it; after a third party's the last."""
    return list(ORDER[ORDER.index(name) :]) if name in ORDER else [name, ORDER[-1]]


def select_usable(names: Sequence[str]) -> tuple[list[Backend], dict[str, str]]:
    """Those of the backends that are usable, and why the others are not, by name.

    PlacementError when there is none.
    """
    found, skipped = [], {}
    for name in names:
        backend = find(name)
        ok, reason = backend.available()
        debug(1, f"backend {name}: {'' if ok else 'not usable, '}{reason}")
        if ok:
            found.append(backend)
        else:
            skipped[name] = reason
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise PlacementError(f"no usable backend ({reasons})")
    return found, skipped


def check_switches(no_kernels: Sequence[str]) -> None:
    """RequestError for what is not ``backend:op``, or an op that plans cannot do without."""
    for switch in no_kernels:
        backend, colon, op = switch.partition(":")
        problem = ""
        if not colon or backend not in names():
            problem = f"begin with one of {', '.join(names())} and a colon"
        elif op not in registry():
            problem = f"end in an op; {op!r} is none"
        elif get(op).role:
            problem = f"name another op: compiled plans put in {op} where they need it"
        if problem:
            raise RequestError(f"no_kernels = {switch!r} must {problem}", "no_kernels")


def _third_party(entry: EntryPoint) -> Backend:
    """What the entry point names, or a backend that is not usable, and says why."""
    try:
        found = entry.load()
        problem = "" if isinstance(found, Backend) else f"{entry.value} is not a Backend"
    except Exception as error:  # whatever the import of somebody's package may raise
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return found

    def no_device(options: Options) -> Device:
        raise PlacementError(f"{entry.name}: {problem}")

    return Backend(entry.name, lambda: (False, problem), no_device)


def names() -> list[str]:
    """All backends in order: third parties' first, since whoever installs one wants it used."""
    return [e.name for e in entry_points(group="graphllm.backends")] + list(ORDER)


__all__ = [
    "ANY",
    "CONTIGUOUS",
    "ROWS",
    "Backend",
    "Bound",
    "Device",
    "Header",
    "Kernel",
    "Operand",
    "Options",
    "Ring",
    "Segment",
    "behind",
    "check_switches",
    "find",
    "names",
    "usable",
]
