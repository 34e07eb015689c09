"""What memory, caches and arithmetic give at best on this machine: measured, and kept in the cache.

A backend that can measure it has `Backend.measure`; `rates.py` adds what linears, attention and
steps reach through an Executor. All of it is done by graphllm's own kernels.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from math import isfinite
from pathlib import Path
from typing import Any

from ..backends import find
from ..backends.probe_results import ROOFS, THREADS
from ..cache import CacheFile
from ..errors import RequestError
from ..system_info import OtherProcesses, free_bytes
from . import kernel_probes
from .machine_load import MAX_OTHER_LOAD

MAX_AGE = timedelta(days=1)
MAX_PROBE_BYTES, MIN_PROBE_BYTES = (
    2 << 30,
    1 << 30,
)  # bytes to go over: caches of half a GB have been seen
STORES = ("write", "copy")  # the kinds of `Ceiling.rates` that are not reading alone
_VERSION = 3  # of what is kept: others are not read
_CACHE_FILE, _MOST = CacheFile("ceilings.json"), 1 << 20  # bytes

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ceilings:
    """One measurement. Tables are: what was run -> how many took part -> a rate, the best of some
    repeats. Which figure binds what:

    - `bytes_s`, from ``rates``: what a step must move and finds in no cache: the weights and the
      keys and values of a token's step, the intermediates of many tokens. ``write`` and ``copy``
      (both directions counted) are past the caches; stores that go through them reach about half.
    - ``caches``: rereading what fits a level of cache: the intermediates of one token.
    - `flop_s` of ``float``, ``integer`` (quantised activations) and ``attention``, from ``flops``:
      what the kernels for many tokens reach today. A step of many tokens takes its operations at
      that rate; a prediction wants this one.
    - `peak_flop_s` of ``float`` and ``integer``: what no kernel can exceed. From ``peaks``,
      multiply-adds (two operations each) of ``f32``, ``f16`` and ``int8`` in registers only.
      ``roofs``: which of them. ``how``: by which instructions, or why there are none.
    - ``steps``: seconds that a step costs beside its bytes. ``shares`` and ``many``: by format, the
      part of `bytes_s` that linears of one token reach, and of `flop_s` those of many.

    ``counted``: what took part: threads; of a GPU, blocks a processor. ``spreads``: for each rate,
    by how much the median of the repeats was below it. ``others``: the part of the machine's
    processors that other processes had meanwhile, None where that is not known or of no account.
    """

    backend: str
    machine: str
    date: str  # ISO 8601, UTC
    nbytes: int  # gone over in each run
    rates: Mapping[str, Mapping[int, float]]
    flops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    many: Mapping[str, float] = field(default_factory=dict)
    caches: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    peaks: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    roofs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ROOFS)
    spreads: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    how: Mapping[str, str] = field(default_factory=dict)
    counted: str = THREADS
    others: float | None = None

    def bytes_s(self, threads: int = 0) -> float:
        """Bytes a second of reading, with at most ``threads`` threads (0: any count); 0.0 if none
        fits. Where counts are of something else, ``threads`` means nothing, here and below."""
        reads = (row for kind, row in self.rates.items() if kind not in STORES)
        return max((self._best(row, threads) for row in reads), default=0.0)

    def flop_s(self, kind: str, threads: int = 0) -> float:
        """Operations a second of a kind of ``flops`` or ``peaks``; 0.0: not known.

        ``threads`` as in `bytes_s`.
        """
        return self._best(self.flops.get(kind) or self.peaks.get(kind, {}), threads)

    def peak_flop_s(self, kind: str, threads: int = 0) -> float:
        """Operations a second that no kernel exceeds, for ``float`` or ``integer`` arithmetic; 0.0
        if not known. ``threads`` as in `bytes_s`."""
        return max((self.flop_s(name, threads) for name in self.roofs[kind]), default=0.0)

    def step_overhead(self, threads: int = 0) -> float:
        """Seconds of a step beside its bytes, with the nearest smaller count of threads."""
        counts = [n for n in self.steps if self._fits(n, threads)]
        return self.steps[max(counts)] if counts else 0.0

    def _best(self, by_count: Mapping[int, float], threads: int) -> float:
        return max((r for n, r in by_count.items() if self._fits(n, threads)), default=0.0)

    def _fits(self, count: int, threads: int) -> bool:
        return self.counted != THREADS or not threads or count <= threads

    def is_fresh(self, now: datetime | None = None) -> bool:
        """Whether it was taken on this machine within a day."""
        return self.machine == machine_name() and timedelta() <= self._age(now) < MAX_AGE

    def remeasure_reason(self, now: datetime | None = None) -> str:
        """Why it should be measured again; empty if it should not."""
        found = []
        if self.machine != machine_name():
            found.append("on another machine")
        if self._age(now) >= MAX_AGE:
            found.append(f"{self._age(now).days} days ago")
        if self.others is not None and self.others > MAX_OTHER_LOAD:
            found.append(f"while {self.others:.0%} of the machine was busy with other work")
        return f"taken {', '.join(found)}: measure again" if found else ""

    def provenance(self, now: datetime | None = None) -> str:
        """When and where, and the `remeasure_reason` if there is one."""
        return "; ".join(
            filter(None, [f"measured {self.date} on {self.machine}", self.remeasure_reason(now)])
        )

    def _age(self, now: datetime | None) -> timedelta:
        return (now or _now()) - datetime.fromisoformat(self.date)

    def lines(self) -> list[str]:
        """As `doctor` shows it."""
        best = f"memory gives {self.bytes_s() / 1e9:.1f} GB/s"
        first = f"{best}, measured {self.date} on {self.machine}"
        return [*filter(None, [first, self.remeasure_reason()]), *_table(self), *_notes(self)]


def _table(c: Ceilings) -> Iterator[str]:
    """Rates by what was run and by count."""
    steps = {"a step beside its bytes, us": c.steps} if c.steps else {}
    kinds: list[tuple[str, Mapping[str, Mapping[int, float]], float, int]] = [
        ("{}, GB/s", c.rates, 1e-9, 1),
        ("{}, GB/s", c.caches, 1e-9, 1),
        ("{} multiply-add, GFLOP/s", c.peaks, 1e-9, 0),
        ("{} of many tokens, GFLOP/s", c.flops, 1e-9, 0),
        ("{}", steps, 1e6, 1),
    ]
    counts = sorted({n for _, table, *_ in kinds for by in table.values() for n in by})
    titles = [title.format(name) for title, table, *_ in kinds for name in table]
    width = max(map(len, titles), default=0)
    yield f"{'by ' + c.counted:<{width}}" + "".join(f"{n or 'any':>9}" for n in counts) + "  spread"
    for title, table, scale, digits in kinds:
        for name, by in table.items():
            cells = (f"{by[n] * scale:>9.{digits}f}" if n in by else " " * 9 for n in counts)
            spreads = c.spreads.get(name, {}).values()
            spread = f"{max(spreads):>8.0%}" if spreads else ""
            yield f"{title.format(name):<{width}}{''.join(cells)}{spread}".rstrip()


def _notes(c: Ceilings) -> Iterator[str]:
    for what, parts in (
        ("of memory's rate, linears of one token reach", c.shares),
        (f"of arithmetic's, linears of {kernel_probes.TOKENS}", c.many),
    ):
        if parts:
            yield f"{what}: " + ", ".join(f"{n} {part:.0%}" for n, part in parts.items())
    if c.how:
        yield "multiply-adds: " + "; ".join(f"{kind} {how}" for kind, how in sorted(c.how.items()))


def machine_name() -> str:
    """Processor, count of its threads, host: where a measurement holds."""
    return f"{cpu_name()}, {os.cpu_count()} processors, {platform.node()}"


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_cached(backend: str) -> Ceilings | None:
    """The last measurement, from this machine or another; None where there is no sound one."""
    try:
        return _read(_entries()[backend])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _entries() -> Any:
    """What the file holds, by backend if it is sound."""
    try:
        return json.loads(_CACHE_FILE.read(_MOST) or b"{}")
    except (ValueError, RecursionError):
        return {}


def load_or_measure(backend: str, show: Show) -> Ceilings | None:
    """The kept measurement if it is fresh, else a new one; None where the backend has none."""
    found = load_cached(backend)
    if found is not None and found.is_fresh():
        return found
    return measure(backend, show) if find(backend).measure is not None else None


def measure(backend: str, show: Show, nbytes: int = 0) -> Ceilings:
    """Measure now, and keep the result. ``nbytes``: to go over; 0: as `probe_bytes` says.

    RequestError for a backend that cannot.
    """
    run = find(backend).measure
    if run is None:
        raise RequestError(f"the backend {backend} does not measure its memory")
    size = nbytes or probe_bytes()
    date, others = _now().isoformat(timespec="seconds"), OtherProcesses()
    own = run(size, show)
    found = Ceilings(
        backend, machine_name(), date, size, own.memory, caches=own.caches, peaks=own.peaks,
        roofs=own.roofs, how=own.how, counted=own.counted,
    )  # fmt: skip
    by_threads = own.counted == THREADS
    counts = sorted(own.memory["read"]) if by_threads else [0]
    more = kernel_probes.measure(backend, found.bytes_s, counts, size, show)
    found = replace(
        found, flops=more.flops, steps=more.steps, shares=more.shares, many=more.many,
        spreads={**own.spreads, **more.spreads}, others=others.share() if by_threads else None,
    )  # fmt: skip
    _save(found)
    return found


def probe_bytes() -> int:
    """Return the working-set size: half of the free memory, from 1 to 2 GiB.

    RequestError if less than 1.25 GiB is free.
    """
    free = free_bytes()
    if free < MIN_PROBE_BYTES * 5 // 4:
        raise RequestError(f"measuring memory needs 1.3 GB; {free / 1e9:.1f} GB are free")
    return max(MIN_PROBE_BYTES, min(MAX_PROBE_BYTES, free // 2))


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _read(entry: Mapping[str, Any]) -> Ceilings:
    """What `_save` wrote. KeyError, TypeError, ValueError or AttributeError for anything else."""
    if entry["version"] != _VERSION:
        raise ValueError(entry["version"])
    fields = {name: entry[name] for name in Ceilings.__dataclass_fields__}
    for name in ("rates", "flops", "caches", "peaks", "spreads"):
        fields[name] = {str(kind): _numbers(row, int) for kind, row in fields[name].items()}
    fields["steps"] = _numbers(fields["steps"], int)
    for name in ("shares", "many"):
        fields[name] = _numbers(fields[name], str)
    fields["roofs"] = {kind: tuple(map(str, fields["roofs"][kind])) for kind in ROOFS}
    fields["how"] = {str(kind): str(text) for kind, text in fields["how"].items()}
    for name in ("backend", "machine", "date", "counted"):
        fields[name] = str(fields[name])
    if datetime.fromisoformat(fields["date"]).tzinfo is None:
        raise ValueError(fields["date"])
    others = fields["others"]
    whole = {"nbytes": int(fields["nbytes"]), "others": None if others is None else float(others)}
    return Ceilings(**{**fields, **whole})


def _numbers(row: Mapping[str, Any], key: Callable[[str], Any]) -> dict[Any, float]:
    found = {key(name): float(value) for name, value in row.items()}
    if not all(isfinite(value) and value >= 0 for value in found.values()):
        raise ValueError(row)
    return found


def _save(ceiling: Ceilings) -> None:
    """Write it beside those of other backends."""
    entries = _entries()
    if not isinstance(entries, dict):
        entries = {}
    entries[ceiling.backend] = {"version": _VERSION, **asdict(ceiling)}
    _CACHE_FILE.write(json.dumps(entries, indent=1).encode())
