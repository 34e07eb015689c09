"""Results of a backend's roofline probes, as `Backend.measure` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Probe -> number of participants (threads) -> rate, the best of several repetitions.
Table = dict[str, dict[int, float]]

THREADS = "threads"  # participants on the host
# Kind of arithmetic (floats; quantised activations times quantised weights) -> the peaks of which
# the largest is the ceiling.
ROOFS: Mapping[str, tuple[str, ...]] = {"float": ("f32",), "integer": ("int8",)}


@dataclass
class ProbeResults:
    """Rates by probe and number of participants.

    Attributes:
        counted: what participates: threads, or blocks per multiprocessor of a GPU.
        memory: bytes/s over buffers beyond the caches: "read", "write", "copy" (both directions
            counted), and other access patterns.
        caches: bytes/s of repeated reads from a cache, by its level and size.
        peaks: operations/s of multiply-adds in registers, two each: "f32", "f16", "int8".
        roofs: the peaks that kernels may use, as `ROOFS`.
        how: instructions of each peak, or why it was not measured.
        spreads: excess of each rate over the rate of the median repetition: 0.03 is 3 %.
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
        """Add a rate to one of the tables of this object.

        Args:
            table: the table.
            kind: name of the probe.
            count: number of participants.
            work: bytes or operations of one repetition.
            seconds: duration of each repetition.
        """
        table.setdefault(kind, {})[count] = work / min(seconds)
        self.spreads.setdefault(kind, {})[count] = spread(seconds)


def spread(seconds: Sequence[float]) -> float:
    """Return how much the median rate is below the fastest, as a share of the fastest."""
    from statistics import median  # slow to import

    return 1 - min(seconds) / median(seconds)
