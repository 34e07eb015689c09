"""A profile as a trace for chrome://tracing and ui.perfetto.dev.

The Trace Event Format (Chromium's document of that name, JSON object form) with complete events
(`X`), counters (`C`) and metadata (`M`); times in microseconds. The processes are the host and each
backend. The host has three tracks: phases and passes, Python, and gaps between steps by cause. A
backend has a track of steps nested in their runs, and counters of its bandwidth and FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
Step = tuple[Mapping[str, Any], int, int]  # a row, begin and end of one of its runs

HOST = 1  # process id of the host; backends follow
PHASES, PYTHON, IDLE = 1, 2, 3  # tracks of the host
STEPS = 1  # track of a backend
PAUSE = 1_000_000  # nanoseconds between phases, each of whose clocks begins at 0


def trace(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of a report (docs/profile-format.md), to be written as JSON.

    Prefill comes first, then decode. Quantities that a report has only as sums over the runs of a
    step (bytes, operations, time at the ceiling) are divided evenly among the runs.
    """
    pids = {name: HOST + i for i, name in enumerate(_backends(report), 1)}
    events: list[Event] = []
    zero = 0
    for phase in report["phases"]:
        runs = list(timed_runs(phase))
        end = max([phase["passes"][-1]["end"], *(run.end for run in runs)])
        writer = _Writer(events, zero)
        writer.phase(phase, runs, end)
        for run in runs:
            writer.steps(run, pids)
        zero += end + PAUSE
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))  # enclosing events come first
    return {
        "traceEvents": [*_metadata(report, pids), *events],
        "displayTimeUnit": "ms",
        "otherData": {key: report[key] for key in ("made", "machine", "model", "settings")},
    }


@dataclass(frozen=True)
class TimedRun:
    """One run of a plan with the times of its steps, one list for each segment."""

    run: Mapping[str, Any]
    segments: Sequence[Sequence[Step]]

    @property
    def end(self) -> int:
        """Time at which the last step has ended and the host has control back."""
        return max(self.run["returned"], self.segments[-1][-1][2])


def timed_runs(phase: Mapping[str, Any]) -> Iterator[TimedRun]:
    """Yield the runs of a phase in order, with the times of their steps."""
    plans: dict[int, list[Mapping[str, Any]]] = {}
    for row in phase["rows"]:
        plans.setdefault(row["plan"], []).append(row)
    counts = dict.fromkeys(plans, 0)
    for run in phase["runs"]:
        index = counts[run["plan"]]
        counts[run["plan"]] += 1
        segments = []
        for segment in run["segments"]:
            at, steps = segment["begin"], []
            for row in plans[run["plan"]][segment["first"] :][: segment["count"]]:
                steps.append((row, at, at + row["times"][index]))
                at = steps[-1][2]
            segments.append(steps)
        yield TimedRun(run, segments)


