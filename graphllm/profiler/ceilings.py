"""What memory and arithmetic give at best on this machine: measured, and kept in the cache.

A backend that can measure it has `Backend.measure`. The ceiling is the best of what was run, over
1 to n threads; a decode is held against it, since it reads every weight once a token.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ..backends import find
from ..debug import debug
from ..errors import RequestError
from ..host import free_bytes
from ..paths import cache_dir
from . import rates

FRESH = timedelta(days=1)
LARGE, LEAST = 2 << 30, 1 << 30  # bytes to go over: caches of half a GB have been seen

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ceiling:
    """One measurement. ``rates``: what was run -> count of threads -> bytes a second.

    ``flops``: kind of a linear of many tokens -> threads -> operations a second. ``steps``: threads
    -> seconds that a step costs beside its bytes. ``shares``: format -> part of the memory's rate
    that linears of one token reach. See `graphllm.profiler.rates`.
    """

    backend: str
    machine: str
    date: str  # ISO 8601, UTC
    nbytes: int  # gone over in each run
    rates: Mapping[str, Mapping[int, float]]
    flops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    def best(self, threads: int = 0) -> float:
        """Bytes a second, with at most ``threads`` threads (0: any count); 0.0 if none fits."""
        return max(
            (
                rate
                for by_count in self.rates.values()
                for count, rate in by_count.items()
                if not threads or count <= threads
            ),
            default=0.0,
        )

    def flop_s(self, kind: str, threads: int = 0) -> float:
        """Operations a second in a linear of many tokens, ``integer`` or ``float``; 0.0: not known.

        ``threads`` as in `best`.
        """
        by_count = self.flops.get(kind, {})
        return max(
            (rate for n, rate in by_count.items() if not threads or n <= threads), default=0.0
        )

    def step(self, threads: int = 0) -> float:
        """Seconds of a step beside its bytes, with the nearest smaller count of threads."""
        counts = [n for n in self.steps if not threads or n <= threads]
        return self.steps[max(counts)] if counts else 0.0

    def fresh(self, now: datetime | None = None) -> bool:
        """Whether it was taken on this machine within a day."""
        age = (now or _now()) - datetime.fromisoformat(self.date)
        return self.machine == machine() and timedelta() <= age < FRESH

    def lines(self) -> list[str]:
        """As `doctor` shows it."""
        kept = "" if self.machine == machine() else f" on {self.machine}"
        first = f"memory gives {self.best() / 1e9:.1f} GB/s, measured {self.date}{kept}"
        rows = []
        for kind, by_count in self.rates.items():
            counts = ", ".join(f"{n}: {rate / 1e9:.1f}" for n, rate in sorted(by_count.items()))
            rows.append(f"  {kind}, GB/s by threads: {counts}")
        for kind, by_count in self.flops.items():
            counts = ", ".join(f"{n}: {rate / 1e9:.0f}" for n, rate in sorted(by_count.items()))
            rows.append(f"  {kind} linears, GFLOP/s by threads: {counts}")
        if self.steps:
            counts = ", ".join(f"{n}: {s * 1e6:.1f}" for n, s in sorted(self.steps.items()))
            rows.append(f"  a step beside its bytes, us by threads: {counts}")
        if self.shares:
            shares = ", ".join(f"{name}: {share:.0%}" for name, share in self.shares.items())
            rows.append(f"  of that in linears of one token: {shares}")
        return [first, *rows]


def machine() -> str:
    """Processor, count of its threads, host: where a measurement holds."""
    return f"{cpu_name()}, {os.cpu_count()} processors, {platform.node()}"


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def kept(backend: str) -> Ceiling | None:
    """The last measurement, from this machine or another; None where there is no sound one."""
    try:
        return _read(json.loads(_file().read_text("utf-8"))[backend])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def current(backend: str, show: Show) -> Ceiling | None:
    """The kept measurement if it is fresh, else a new one; None where the backend has none."""
    found = kept(backend)
    if found is not None and found.fresh():
        return found
    return measure(backend, show) if find(backend).measure is not None else None


def measure(backend: str, show: Show, nbytes: int = 0) -> Ceiling:
    """Measure now, and keep the result. ``nbytes``: to go over; 0: as `room` says.

    RequestError for a backend that cannot.
    """
    run = find(backend).measure
    if run is None:
        raise RequestError(f"the backend {backend} does not measure its memory")
    size = nbytes or room()
    date = _now().isoformat(timespec="seconds")
    memory = Ceiling(backend, machine(), date, size, run(size, show))
    counts = {n for by_count in memory.rates.values() for n in by_count}
    flops, steps, shares = rates.measure(backend, memory.best, counts, size, show)
    found = replace(memory, flops=flops, steps=steps, shares=shares)
    _keep(found)
    return found


def room() -> int:
    """Bytes of memory to go over: `LARGE`, or down to `LEAST` where half of what is free is less.

    RequestError where that is not free.
    """
    free = free_bytes()
    if free < LEAST * 5 // 4:
        raise RequestError(f"measuring memory needs 1.3 GB; {free / 1e9:.1f} GB are free")
    return max(LEAST, min(LARGE, free // 2))


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _file() -> Path:
    return cache_dir() / "ceilings.json"


def _read(entry: Mapping[str, Any]) -> Ceiling:
    """What `_keep` wrote. KeyError, TypeError, ValueError or AttributeError for anything else."""
    found, flops = (
        {
            str(kind): {int(n): float(rate) for n, rate in by_count.items()}
            for kind, by_count in table.items()
        }
        for table in (entry["rates"], entry.get("flops", {}))
    )
    steps = {int(n): float(seconds) for n, seconds in entry.get("steps", {}).items()}
    shares = {str(name): float(share) for name, share in entry.get("shares", {}).items()}
    backend, where, date = (str(entry[name]) for name in ("backend", "machine", "date"))
    if datetime.fromisoformat(date).tzinfo is None:
        raise ValueError(date)
    return Ceiling(backend, where, date, int(entry["nbytes"]), found, flops, steps, shares)


def _keep(ceiling: Ceiling) -> None:
    """Write it beside those of other backends; without a word where that cannot be done."""
    path, entries = _file(), {}
    with contextlib.suppress(OSError, ValueError):
        entries = json.loads(path.read_text("utf-8"))
    if not isinstance(entries, dict):
        entries = {}
    entries[ceiling.backend] = asdict(ceiling)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(entries, indent=1), "utf-8")
        os.replace(part, path)
    except OSError as error:
        debug(1, f"{path}: the ceiling is not kept: {error.strerror}")
