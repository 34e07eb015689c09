"""What the system says about the host's memory, and about who else is at work on it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_UNKNOWN = 4 << 30  # where the system does not say


def free_bytes() -> int:
    """Bytes that can be allocated, by the system and by the control group."""
    free = _UNKNOWN
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(n for n in lines if n.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = Path("/sys/fs/cgroup")
        lines = (group / "memory.stat").read_text().splitlines()  # page cache would give way
        used = int(next(n for n in lines if n.startswith("anon ")).split()[1])
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free


class OtherProcesses:
    """Watches, from when it is made, what other processes take of the host's processors."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def share(self) -> float | None:
        """Part of all processors' time since then; None where the system does not say."""
        after = _processor_seconds()
        if self._before is None or after is None:
            return None
        whole, busy, own = (b - a for a, b in zip(self._before, after))
        return min(1.0, max(0.0, busy - own) / whole) if whole > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Of all processors: in all, at work; and of this process. Since the system's start."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9]]
        idle = ticks[3] + ticks[4]  # waiting for a disk included; guests are in the first two
    except (OSError, ValueError, IndexError):
        return None
    own = os.times()
    return sum(ticks), sum(ticks) - idle, own.user + own.system
