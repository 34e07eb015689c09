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
from ..schema import read_profile_or_bench
from ..speed import Speed, speed
from .statistics import FIRST_STEPS, step_floor, wall_floor
from .step_matching import Row

_EMPTY = np.zeros(0)


@dataclass(frozen=True)
class PhaseSample:
    """One phase in one process, or one test of a bench.

    ``speed``: of the passes without profiling, and ``wall_floor`` (`noise.wall_floor`) of its wall
    time; ``measured``: nanoseconds of all these passes. ``interference``: by how much a bad run of
    four was longer than the best. ``rows``: of the profile, with ``times`` [rows] a pass and their
    ``floor`` [rows] (`noise.step_floor`).
    """

    speed: Speed
    wall_floor: float
    measured: float
    interference: float
    rows: Sequence[Row] = ()
    times: np.ndarray = field(default_factory=lambda: _EMPTY)
    floor: np.ndarray = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class ProcessSample:
    """A file. ``workload``: what was run, of which model; ``settings``: how, and where."""

    path: str
    workload: Mapping[str, Any]
    settings: Mapping[str, Any]
    phases: Mapping[str, PhaseSample]


def load_samples(paths: Sequence[str | Path]) -> list[ProcessSample]:
    """The files of one comparison, with steps of as many passes of each as all have.

    Wall times are of all passes. RequestError as `read_profile_or_bench`.
    """
    found = [read_profile_or_bench(path) for path in paths]
    passes = min((len(p["passes"]) for f in found for p in _phases(f)), default=1)
    return [_process_sample(str(path), each, passes) for path, each in zip(paths, found)]


def _phases(found: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [] if isinstance(found, list) else found["phases"]


def _process_sample(
    path: str, found: dict[str, Any] | list[dict[str, Any]], passes: int
) -> ProcessSample:
    if isinstance(found, list):
        return _bench_sample(path, found)
    model, settings = found["model"], dict(found["settings"])
    work = {f"model {key}": model[key] for key in ("type", "bytes", "parameters")}
    for key in ("prompt_tokens", "depth", "decode_tokens"):
        work[key] = settings.pop(key, 0)
    settings.pop("repeat", None)
    used = dict.fromkeys(row["backend"] for phase in found["phases"] for row in phase["rows"])
    ways = {"machine": found["machine"]["name"], "backends": ", ".join(used), **settings}
    ways |= {key: model.get(key) for key in ("context", "kv_type")}
    phases = {phase["name"]: _phase_sample(phase, passes) for phase in found["phases"]}
    return ProcessSample(path, work, ways, phases)


def _phase_sample(phase: Mapping[str, Any], passes: int) -> PhaseSample:
    rows = phase["rows"]
    times, floor, interference = np.ones(len(rows)), np.zeros(len(rows)), [0.0]
    for plan in sorted({row["plan"] for row in rows}):
        own = [index for index, row in enumerate(rows) if row["plan"] == plan]
        every = np.array([rows[index]["times"] for index in own], np.float64)  # [steps, runs]
        within = np.array([run["pass"] for run in phase["runs"] if run["plan"] == plan])
        each = machine_load.times_by_pass(every, within, passes)
        if not each:
            continue
        calls = each[0].shape[1]  # a pass
        times[own] = calls * np.min([np.median(some, axis=1) for some in each], axis=0)
        first = [rows[index]["step"] < FIRST_STEPS for index in own]
        floor[own] = [step_floor(calls, calls * len(each), begins) for begins in first]
        interference.append(machine_load.interference_of_steps(each))
    walls = [p["plain"] for p in phase["passes"]]
    known = speed(phase["tokens"], walls), wall_floor(len(walls)), sum(walls), max(interference)
    return PhaseSample(*known, rows, np.maximum(times, 1.0), floor)


def _bench_sample(path: str, tests: Sequence[Mapping[str, Any]]) -> ProcessSample:
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
        known = (
            wall_floor(len(samples)),
            sum(samples),
            machine_load.interference_of_samples(samples),
        )
        phases[name] = PhaseSample(speed(what.tokens, samples), *known)
    return ProcessSample(path, work, ways, phases)
