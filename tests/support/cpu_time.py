"""CPU time of processes: unlike the time of day, it does not depend on the load of the machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def cpu_seconds(process: int) -> float:
    """Return the CPU time in seconds that a running process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_cpu_seconds() -> float:
    """Return the CPU time in seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
