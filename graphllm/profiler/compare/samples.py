"""What one process measured, from the file of a profile or of a bench: a time for each step.

Noise makes runs longer, hardly ever shorter. So a step's time in a pass is the median of its runs,
and in a process that of its best pass. The wall time is the median of the passes without profiling,
as `profile` and `bench` show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import machine_load
from ..schema import read_times
from ..speed import Speed, speed
from .statistics import FIRST_STEPS, step_floor, wall_floor
from .step_matching import Row

_NOBODY = np.zeros(0)


@dataclass(frozen=True)
class Timed:
    """One phase in one process, or one test of a bench.

    ``speed``: of the passes without profiling, and ``wall_floor`` (`noise.wall_floor`) of its wall
    time; ``measured``: nanoseconds of all these passes. ``disturbed``: by how much a bad run of
    four was longer than the best. ``rows``: of the profile, with ``times`` [rows] a pass and their
    ``floor`` [rows] (`noise.step_floor`).
    """

    speed: Speed
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
    """The files of one comparison, with steps of as many passes of each as all have.

    Wall times are of all passes. RequestError as `read_times`.
    """
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
        each = machine_load.of_plan(every, within, passes)
        if not each:
            continue
        calls = each[0].shape[1]  # a pass
        times[own] = calls * np.min([np.median(some, axis=1) for some in each], axis=0)
        first = [rows[index]["step"] < FIRST_STEPS for index in own]
        floor[own] = [step_floor(calls, calls * len(each), begins) for begins in first]
        disturbed.append(machine_load.of_steps(each))
    walls = [p["plain"] for p in phase["passes"]]
    known = speed(phase["tokens"], walls), wall_floor(len(walls)), sum(walls), max(disturbed)
    return Timed(*known, rows, np.maximum(times, 1.0), floor)


def _bench(path: str, tests: Sequence[Mapping[str, Any]]) -> Process:
    """Each test is a phase without rows. Where several setups were measured, their names tell."""
    from ..bench import Test

    first = tests[0]
    work = {f"model {key}": first[f"model_{key}"] for key in ("type", "size", "n_params")}
    said = ("cpu_info", "backends", "n_threads", "type_k", "n_gpu_layers")
    ways = {key: first.get(key) for key in said}
    phases = {}
    for test in tests:
        what = Test(test["n_prompt"], test["n_gen"], test["n_depth"])
        own = [f"{key} {test[key]}" for key in said if test.get(key) != first.get(key)]
        name, samples = ", ".join([what.name, *own]), test["samples_ns"]
        known = wall_floor(len(samples)), sum(samples), machine_load.of_samples(samples)
        phases[name] = Timed(speed(what.tokens, samples), *known)
    return Process(path, work, ways, phases)
