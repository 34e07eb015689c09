"""The trace of a profile: valid by the published format description, and equal to the report."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, defaultdict
from typing import Any

import profile_sample
import pytest

from graphllm.profiler.trace import trace

# What the "Trace Event Format" (Chromium project) asks of each kind of event that may be here.
NEEDED = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float)},
    "C": {"name": str, "ts": (int, float)},
    "M": {"name": str},
}
METADATA = {
    "process_name": ("name", str), "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int), "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}  # fmt: skip


class InvalidTrace(Exception):
    pass


def require(condition: object, event: object, what: str) -> None:
    if not condition:
        raise InvalidTrace(f"{what}: {event}")


def ns(us: float) -> int:
    """Convert microseconds as Perfetto does: truncated to nanoseconds."""
    whole = int(us * 1e3)
    require(us * 1e3 - whole < 1e-2, us, "not a whole count of nanoseconds")
    return whole


def check(found: dict[str, Any]) -> None:
    """Raise InvalidTrace unless viewers display the trace as intended."""
    events = json.loads(json.dumps(found, allow_nan=False))["traceEvents"]
    require(isinstance(events, list) and events, found.keys(), "no events")
    require(found.get("displayTimeUnit", "ms") in ("ms", "ns"), found.keys(), "unit")
    for event in events:
        _fields(event)
    timed = [e for e in events if e["ph"] != "M"]
    require(timed == sorted(timed, key=lambda e: e["ts"]), "events", "not sorted by time")
    _named(events)
    _nested([e for e in events if e["ph"] == "X"])


def _fields(event: dict[str, Any]) -> None:
    require(event.get("ph") in NEEDED, event, "unknown phase")
    for name, kind in {**NEEDED[event["ph"]], "pid": int, "tid": int, "args": dict}.items():
        require(isinstance(event.get(name), kind), event, f"no {name}")
    for name in ("ts", "dur"):
        require(math.isfinite(event.get(name, 0)) and event.get(name, 0) >= 0, event, name)
    if event["ph"] == "C":
        numbers = [isinstance(v, (int, float)) for v in event["args"].values()]
        require(numbers and all(numbers), event, "a counter of something else than numbers")
    if event["ph"] == "M":
        key, kind = METADATA.get(event["name"], ("", object))
        require(key and isinstance(event["args"].get(key), kind), event, "unknown metadata")


def _named(events: list[dict[str, Any]]) -> None:
    """Check that every process and every track with slices has one name."""
    names = Counter((e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M")
    require(set(names.values()) == {1}, names, "said twice")
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    for event in events:
        require(event["pid"] in processes, event, "a process without a name")
        if event["ph"] == "X":
            track = ("thread_name", event["pid"], event["tid"])
            require(track in names, event, "a track without a name")


def _nested(slices: list[dict[str, Any]]) -> None:
    """Check that slices of a track are nested or disjoint."""
    open_: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in slices:
        begin = ns(event["ts"])
        end, ends = begin + ns(event["dur"]), open_[event["pid"], event["tid"]]
        while ends and ends[-1] <= begin:
            ends.pop()
        require(not ends or end <= ends[-1], event, "ends after the slice that it is in")
        ends.append(end)


@pytest.fixture(scope="module", params=["two backends", "no ceilings", "one token", "measured"])
def report(request, tmp_path_factory) -> dict[str, Any]:
    if request.param == "measured":
        return profile_sample.measured(tmp_path_factory.mktemp("trace"))
    if request.param == "one token":
        return profile_sample.sample(layers=2, passes=1, decode=1)
    return profile_sample.sample(ceilings=request.param != "no ceilings")


@pytest.fixture(scope="module")
def events(report) -> list[dict[str, Any]]:
    found = trace(report)
    check(found)
    return found["traceEvents"]


def spent(events: list[dict[str, Any]], **where: Any) -> int:
    """Return the nanoseconds of the slices with these fields."""
    return sum(ns(e["dur"]) for e in events if e["ph"] == "X" and where.items() <= e.items())


def test_times_equal_the_report(report, events):
    for name in ("ops", "copies", "gaps", "host"):
        cat = {"ops": "op", "copies": "copy", "gaps": "gap", "host": "host"}[name]
        assert spent(events, cat=cat) == sum(p["closing"][name] for p in report["phases"]), name
    assert spent(events, cat="pass") == sum(p["closing"]["wall"] for p in report["phases"])


def test_steps_have_times_bytes_and_operations(report, events):
    starts = [ns(e["ts"]) for e in events if e.get("cat") == "phase"]
    found: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("op", "copy"):
            phase = sum(ns(event["ts"]) >= start for start in starts) - 1
            found[phase, event["args"]["plan"], event["args"]["step"]].append(event)
    rows = {(i, r["plan"], r["step"]): r for i, p in enumerate(report["phases"]) for r in p["rows"]}
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        own = found[key]
        assert [ns(e["dur"]) for e in own] == list(row["times"])
        for name in ("bytes", "flops"):
            assert sum(e["args"][name] for e in own) == pytest.approx(row[name])
        assert {e["args"]["scope"] for e in own} == {row["scope"]}
        assert {e["args"].get("why", "") for e in own} == {row["why"]}
        assert all(("share of ceiling" in e["args"]) == (row["limit"] is not None) for e in own)


def test_runs_contain_the_steps_of_their_backends(report, events):
    runs = [run for phase in report["phases"] for run in phase["runs"]]
    used = {r["backend"] for p in report["phases"] for r in p["rows"]}
    assert len(used) == 2
    assert sum(e.get("cat") == "python" and e["name"] == "run" for e in events) == len(runs)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    backends = list(report["machine"]["backends"])
    assert [name.partition(":")[0] for name in names.values()] == ["host", *backends]
    for pid, name in names.items():
        steps = [e for e in events if e["pid"] == pid and e.get("cat") in ("op", "copy")]
        of = [e for e in events if e["pid"] == pid and e.get("cat") == "run"]
        assert len(of) == (len(runs) if name.partition(":")[0] in used else 0)
        inside = 0
        for run in of:
            begin, end = run["ts"], run["ts"] + run["dur"] + 1e-3
            inside += sum(begin <= e["ts"] <= e["ts"] + e["dur"] <= end for e in steps)
        assert inside == len(steps)
    gaps = {e["name"] for e in events if e.get("cat") == "gap"}
    there, back = (f"{a} to {b}" for a, b in ((backends[0], backends[1]), backends[1::-1]))
    assert {f"launch on {backends[0]}", there, back, "return"} >= gaps >= {there, back}


def test_counters_equal_the_rates_of_steps(events):
    """Integrated over time they give the bytes and operations of all steps."""
    for counter, key in (("GB/s", "bytes"), ("GFLOP/s", "flops")):
        moved, last = 0.0, {}
        for event in (e for e in events if e["ph"] == "C" and e["name"] == counter):
            at, rate = last.get(event["pid"], (0, 0.0))
            moved += rate * (ns(event["ts"]) - at)
            last[event["pid"]] = ns(event["ts"]), event["args"][counter]
        assert {rate for _, rate in last.values()} == {0.0}
        steps = [e for e in events if e.get("cat") in ("op", "copy") and e["dur"]]
        assert moved == pytest.approx(sum(e["args"][key] for e in steps), rel=1e-5)


def test_tracks_of_an_asynchronous_device_are_in_order():
    """The host gets a run back and calls the next before the device has begun it."""
    report = profile_sample.sample(layers=1, passes=1, decode=3)
    decode = report["phases"][1]
    for row in decode["rows"]:
        row |= {"backend": "cuda", "copy": False}
    at = 0
    for index, run in enumerate(decode["runs"]):
        took = sum(row["times"][index] for row in decode["rows"])
        run |= {"called": 900 * index, "returned": 900 * index + 500}
        run["segments"] = [{"first": 0, "count": len(decode["rows"]), "begin": max(at, 700)}]
        at = max(at, 700) + took + 10
    found = trace(report)
    check(found)
    assert spent(found["traceEvents"], name="launch on cuda") > 0


# What `check` must find, each made from a trace that is right.
def _counter(events):
    return next(e for e in events if e["ph"] == "C")


def _longest(events):
    return max((e for e in events if e.get("cat") == "op"), key=lambda e: e["dur"])


FAULTS = {
    "unknown phase": lambda events: events[-1].update(ph="Q"),
    "no ts": lambda events: events[-1].pop("ts"),
    "dur": lambda events: _longest(events).update(dur=-1.0),
    "counter": lambda events: _counter(events)["args"].update(rate="fast"),
    "metadata": lambda events: events[0].update(name="colour"),
    "said twice": lambda events: events.insert(0, events[0]),
    "process without": lambda events: _longest(events).update(pid=77),
    "track without": lambda events: _longest(events).update(tid=77),
    "sorted": lambda events: events.insert(-4, events.pop()),
    "ends after": lambda events: _longest(events).update(dur=_longest(events)["dur"] + 1e7),
    "whole count": lambda events: _longest(events).update(dur=0.1234567),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_detects_faults(fault):
    found = copy.deepcopy(trace(profile_sample.sample(layers=2, passes=1, decode=2)))
    check(found)
    FAULTS[fault](found["traceEvents"])
    with pytest.raises(InvalidTrace, match=fault):
        check(found)
