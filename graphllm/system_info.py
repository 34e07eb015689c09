"""Host memory and processor load, as the operating system reports them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FREE_IF_UNKNOWN = 4 << 30  # bytes


def free_bytes() -> int:
    """Return the bytes that can be allocated within the limits of the system and the cgroup."""
    free = _FREE_IF_UNKNOWN
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(n for n in lines if n.startswith("MemAvailable")).split()[1])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = Path("/sys/fs/cgroup")
        # Only anonymous memory counts as used: the kernel can reclaim the page cache.
        lines = (group / "memory.stat").read_text().splitlines()
        used = int(next(n for n in lines if n.startswith("anon ")).split()[1])
        free = min(free, int((group / "memory.max").read_text()) - used)
    return free


def peak_bytes() -> int | None:
    """Return the peak of the bytes of memory that this process has used, pages of mapped files
    included; None if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(n for n in lines if n.startswith("VmHWM")).split()[1])
    return None


class OtherProcesses:
    """Processor time that other processes use, measured from the creation of this object."""

    def __init__(self) -> None:
        self._before = _processor_seconds()

    def share(self) -> float | None:
        """Return the share of all processors' time, 0 to 1, that other processes have used since.

        None if the system does not report processor times, or no time has passed.
        """
        after = _processor_seconds()
        if self._before is None or after is None:
            return None
        total, busy, own = (b - a for a, b in zip(self._before, after))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else None


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return (total, busy, busy in this process) seconds of all processors since boot."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle and iowait; guest time is part of user and nice
    except (OSError, ValueError, IndexError):
        return None
    own = os.times()
    return sum(ticks), sum(ticks) - idle, own.user + own.system
