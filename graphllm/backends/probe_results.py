"""What a backend's own kernels reach at best, as its `Backend.measure` gives it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What was run -> how many took part in it -> a rate, the best of some repeats.
Table = dict[str, dict[int, float]]

THREADS = "threads"  # what counts are of on the host
# The rates of which the largest bounds all arithmetic of a kind: of floats, and of quantised
# activations with quantised weights.
ROOFS: Mapping[str, tuple[str, ...]] = {"float": ("f32",), "integer": ("int8",)}


@dataclass
class ProbeResults:
    """Rates by what was run and by a count, of which ``counted`` says what it counts.

    ``memory``: bytes a second of going over much memory: ``read``, ``write``, ``copy`` (what is
    read and what is written both counted), and other ways to read. ``caches``: of reading again and
    again what fits a cache, by its level and size. ``peaks``: operations a second of nothing but
    multiply-adds in registers, two each: ``f32``, ``f16``, ``int8``. ``roofs``: of these, the ones
    that kernels may use, as `ROOFS`. ``how``: by which instructions they were, or why there are
    none. ``spreads``: for each rate, by how much the median of the
    repeats was below it: 0.03 is 3 %.
    """

    counted: str = THREADS
    memory: Table = field(default_factory=dict)
    caches: Table = field(default_factory=dict)
    peaks: Table = field(default_factory=dict)
    roofs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ROOFS)
    how: dict[str, str] = field(default_factory=dict)
    spreads: Table = field(default_factory=dict)

    def add(
        self, table: Table, kind: str, count: int, work: float, seconds: Sequence[float]
    ) -> None:
        """Note in ``table``, one of these, that ``work`` took ``seconds``, each of them once."""
        table.setdefault(kind, {})[count] = work / min(seconds)
        self.spreads.setdefault(kind, {})[count] = spread(seconds)


def spread(seconds: Sequence[float]) -> float:
    """By how much the rate of the median is below that of the fastest, as a part of it."""
    return 1 - min(seconds) / statistics.median(seconds)
