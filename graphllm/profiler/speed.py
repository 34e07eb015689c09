"""Speed of a run, as defined by `profile`, `compare` and `bench` alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speed:
    """Time of ``tokens`` tokens over some passes without profiling.

    Attributes:
        tokens: tokens per pass.
        passes: number of passes.
        ns: median wall time of a pass.
        spread: sample standard deviation of the passes' wall times as a share of ``ns``; 0.0 for
            one pass.
    """

    tokens: int
    passes: int
    ns: float
    spread: float

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return 1e9 * self.tokens / self.ns

    @property
    def token_ns(self) -> float:
        """Nanoseconds per token."""
        return self.ns / self.tokens

    @property
    def error(self) -> float:
        """Standard error of the median as a share of ``ns``."""
        return self.spread * math.sqrt(math.pi / 2 / self.passes)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "tok_s": self.tok_s, "median_ns": self.ns, "spread": self.spread, "passes": self.passes
        }  # fmt: skip

    def __str__(self) -> str:
        spread = f" (± {self.spread:.1%}, {self.passes} passes)" if self.passes > 1 else ""
        return f"{self.tok_s:.1f} tok/s{spread}"


def speed(tokens: int, samples_ns: Sequence[float]) -> Speed:
    """Return the speed of passes over ``tokens`` tokens each, given their wall times."""
    median = statistics.median(samples_ns)
    deviation = statistics.stdev(samples_ns) if len(samples_ns) > 1 else 0.0
    return Speed(tokens, len(samples_ns), median, deviation / median)
