"""Samples of a comparison: the times that one process measured, read from a profile or bench file.

Noise makes runs longer, hardly ever shorter. So the time of a step in a pass is the median of its
runs, and its time in a process is that of the best pass. The wall time is the median of the passes
without profiling, as `profile` and `bench` show it.
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

    Attributes:
        speed: speed of the passes without profiling.
        wall_floor: `statistics.wall_floor` of the wall time.
        measured: nanoseconds of all passes without profiling.
        interference: excess of slow runs over the fastest (`machine_load`).
        rows: rows of the profile.
        times: nanoseconds per pass of each row.
        floor: `statistics.step_floor` of each row.
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
    """One file. ``workload``: model and token counts; ``settings``: machine, backends, options."""

    path: str
    workload: Mapping[str, Any]
    settings: Mapping[str, Any]
    phases: Mapping[str, PhaseSample]


def load_samples(paths: Sequence[str | Path]) -> list[ProcessSample]:
    """Read the files of one comparison.

    Times of steps come from the same number of passes of every file, the smallest of all; wall
    times come from all passes. Raises RequestError as `read_profile_or_bench`.
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
    model, options = found["model"], dict(found["settings"])
    workload = {f"model {key}": model[key] for key in ("type", "bytes", "parameters")}
    for key in ("prompt_tokens", "depth", "decode_tokens"):
        workload[key] = options.pop(key, 0)
    workload["sequences"] = options.pop("sequences", 1)
    options.pop("repeat", None)
    used = dict.fromkeys(row["backend"] for phase in found["phases"] for row in phase["rows"])
    settings = {"machine": found["machine"]["name"], "backends": ", ".join(used), **options}
    settings |= {key: model.get(key) for key in ("context", "kv_type")}
    phases = {phase["name"]: _phase_sample(phase, passes) for phase in found["phases"]}
    return ProcessSample(path, workload, settings, phases)


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
        calls = each[0].shape[1]  # per pass
        times[own] = calls * np.min([np.median(some, axis=1) for some in each], axis=0)
        first = [rows[index]["step"] < FIRST_STEPS for index in own]
        floor[own] = [step_floor(calls, calls * len(each), begins) for begins in first]
        interference.append(machine_load.interference_of_steps(each))
    walls = [p["plain"] for p in phase["passes"]]
    known = speed(phase["tokens"], walls), wall_floor(len(walls)), sum(walls), max(interference)
    return PhaseSample(*known, rows, np.maximum(times, 1.0), floor)


def _bench_sample(path: str, tests: Sequence[Mapping[str, Any]]) -> ProcessSample:
    """Return a sample whose phases are the tests, without rows.

    Names of phases contain the settings in which a test differs from the first.
    """
    from ..bench import Test

    first = tests[0]
    workload = {f"model {key}": first[f"model_{key}"] for key in ("type", "size", "n_params")}
    keys = ("cpu_info", "backends", "n_threads", "type_k", "n_gpu_layers")
    settings = {key: first.get(key) for key in keys}
    phases = {}
    for test in tests:
        what = Test(test["n_prompt"], test["n_gen"], test["n_depth"])
        own = [f"{key} {test[key]}" for key in keys if test.get(key) != first.get(key)]
        name, samples = ", ".join([what.name, *own]), test["samples_ns"]
        known = (
            wall_floor(len(samples)),
            sum(samples),
            machine_load.interference_of_samples(samples),
        )
        phases[name] = PhaseSample(speed(what.tokens, samples), *known)
    return ProcessSample(path, workload, settings, phases)
