"""Cores that this process may use, and how many threads run on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from math import ceil, inf
from pathlib import Path

from ....terminal import warn
from ... import Options

MAX_THREADS = 256
_CPUS = Path("/sys/devices/system/cpu")
# A core of less than this share of the fastest one's capacity is no performance core.
_FAST = 0.75


def _group_cores(folder: Path) -> float:
    """Cores that one control group allows; infinity if it sets no limit."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:  # cgroup version 1
            limit, period = ((folder / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        except OSError:
            return inf
    limited = limit.strip().isdigit() and period.strip().isdigit()  # neither "max" nor -1
    return int(limit) / max(1, int(period)) if limited else inf


def _control_groups(process: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of a process, and of the groups that contain them.

    ``process`` is its folder in /proc. In a container the process's group may be mounted as root.
    """
    own = {}  # path by controller; the controller of version 2 is ""
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    for line in (process / "mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, _, options = system.split()[:3]
        which = {"cgroup": "cpu", "cgroup2": ""}.get(kind)
        if which not in own or (which and which not in options.split(",")):
            continue
        inner = os.path.relpath(own[which], root)
        group = Path(point) if inner.startswith("..") else Path(point) / inner
        yield from (f for f in (group, *group.parents) if f.is_relative_to(point))


def cgroup_cores(process: Path = Path("/proc/self")) -> float:
    """Cores that the control groups of a process allow; infinity if they set no limit."""
    try:
        return min(map(_group_cores, _control_groups(process)), default=inf)
    except (OSError, ValueError):  # not on Linux
        return inf


@cache
def usable_cores() -> int:
    """Number of cores this process may use, by affinity and by control group quota.

    A fraction of a core counts as a core: one thread too many is throttled now and then, one too
    few leaves capacity unused. The result is cached, as buffers of plans are sized by it.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, ceil(min(cores, cgroup_cores())))


@cache
def performance_cores(cpus: Path = _CPUS) -> int:
    """Number of usable performance cores of a hybrid processor; all usable cores of another one.

    Linux lists the performance cores of Intel's processors in /sys/devices/cpu_core, and states the
    capacity of each core of Arm's. ``cpus``: the folder of the system's description of cores.
    """
    try:
        allowed = os.sched_getaffinity(0)
        fast = _read_cpu_list(cpus.parents[1] / "cpu_core" / "cpus") or _fastest_cores(cpus)
    except (AttributeError, OSError, ValueError):  # not on this system
        return usable_cores()
    return min(usable_cores(), len(allowed & fast) or usable_cores())


def _read_cpu_list(file: Path) -> set[int]:
    """Numbers of a list such as 0-7,16; none without the file."""
    if not file.exists():
        return set()
    found: set[int] = set()
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return found


def _fastest_cores(cpus: Path) -> set[int]:
    """Numbers of the cores whose capacity is near that of the fastest one."""
    capacity = {
        int(path.parent.name[3:]): int(path.read_text()) for path in cpus.glob("cpu*/cpu_capacity")
    }
    least = _FAST * max(capacity.values(), default=0)
    return {number for number, found in capacity.items() if found >= least}


def thread_count(options: Options) -> int:
    """Number of threads that the options ask for, at most one per core.

    Threads that share a core delay each other at every barrier, so more of them are never faster.
    By default there are none for the slower cores of a hybrid processor, for which the others would
    wait.
    """
    threads = _at_most_cores(options.threads) if options.threads > 0 else performance_cores()
    return min(threads, MAX_THREADS)


@cache
def _at_most_cores(threads: int) -> int:
    """Limit ``threads`` to the number of usable cores, with a warning if that is fewer."""
    cores = usable_cores()
    if threads > cores:
        warn(f"threads = {threads}: using {cores}, the number of usable cores")
    return min(threads, cores)
