"""Ceilings of this machine: bandwidth of memory and caches, and arithmetic; measured and cached.

`Backend.measure` probes memory, caches and multiply-adds with graphllm's own kernels;
`kernel_probes` adds the rates that linears, attention and whole steps reach through an Executor.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ..backends import find
from ..backends.probe_results import ROOFS, THREADS
from ..cache import CacheFile
from ..errors import RequestError
from ..graph.op import ATTENTION, MATMUL
from ..system_info import OtherProcesses, free_bytes
from . import kernel_probes
from .machine_load import MAX_OTHER_LOAD

MAX_AGE = timedelta(days=1)
# Working set of the memory probes. Caches of up to half a GB exist.
MAX_PROBE_BYTES, MIN_PROBE_BYTES = 2 << 30, 1 << 30
STORES = ("write", "copy")  # the kinds of `Ceilings.rates` that write
_OVERHEADS = {  # titles of `Ceilings.kernel_overheads`
    ATTENTION: "attention overhead, us",
    MATMUL: "small-batch overhead, us",
}
_VERSION = 6  # of the cache entry; other versions are ignored
_CACHE_FILE, _MAX_FILE_BYTES = CacheFile("ceilings.json"), 1 << 20

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one backend.

    Tables map what was run to {count of threads: rate}, the best of several repetitions.

    Attributes:
        rates: memory bandwidth in bytes/s (`bytes_s`). Bounds what is in no cache: weights, keys
            and values of a decode step, intermediates of a prefill. ``write`` and ``copy`` (both
            directions counted) bypass the caches; stores through the caches reach about half.
        caches: bandwidth of rereading a buffer that fits a cache level. Bounds the intermediates of
            a decode step.
        flops: operations/s of the kernels at `kernel_probes.TOKENS` tokens, of kind ``float``,
            ``integer`` (quantized activations), ``attention`` and ``elementwise`` (`flop_s`).
            Predictions of prefill use these.
        peaks: operations/s of multiply-adds (two operations each) in registers, of kind ``f32``,
            ``f16`` and ``int8``. No kernel can exceed them (`peak_flop_s`).
        roofs: the entries of ``peaks`` that bound ``float`` and ``integer`` arithmetic.
        how: instructions of each peak, or why it was not measured.
        steps: fixed overhead of a step in seconds, by count of threads.
        kernel_overheads: the same by kind of kernels for which it is longer, such as several
            launches: ``attention`` of a decode step, ``matmul`` of 2 to `kernel_probes.FEW_TOKENS`
            tokens.
        shares: by weight format, the share of `bytes_s` that a linear of 1 token reaches.
        many: by weight format and number of tokens, the share of `flop_s` that a linear reaches.
        counted: what the counts are of: threads, or on a GPU blocks per multiprocessor.
        spreads: for each rate, the excess of the best over the median repetition, as a share.
        others: share of the processors' time that other processes used meanwhile; None if unknown
            or irrelevant.
    """

    backend: str
    machine: str
    date: str  # ISO 8601, UTC
    nbytes: int  # working set of the memory probes
    rates: Mapping[str, Mapping[int, float]]
    flops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    kernel_overheads: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    many: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    caches: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    peaks: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    roofs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ROOFS)
    spreads: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    how: Mapping[str, str] = field(default_factory=dict)
    counted: str = THREADS
    others: float | None = None

    def bytes_s(self, threads: int = 0) -> float:
        """Return the read bandwidth in bytes/s with at most ``threads`` threads; 0.0 if unknown.

        0 threads means any number. ``threads`` is ignored here and below if the counts are not of
        threads.
        """
        reads = (row for kind, row in self.rates.items() if kind not in STORES)
        return max((self._best(row, threads) for row in reads), default=0.0)

    def flop_s(self, kind: str, threads: int = 0) -> float:
        """Return the operations/s of a kind of ``flops`` or ``peaks``; 0.0 if unknown."""
        return self._best(self.flops.get(kind) or self.peaks.get(kind, {}), threads)

    def peak_flop_s(self, kind: str, threads: int = 0) -> float:
        """Return the peak operations/s of ``float`` or ``integer`` arithmetic; 0.0 if unknown."""
        return max((self.flop_s(name, threads) for name in self.roofs[kind]), default=0.0)

    def linear_share(self, form: str, tokens: int) -> float:
        """Return the share of `flop_s` that a linear reaches; 1.0 if unknown.

        The times between two measured numbers of tokens are interpolated. The operations of one
        token count as at the full rate, since its time is that of the bytes.
        """
        shares = self.many.get(form, {})
        if tokens < 2 or not shares:
            return 1.0
        known = {1: 1.0, **shares}
        counts = sorted(known)
        times = [count / known[count] for count in counts]
        if tokens >= counts[-1]:
            return known[counts[-1]]
        return tokens / float(np.interp(tokens, counts, times))

    def step_overhead(self, threads: int = 0, kinds: Collection[str] = ()) -> float:
        """Return the fixed overhead of a step in seconds, for at most ``threads`` threads.

        ``kinds``: those of `kernel_overheads` that the step has.
        """
        found = 0.0
        for table in (self.steps, *(self.kernel_overheads.get(kind, {}) for kind in kinds)):
            counts = [n for n in table if self._fits(n, threads)]
            found = max(found, table[max(counts)] if counts else 0.0)
        return found

    def _best(self, by_count: Mapping[int, float], threads: int) -> float:
        return max((r for n, r in by_count.items() if self._fits(n, threads)), default=0.0)

    def _fits(self, count: int, threads: int) -> bool:
        return self.counted != THREADS or not threads or count <= threads

    def is_fresh(self, now: datetime | None = None) -> bool:
        """Whether it was measured on this machine within `MAX_AGE`."""
        return self.machine == machine_name() and timedelta() <= self._age(now) < MAX_AGE

    def remeasure_reason(self, now: datetime | None = None) -> str:
        """Why it should be measured again, or an empty string."""
        found = []
        if self.machine != machine_name():
            found.append("measured on another machine")
        if self._age(now) >= MAX_AGE:
            found.append(f"measured {self._age(now).days} days ago")
        if self.others is not None and self.others > MAX_OTHER_LOAD:
            found.append(f"other processes used {self.others:.0%} of the processor time")
        return f"unreliable: {', '.join(found)}; measure again" if found else ""

    def provenance(self, now: datetime | None = None) -> str:
        """Date and machine of the measurement, and the `remeasure_reason` if there is one."""
        return "; ".join(
            filter(None, [f"measured {self.date} on {self.machine}", self.remeasure_reason(now)])
        )

    def _age(self, now: datetime | None) -> timedelta:
        return (now or _now()) - datetime.fromisoformat(self.date)

    def lines(self) -> list[str]:
        """Return the lines that `graphllm doctor` shows."""
        best = f"memory bandwidth {self.bytes_s() / 1e9:.1f} GB/s"
        first = f"{best}, measured {self.date} on {self.machine}"
        return [*filter(None, [first, self.remeasure_reason()]), *_table(self), *_notes(self)]