class _Writer:
    """Append the events of a phase whose clock begins at ``zero`` nanoseconds."""

    def __init__(self, events: list[Event], zero: int) -> None:
        self.events, self.zero = events, zero

    def slice(
        self, name: str, cat: str, pid: int, tid: int, begin: int, end: int, **args: Any
    ) -> None:
        """Append a complete event (a slice) from ``begin`` to ``end``."""
        where = {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid}
        times = {"ts": _us(self.zero + begin), "dur": _us(end - begin)}
        self.events.append({**where, **times, "args": args})

    def phase(self, phase: Mapping[str, Any], runs: Sequence[TimedRun], end: int) -> None:
        """Emit the tracks of the host."""
        times = {f"{name}_ns": ns for name, ns in phase["closing"].items()}
        self.slice(phase["name"], "phase", HOST, PHASES, 0, end, tokens=phase["tokens"], **times)
        for index, window in enumerate(phase["passes"]):
            begin, end = window["start"], window["end"]
            plain = window["plain"] / 1e3
            self.slice(f"pass {index + 1}", "pass", HOST, PHASES, begin, end, plain_us=plain)
            at, last = self._emit_host(begin, [u for u in runs if u.run["pass"] == index])
            if end > at:
                self.slice("between runs", "python", HOST, PYTHON, at, end)
            if end > last:
                self.slice("Python", "host", HOST, IDLE, last, end)

    def _emit_host(self, begin: int, runs: Sequence[TimedRun]) -> tuple[int, int]:
        """Emit Python and gap events from ``begin`` on; return the ends of both tracks."""
        python = idle = begin
        for timed_run in runs:
            run = timed_run.run
            called, back = run["called"], run["returned"]
            if called > python:
                self.slice("between runs", "python", HOST, PYTHON, python, called)
            own = {"plan": run["plan"], "pass": run["pass"], **run["env"]}
            self.slice("run", "python", HOST, PYTHON, called, back, **own)
            python = back
            if called > idle:
                self.slice("Python", "host", HOST, IDLE, idle, called)
            idle = self._emit_gaps(timed_run, max(idle, called))
        return python, idle

    def _emit_gaps(self, timed_run: TimedRun, at: int) -> int:
        """Emit the gaps between steps after time ``at``; return the end of the last gap."""
        before = ""
        for steps in timed_run.segments:
            backend, begin = steps[0][0]["backend"], steps[0][1]
            if begin > at:
                name = f"{before} to {backend}" if before else f"launch on {backend}"
                self.slice(name, "gap", HOST, IDLE, at, begin)
            before, at = backend, max(at, steps[-1][2])
        if timed_run.run["returned"] > at:
            self.slice("return", "gap", HOST, IDLE, at, timed_run.run["returned"])
        return max(at, timed_run.run["returned"])

    def steps(self, timed_run: TimedRun, pids: Mapping[str, int]) -> None:
        """Emit a run and its steps on the tracks of its backends."""
        run = timed_run.run
        for backend in dict.fromkeys(steps[0][0]["backend"] for steps in timed_run.segments):
            own = [steps for steps in timed_run.segments if steps[0][0]["backend"] == backend]
            pid, begin, end = pids[backend], own[0][0][1], own[-1][-1][2]
            about = {"plan": run["plan"], "pass": run["pass"], **run["env"]}
            self.slice(f"run of plan {run['plan']}", "run", pid, STEPS, begin, end, **about)
            for steps in own:
                for step in steps:
                    self._emit_step(pid, *step)
                self._emit_counters(pid, steps[-1][2], 0.0, 0.0)

    def _emit_step(self, pid: int, row: Mapping[str, Any], begin: int, end: int) -> None:
        calls, ns = len(row["times"]), end - begin
        nbytes, flops = row["bytes"] / calls, row["flops"] / calls
        gb_s, gflop_s = (nbytes / ns, flops / ns) if ns else (0.0, 0.0)
        args = {
            "scope": row["scope"],
            "plan": row["plan"],
            "step": row["step"],
            "shape": f"{' '.join(row['inputs'])} -> {row['shape']}",
            "kernel": row["kernel"],
            "origin": row["origin"],
            "bytes": nbytes,
            "flops": flops,
            "GB/s": _rounded(gb_s),
            "GFLOP/s": _rounded(gflop_s),
        }
        if row["limit"] is not None and ns:
            args |= {"share of ceiling": round(row["limit"] / calls / ns, 4), "bound": row["bound"]}
        args |= {key: row[key] for key in ("parts", "why") if row[key]}
        name, cat = f"{row['op']} {row['weight']}".strip(), "copy" if row["copy"] else "op"
        self.slice(name, cat, pid, STEPS, begin, end, **args)
        self._emit_counters(pid, begin, gb_s, gflop_s)

    def _emit_counters(self, pid: int, at: int, gb_s: float, gflop_s: float) -> None:
        """Set the counters from time ``at`` on."""
        for name, value in (("GB/s", gb_s), ("GFLOP/s", gflop_s)):
            where = {"ph": "C", "name": name, "pid": pid, "tid": STEPS, "ts": _us(self.zero + at)}
            self.events.append({**where, "args": {name: _rounded(value)}})


def _rounded(rate: float) -> float:
    """Round to six significant digits; a fixed number of decimals would make slow steps 0."""
    return float(f"{rate:.6g}")


def _us(ns: int) -> float:
    """Convert to microseconds such that truncation to whole nanoseconds is exact.

    Viewers truncate; a step must not seem to end after its run.
    """
    us = ns / 1e3
    return us if us * 1e3 >= ns else math.nextafter(us, math.inf)


# ---------------------------------------------------------------------------------------- metadata


def _backends(report: Mapping[str, Any]) -> list[str]:
    """Return the usable backends in order of priority, then any other that has steps."""
    used = (row["backend"] for phase in report["phases"] for row in phase["rows"])
    return list(dict.fromkeys([*report["machine"]["backends"], *used]))


def _metadata(report: Mapping[str, Any], pids: Mapping[str, int]) -> Iterator[Event]:
    """Yield the names and the order of processes and tracks."""
    host = {PHASES: "phases and passes", PYTHON: "Python", IDLE: "gaps between steps"}
    yield from _process_metadata(HOST, f"host: {report['model']['type']}", host)
    for name, pid in pids.items():
        about = report["machine"]["backends"].get(name, "")
        yield from _process_metadata(pid, f"{name}: {about}" if about else name, {STEPS: "steps"})


def _process_metadata(pid: int, title: str, tracks: Mapping[int, str]) -> Iterator[Event]:
    def about(kind: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    yield about("process_name", 0, name=title)
    yield about("process_sort_index", 0, sort_index=pid)
    for tid, name in tracks.items():
        yield about("thread_name", tid, name=name)
        yield about("thread_sort_index", tid, sort_index=tid)
