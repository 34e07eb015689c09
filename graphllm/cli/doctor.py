"""The verb ``doctor``: list usable backends and measure this machine's roofline ceilings."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated

from ..progress import progress_line
from .declarations import Option, verb
from .output import show


@verb
def doctor(
    measure: Annotated[
        bool,
        Option(
            "--measure",
            help="Measure memory and cache bandwidth and peak arithmetic throughput (a minute).",
        ),
    ] = False,
) -> None:
    """List usable backends, why others are not usable, and the ceilings of this machine.

    graphllm doctor

    graphllm doctor --measure
    """
    from .. import backends
    from ..env import cache_dir
    from ..version import __version__

    show(f"graphllm {__version__}, Python {sys.version.split()[0]}, cache {cache_dir()}")
    for name in backends.names():
        backend = backends.find(name)
        ok, reason = backend.available()
        show(f"{name:<10} {'usable' if ok else 'not usable'}: {reason}")
        if ok and backend.kernels:
            for line in _kernels(name, backend.kernels):
                show(f"{'':<10} {line}")
        if ok and backend.measure is not None:
            for line in _ceiling(name, measure):
                show(f"{'':<10} {line}")


def _kernels(backend: str, kernels: Collection[str]) -> list[str]:
    """Return how many ops a backend has kernels for, and which it has none for, as lines."""
    from ..compiler.placement import CALL
    from ..ops import get, registry

    ops = [op for op in registry() if get(op).role != CALL]  # not an op with a kernel
    missing = sorted(op for op in ops if op not in kernels)
    fused = [op for op in missing if get(op).fusion]
    lines = [f"kernels for {len(ops) - len(missing)} of {len(ops)} ops"]
    if fused:
        lines.append(f"computed as their parts, not fused: {', '.join(fused)}")
    others = [op for op in missing if op not in fused]
    return lines + [
        f"{op}: {backend} has no kernel for it; the next backend runs it" for op in others
    ]


def _ceiling(backend: str, measure: bool) -> list[str]:
    """Return the ceilings of a backend, measured now or earlier, as lines."""
    from ..profiler import roofline

    if not measure:
        found = roofline.load_cached(backend)
        return found.lines() if found else ["memory: not measured (graphllm doctor --measure)"]
    with progress_line("measuring") as progress:
        return roofline.measure(backend, progress).lines()