def _table(c: Ceilings) -> Iterator[str]:
    """Yield a table of rates, one column per count."""
    steps = {"fixed overhead of a step, us": c.steps} if c.steps else {}
    steps |= {_OVERHEADS[kind]: by for kind, by in c.kernel_overheads.items() if kind in _OVERHEADS}
    kinds: list[tuple[str, Mapping[str, Mapping[int, float]], float, int]] = [
        ("{}, GB/s", c.rates, 1e-9, 1),
        ("{}, GB/s", c.caches, 1e-9, 1),
        ("{} multiply-add, GFLOP/s", c.peaks, 1e-9, 0),
        (f"{{}} at {kernel_probes.TOKENS} tokens, GFLOP/s", c.flops, 1e-9, 0),
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
    counts = sorted({count for row in c.many.values() for count in row})
    many = [
        (
            f"share of FLOP/s of a linear at {count} tokens",
            {form: row[count] for form, row in c.many.items() if count in row},
        )
        for count in counts
    ]
    for what, parts in [("share of memory bandwidth of a linear at 1 token", c.shares), *many]:
        if parts:
            yield f"{what}: " + ", ".join(f"{n} {part:.0%}" for n, part in parts.items())
    if c.how:
        yield "multiply-adds: " + "; ".join(f"{kind} {how}" for kind, how in sorted(c.how.items()))


def machine_name() -> str:
    """Return processor, number of its threads and host name: where a measurement is valid."""
    return f"{cpu_name()}, {os.cpu_count()} processors, {platform.node()}"


def cpu_name() -> str:
    """Return the processor's name, as reported by the system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_cached(backend: str) -> Ceilings | None:
    """Return the last measurement of any machine; None if there is no valid one."""
    try:
        return _read(_entries()[backend])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _entries() -> Any:
    """Return the content of the cache file: entries by backend if it is valid."""
    try:
        return json.loads(_CACHE_FILE.read(_MAX_FILE_BYTES) or b"{}")
    except (ValueError, RecursionError):
        return {}


def load_or_measure(backend: str, show: Show) -> Ceilings | None:
    """Return the cached measurement if fresh, else a new one; None if it cannot be measured."""
    found = load_cached(backend)
    if found is not None and found.is_fresh():
        return found
    return measure(backend, show) if find(backend).measure is not None else None


def measure(backend: str, show: Show, nbytes: int = 0) -> Ceilings:
    """Measure the ceilings of ``backend`` and cache them.

    Args:
        backend: name of the backend.
        show: progress callback.
        nbytes: working set of the memory probes; 0 for `probe_bytes`.

    Raises:
        RequestError: the backend has no probes, or too little memory is free.
    """
    run = find(backend).measure
    if run is None:
        raise RequestError(f"the backend {backend} has no probes to measure its ceilings")
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
        found, flops=more.flops, steps=more.steps, kernel_overheads=more.kernel_overheads,
        shares=more.shares, many=more.many, spreads={**own.spreads, **more.spreads},
        others=others.share() if by_threads else None,
    )  # fmt: skip
    save(found)
    return found


def probe_bytes() -> int:
    """Return the working-set size: half of the free memory, from 1 to 2 GiB.

    RequestError if less than 1.25 GiB is free.
    """
    free = free_bytes()
    if free < MIN_PROBE_BYTES * 5 // 4:
        raise RequestError(f"measuring memory bandwidth needs 1.3 GB; {free / 1e9:.1f} GB are free")
    return max(MIN_PROBE_BYTES, min(MAX_PROBE_BYTES, free // 2))


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _read(entry: Mapping[str, Any]) -> Ceilings:
    """Parse an entry that `save` wrote.

    Raises KeyError, TypeError, ValueError or AttributeError if it is anything else.
    """
    if entry["version"] != _VERSION:
        raise ValueError(entry["version"])
    fields = {name: entry[name] for name in Ceilings.__dataclass_fields__}
    for name in ("rates", "flops", "caches", "peaks", "spreads", "many", "kernel_overheads"):
        fields[name] = {str(kind): _numbers(row, int) for kind, row in fields[name].items()}
    fields["steps"] = _numbers(fields["steps"], int)
    fields["shares"] = _numbers(fields["shares"], str)
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


def save(ceiling: Ceilings) -> None:
    """Add ``ceiling`` to the cache file, replacing the entry of its backend."""
    entries = _entries()
    if not isinstance(entries, dict):
        entries = {}
    entries[ceiling.backend] = {"version": _VERSION, **asdict(ceiling)}
    _CACHE_FILE.write(json.dumps(entries, indent=1).encode())
