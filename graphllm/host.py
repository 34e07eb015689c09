"""What the system says about the host's memory."""

from __future__ import annotations

import contextlib
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
