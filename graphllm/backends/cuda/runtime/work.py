"""Work that kernel builders put on a device's stream: kernel launches and calls on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .source import Function

# An argument of a kernel: an address or an integer, a float32, or bytes (a struct by value).
Arg = int | float | bytes


@dataclass(frozen=True)
class Launch:
    """One kernel call. ``grid`` and ``block``: one to three numbers; ``shared``: bytes of dynamic
    shared memory.

    ``args``: a Python int is given as 64 bits, of which a kernel may read the lower 32; a float as
    float32. ``early``: the kernel begins with `begin()`, so it may be launched before its
    predecessor has ended. A grid with a zero is not launched.
    """

    function: Function
    grid: Sequence[int]
    block: Sequence[int]
    args: Sequence[Arg]
    shared: int = 0
    programmatic: bool = True


@dataclass(frozen=True)
class HostCall:
    """Work that the host puts on the device's stream itself: a library call, a copy.

    ``run`` is called in each run, outside of CUDA graphs; it may look at the live values
    (`KernelContext.now`).
    """

    run: Callable[[], None]


Work = Launch | HostCall


def ceil(count: int, by: int) -> int:
    """How many pieces of ``by`` make at least ``count``."""
    return -(-count // by)
