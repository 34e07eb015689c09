"""What one process measured, from the file of a profile or of a bench: a time for each step.

Noise makes runs longer, hardly ever shorter. So a step's time in a pass is the median of its runs,
and in a process that of its best pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .files import read_times
from .match import Row
from .noise import FEW_RUNS, FIRST_STEPS, step_floor, wall_floor

_WINDOW = 64  # runs in a row, which the growth of the cache makes no longer
_BAD = 0.75  # of the runs are no worse
_NOBODY = np.zeros(0)


@dataclass(frozen=True)
class Timed:
    """One phase in one process, or one test of a bench.

    ``wall``: nanoseconds of the best pass, unprofiled, and the floor of that (`noise.wall_floor`);
    ``measured``: of all passes. ``disturbed``: by how much a bad run of four was longer than the
    best. ``rows``: of the profile, with ``times`` [rows] a pass and their ``floor`` [rows]
    (`noise.step_floor`).
    """

    tokens: int
    wall: float
    wall_floor: float
    measured: float
    disturbed: float
    rows: Sequence[Row] = ()
    times: np.ndarray = field(default_factory=lambda: _NOBODY)
    floor: np.ndarray = field(default_factory=lambda: _NOBODY)


@dataclass(frozen=True)
class Process:
    """A file. ``work``: what was run, of which model; ``ways``: how, and where."""

    path: str
    work: Mapping[str, Any]
    ways: Mapping[str, Any]
    phases: Mapping[str, Timed]


def load(paths: Sequence[str | Path]) -> list[Process]:
    """The files of one comparison, with as many passes of each as all have. RequestError."""
    found = [read_times(path) for path in paths]
    passes = min((len(p["passes"]) for f in found for p in _phases(f)), default=1)
    return [_process(str(path), each, passes) for path, each in zip(paths, found)]


def _phases(found: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [] if isinstance(found, list) else found["phases"]


def _process(path: str, found: dict[str, Any] | list[dict[str, Any]], passes: int) -> Process:
    if isinstance(found, list):
        return _bench(path, found)
    model, settings = found["model"], dict(found["settings"])
    work = {f"model {key}": model[key] for key in ("type", "bytes", "parameters")}
    for key in ("prompt_tokens", "depth", "decode_tokens"):
        work[key] = settings.pop(key, 0)
    settings.pop("repeat", None)
    used = dict.fromkeys(row["backend"] for phase in found["phases"] for row in phase["rows"])
    ways = {"machine": found["machine"]["name"], "backends": ", ".join(used), **settings}
    ways |= {key: model.get(key) for key in ("context", "kv_type")}
    phases = {phase["name"]: _timed(phase, passes) for phase in found["phases"]}
    return Process(path, work, ways, phases)


def _timed(phase: Mapping[str, Any], passes: int) -> Timed:
    rows = phase["rows"]
    times, floor, disturbed = np.ones(len(rows)), np.zeros(len(rows)), [0.0]
    for plan in sorted({row["plan"] for row in rows}):
        own = [index for index, row in enumerate(rows) if row["plan"] == plan]
        every = np.array([rows[index]["times"] for index in own], np.float64)  # [steps, runs]
        within = np.array([run["pass"] for run in phase["runs"] if run["plan"] == plan])
        each = [every[:, within == index] for index in range(passes)]
        each = [some for some in each if some.size]
        if not each:
            continue
        calls = each[0].shape[1]  # a pass
        times[own] = calls * np.min([np.median(some, axis=1) for some in each], axis=0)
        first = [rows[index]["step"] < FIRST_STEPS for index in own]
        floor[own] = [step_floor(calls, calls * len(each), begins) for begins in first]
        disturbed.append(_disturbed(each))
    walls = [p["plain"] or p["end"] - p["start"] for p in phase["passes"][:passes]]
    known = max(1, min(walls)), wall_floor(passes), sum(walls), max(disturbed)
    return Timed(phase["tokens"], *known, rows, np.maximum(times, 1.0), floor)


def _disturbed(passes: Sequence[np.ndarray]) -> float:
    """Of passes [steps, runs]: how much longer than the best a bad run of four is, step by step.

    Runs of a token are like those around them, the few of a prompt like those of other passes.
    """
    if passes[0].shape[1] < FEW_RUNS:
        alike = [np.stack(some, axis=1) for some in zip(*(each.T for each in passes))]
    else:
        every = np.concatenate(passes, axis=1)
        alike = np.array_split(every, max(1, every.shape[1] // _WINDOW), axis=1)
    bad = [np.quantile(a, _BAD, axis=1).sum() / max(1, a.min(axis=1).sum()) for a in alike]
    return float(np.median(bad)) - 1


def _bench(path: str, tests: Sequence[Mapping[str, Any]]) -> Process:
    """Each test is a phase without rows. Where several setups were measured, their names tell."""
    from .bench import Test

    first = tests[0]
    work = {f"model {key}": first[f"model_{key}"] for key in ("type", "size", "n_params")}
    said = ("cpu_info", "backends", "n_threads", "type_k", "n_gpu_layers")
    ways = {key: first.get(key) for key in said}
    phases = {}
    for test in tests:
        what = Test(test["n_prompt"], test["n_gen"], test["n_depth"])
        own = [f"{key} {test[key]}" for key in said if test.get(key) != first.get(key)]
        name, samples = ", ".join([what.name, *own]), test["samples_ns"]
        disturbed = float(np.quantile(samples, _BAD)) / min(samples) - 1
        known = min(samples), wall_floor(len(samples)), sum(samples), disturbed
        phases[name] = Timed(what.tokens, *known)
    return Process(path, work, ways, phases)
