"""Capture of a profile: interleaved passes with and without profiling."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..compiler.plan import HOST
from ..engine.request import Sampling
from ..errors import RequestError
from ..system_info import OtherProcesses
from ..version import __version__
from . import roofline
from .accounting import Pass
from .bench import describe
from .profile import Phase, Profile, Roofline
from .record import Recorder, Run

if TYPE_CHECKING:
    from ..loading.loaded_model import LoadedModel

Show = Callable[[str, int, int], None]  # what, done, total
Recorders = tuple[Recorder, Recorder]  # of prefill, and of decode
_Window = tuple[int, int]  # begin and end in nanoseconds


def profile(llm: LoadedModel, ids: Sequence[int], decode: int, repeat: int, show: Show) -> Profile:
    """Profile prefill and decode. Every pass runs first without and then with profiling.

    One more pass of each kind runs before, as warm-up.

    Args:
        llm: the model; its cache is cleared.
        ids: token ids of the prompt.
        decode: number of tokens to decode in each pass.
        repeat: number of passes.
        show: progress callback.

    Raises:
        RequestError: the prompt is empty, the tokens do not fit in the context, or a count is
            invalid.
    """
    if decode < 0 or repeat < 1:
        raise RequestError(f"decode = {decode} must be at least 0, repeat = {repeat} at least 1")
    if not ids:
        raise RequestError("the prompt has no tokens")
    if len(ids) + decode > llm.limits.context:
        total = f"{len(ids)} prompt tokens and {decode} decoded tokens"
        raise RequestError(f"{total} exceed the context of {llm.limits.context}", "context")
    llm.check_ids(ids)
    llm.engine.prepare()
    plain: list[tuple[_Window, _Window]] = []
    profiled: list[tuple[_Window, _Window]] = []
    recorders = Recorder(), Recorder()
    watch = OtherProcesses()
    for done in range(repeat + 1):
        show("profiling", done, repeat + 1)
        plain.append(_run_pass(llm, ids, decode, None))
        if not done:  # CUDA graphs are captured in the second run of each kind
            _run_pass(llm, ids, min(decode, 3), (Recorder(), Recorder()))
            continue
        profiled.append(_run_pass(llm, ids, decode, recorders))
    show("profiling", repeat + 1, repeat + 1)
    phases = _phases(llm, len(ids), decode, plain[1:], profiled, recorders)
    on_host = any(step.memory == HOST for p in phases for plan in p.plans for step in plan.steps)
    return Profile(
        phases,
        phases[0].rooflines,
        _describe_run(llm, len(ids), decode, repeat),
        _startup_times(llm, plain),
        watch.share() if on_host else None,
    )


def _run_pass(
    llm: LoadedModel, ids: Sequence[int], decode: int, recorders: Recorders | None
) -> tuple[_Window, _Window]:
    """Run one pass; return the wall-clock windows of prefill and decode."""
    engine = llm.engine
    engine.clear_cache()
    llm.executor.get_state("ids")  # waits for a step that was launched ahead
    start = time.perf_counter_ns()
    sampled = engine.generate(ids, Sampling(seed=0).normalize(), (), profile=recorders)
    next(sampled)
    middle = time.perf_counter_ns()
    for _ in range(decode):
        next(sampled)
    return (start, middle), (middle, time.perf_counter_ns())


def _phases(
    llm: LoadedModel, prompt: int, decode: int, plain: Sequence[tuple[_Window, _Window]],
    profiled: Sequence[tuple[_Window, _Window]], recorders: Recorders,
) -> tuple[Phase, ...]:  # fmt: skip
    found = []
    rooflines: dict[str, Roofline] = {}
    for index, (name, tokens) in enumerate((("prefill", prompt), ("decode", decode))):
        if not tokens:
            continue
        spans = [pair[index] for pair in profiled]
        lengths = [pair[index][1] - pair[index][0] for pair in plain]
        passes = tuple(Pass(*span, length) for span, length in zip(spans, lengths))
        runs = recorders[index].runs
        if name == "decode":
            runs = [run for span in spans for run in _runs_in_window(runs, span)[:tokens]]
        for backend in {step.backend.name for run in runs for step in run.plan.steps}:
            add_roofline(rooflines, backend, _threads(llm))
        found.append(Phase(name, tokens, passes, tuple(runs), rooflines))
    return tuple(found)


def _threads(llm: LoadedModel) -> int:
    """Return the number of CPU threads of the run."""
    from ..backends.cpu.runtime.isa import thread_count

    return thread_count(llm.executor.options)


def _runs_in_window(runs: Sequence[Run], span: _Window) -> list[Run]:
    return [run for run in runs if span[0] <= run.called < span[1]]


def add_roofline(rooflines: dict[str, Roofline], backend: str, threads: int) -> None:
    """Add the cached ceilings of ``backend`` to ``rooflines``, if it was measured."""
    ceilings = roofline.load_cached(backend)
    if ceilings is None or backend in rooflines:
        return
    flops = [ceilings.peak_flop_s(kind, threads) for kind in ("float", "integer")]
    known = ceilings.date, not ceilings.is_fresh(), ceilings.remeasure_reason()
    rooflines[backend] = Roofline(*known, ceilings.bytes_s(threads), *flops)


def _describe_run(llm: LoadedModel, prompt: int, decode: int, repeat: int) -> dict[str, Any]:
    """Return the report's sections on versions, machine, model and settings."""
    executor = llm.executor
    facts = describe(llm, _threads(llm))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "made": {"graphllm": __version__, "python": sys.version.split()[0], "date": date},
        "machine": {
            "name": roofline.machine_name(),
            "backends": {backend.name: backend.available()[1] for backend in executor.backends},
        },
        "model": {
            "path": facts["model_filename"],
            "type": facts["model_type"],
            "bytes": facts["model_size"],
            "parameters": facts["model_n_params"],
            "context": llm.limits.context,
            "kv_type": llm.limits.kv_dtype,
        },
        "settings": {
            "threads": _threads(llm),
            "linear": executor.options.linear,
            "no_fuse": list(executor.options.without),
            "no_kernels": list(executor.options.no_kernels),
            "gpu_layers": facts["n_gpu_layers"],
            "prompt_tokens": prompt,
            "decode_tokens": decode,
            "repeat": repeat,
        },
    }


def _startup_times(llm: LoadedModel, plain: Sequence[tuple[_Window, _Window]]) -> dict[str, float]:
    """Return the seconds of one-time work: loading, compilation, first run."""
    walls = [(decode[1] - prefill[0]) / 1e9 for prefill, decode in plain]
    first = max(0.0, walls[0] - statistics.median(walls[1:]))
    return {"load_s": llm.load_s, **llm.executor.load_times, "first_run_s": first}
