"""What the processor that kernels are compiled for can do, and how many cores may be used."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from pathlib import Path

from ....terminal import warn
from ... import Options

CPU_NAME, CPU_FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


@dataclass(frozen=True)
class ISA:
    """Instruction sets of the target. ``width``: bytes of the widest vectors worth using."""

    name: str
    x86: bool
    avx2: bool  # with FMA
    avx512: bool  # F, BW, VL and DQ
    vnni: bool  # AVX512-VNNI
    f16c: bool  # float16 conversion in hardware; without it LLVM calls a library that is not there
    width: int
    fp16: bool = False  # arithmetic on float16 vectors

    @property
    def lanes(self) -> int:
        """float32 elements in a vector."""
        return self.width // 4

    def __str__(self) -> str:
        flags = [n for n in ("avx2", "avx512", "vnni", "f16c") if getattr(self, n)]
        return f"{self.name} ({', '.join(flags) or 'baseline'}, {self.width * 8}-bit vectors)"


@cache
def target() -> tuple[str, str]:
    """CPU name and feature string that Numba compiles for.

    As in Numba: $NUMBA_CPU_NAME alone changes the name but not the features (except "generic",
    which has none); $NUMBA_CPU_FEATURES replaces the host's features, and may be empty.
    """
    from llvmlite import binding

    name = os.environ.get(CPU_NAME) or binding.get_host_cpu_name()
    features = os.environ.get(CPU_FEATURES, "" if name.lower() == "generic" else None)
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return name, features


# What names imply that somebody may force with an empty feature string.
_F16C = ("ivybridge",)
_AVX2 = ("haswell", "broadwell", "skylake", "alderlake", "znver1", "znver2", "znver3", "x86-64-v3")
_AVX512 = ("skylake-avx512", "x86-64-v4")
_VNNI = ("cascadelake", "icelake-server", "sapphirerapids", "znver4", "znver5")
_AVX2_SET = {"avx2", "fma", "f16c"}
_AVX512_SET = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def _implied(name: str) -> set[str]:
    if name in _VNNI:
        return _AVX2_SET | _AVX512_SET | {"avx512vnni"}
    if name in _AVX512:
        return _AVX2_SET | _AVX512_SET
    return _AVX2_SET if name in _AVX2 else {"f16c"} if name in _F16C else set()


@cache
def isa() -> ISA:
    """The instruction sets of the target: the host's, unless Numba's environment forces another."""
    name, features = target()
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    flags = features.split(",")
    on = {f[1:] for f in flags if f.startswith("+")} | (_implied(name) if x86 else set())
    on -= {f[1:] for f in flags if f.startswith("-")}
    avx2 = x86 and {"avx2", "fma"} <= on
    avx512 = avx2 and on >= _AVX512_SET
    width = 64 if avx512 else 32 if avx2 else 16
    return ISA(
        name, x86, avx2, avx512, avx512 and "avx512vnni" in on, "f16c" in on or not x86, width,
        fp16=(avx512 and "avx512fp16" in on) or (not x86 and "fullfp16" in on),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- cores


def _group_cores(folder: Path) -> float:
    """Cores that one control group allows, infinity where it does not limit them."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:  # version 1
            limit, period = ((folder / f"cpu.cfs_{n}_us").read_text() for n in ("quota", "period"))
        except OSError:
            return inf
    limited = limit.strip().isdigit() and period.strip().isdigit()  # not "max" or -1
    return int(limit) / max(1, int(period)) if limited else inf


def _control_groups(process: Path) -> Iterator[Path]:
    """The folders of the process's control groups that may limit it, those around them included.

    ``process``: /proc/self. A container may see its groups mounted as if they were the root.
    """
    own = {}  # by controllers, "" for version 2
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
    """Cores that the process's control groups allow, infinity where they do not limit it."""
    try:
        return min(map(_group_cores, _control_groups(process)), default=inf)
    except (OSError, ValueError):  # no Linux
        return inf


@cache
def usable_cores() -> int:
    """Cores this process may run on, by affinity and by the control groups' quota.

    A fraction of a core counts as one: a thread more is held up now and then, a thread less never
    uses what is there. Asked once: a plan's buffers are made for a count of threads.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    return max(1, ceil(min(cores, cgroup_cores())))


MAX_THREADS = 256


def thread_count(options: Options) -> int:
    """The size of the thread team that these options ask for: at most one thread a core.

    Threads that share cores are held up by each other at every meeting and compute nothing sooner.
    """
    return min(
        _at_most_cores(options.threads) if options.threads > 0 else usable_cores(), MAX_THREADS
    )


@cache
def _at_most_cores(threads: int) -> int:
    """As many of the threads asked for as there are cores; a line of warning if that is fewer."""
    cores = usable_cores()
    if threads > cores:
        warn(f"{threads} threads wanted, {cores} used: there are no more cores")
    return min(threads, cores)
