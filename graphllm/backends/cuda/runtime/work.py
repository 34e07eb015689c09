"""Work that kernel builders enqueue on a device's stream: kernel launches and host calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....graph.tensor import Dim
from ...kernel_context import OperandRef
from .source import Function

# An argument of a kernel: an address or an integer, a float32, or bytes (a struct by value).
Arg = int | float | bytes

# Bytes of shared memory of a thread block at most, by capability (CUDA C++ Programming Guide,
# technical specifications); of major versions, unless a minor one is listed.
_MAX_SHARED = {
    (7,): 64 << 10, (8,): 99 << 10, (8, 0): 163 << 10, (8, 7): 163 << 10, (9,): 227 << 10,
    (10,): 227 << 10, (11,): 227 << 10,
}  # fmt: skip
_LEAST_SHARED = 99 << 10  # of 12.0, and of later ones

# `Launch.shared_percent` of kernels with many loads in flight, which need room in the L1 cache: 64
# of the 256 KB of a multiprocessor of capability 9.0 are enough shared memory for them.
MOSTLY_CACHE = 28
# Of kernels with a ring that takes most of the shared memory, and of all launches of their segment.
MOSTLY_SHARED = 100


@dataclass(frozen=True)
class Launch:
    """One kernel launch. A grid with a zero is not launched.

    Attributes:
        function: the kernel.
        grid, block: one to three numbers each.
        args: arguments in order. A Python int is passed as 64 bits, of which a kernel may read the
            lower 32; a float as float32.
        shared: bytes of dynamic shared memory.
        programmatic: the kernel calls `wait_for_previous` (common.cuh) in every thread block, so it
            may be launched before its predecessor has completed.
        cluster: blocks of a cluster, along the third axis of the grid; needs capability 9.0.
        triggers_after_wait: the kernel lets its successor start only after its own wait; see
            `dependencies.Ordering`.
        shared_percent: preferred share of shared memory in a multiprocessor's memory, in percent;
            the rest is L1 cache. A property of the function, so all its launches state the same,
            or `MOSTLY_SHARED`, with which they have an instance of their own. -1: what the driver
            chooses, which is often what the kernel before has chosen.
        prefetches: operands that the kernel always reads before it waits. If one of them is being
            written, the launch is made without overlap.
    """

    function: Function
    grid: Sequence[int]
    block: Sequence[int]
    args: Sequence[Arg]
    shared: int = 0
    cluster: int = 1
    programmatic: bool = True
    triggers_after_wait: bool = False
    shared_percent: int = -1
    prefetches: Sequence[OperandRef] = ()

    @property
    def mostly_shared(self) -> bool:
        return self.shared_percent == MOSTLY_SHARED


def max_shared(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a thread block can have on a GPU."""
    return _MAX_SHARED.get(capability, _MAX_SHARED.get(capability[:1], _LEAST_SHARED))


@dataclass(frozen=True)
class HostCall:
    """Work that the host enqueues on the device's stream in each run: a library call or a copy.

    Attributes:
        run: enqueues the work; it may read live values (`KernelContext.live_value`).
        rows: the dimension whose live value alone decides what ``run`` enqueues, so that a CUDA
            graph can replay it in runs with the same value. None: it is called in each run.
    """

    run: Callable[[], None]
    rows: Dim | None = None


Work = Launch | HostCall


def ceil(count: int, by: int) -> int:
    """``count`` / ``by``, rounded up."""
    return -(-count // by)
