"""Capture of a profile: interleaved passes with and without profiling."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..compiler.plan import HOST
from ..engine.request import Sampling
from ..errors import RequestError
from ..system_info import OtherProcesses
from ..version import __version__
from . import roofline
from .accounting import Pass, runs_of
from .batch_limits import check_batch
from .bench import describe
from .engine_requests import run_step, submit_all
from .profile import Phase, Profile, Roofline
from .record import Recorder

if TYPE_CHECKING:
    from ..engine.sequence import ActiveSequence
    from ..loading.loaded_model import LoadedModel

Show = Callable[[str, int, int], None]  # what, done, total
Recorders = tuple[Recorder, Recorder]  # of prefill, and of decode
_Window = tuple[int, int]  # begin and end in nanoseconds


def profile(
    llm: LoadedModel, prompts: Sequence[Sequence[int]], decode: int, repeat: int, show: Show
) -> Profile:
    """Profile prefill and decode. Every pass runs first without and then with profiling.

    One more pass of each kind runs before, as warm-up. In each pass all prompts are submitted at
    once. The prefill ends when each request has its first token; requests whose prompts end early
    decode meanwhile, in the same steps.

    Args:
        llm: the model; its cache is cleared.
        prompts: token ids of each request.
        decode: number of decode steps of all requests in each pass.
        repeat: number of passes.
        show: progress callback.

    Raises:
        RequestError: a prompt is empty, the tokens do not fit in the context or the KV cache, there
            are more prompts than the engine computes at once, or a count is invalid.
    """
    if decode < 0 or repeat < 1:
        raise RequestError(f"decode = {decode} must be at least 0, repeat = {repeat} at least 1")
    own = decode + _decoded_meanwhile(llm.limits.tokens, prompts)
    check_batch(llm.decoder.caches, llm.limits, [(len(ids), own) for ids in prompts])
    for ids in prompts:
        llm.check_ids(ids)
    llm.engine.prepare()
    recorders = Recorder(), Recorder()
    plain: list[_PassTimes] = []
    profiled: list[_PassTimes] = []
    watch = OtherProcesses()
    for done in range(repeat + 1):
        show("profiling", done, repeat + 1)
        plain.append(_run_pass(llm, prompts, decode, None))
        if not done:  # CUDA graphs are captured in the second run of each kind
            _run_pass(llm, prompts, min(decode, 3), (Recorder(), Recorder()))
            continue
        profiled.append(_run_pass(llm, prompts, decode, recorders))
    show("profiling", repeat + 1, repeat + 1)
    phases = _phases(llm, decode, plain[1:], profiled, recorders)
    on_host = any(step.memory == HOST for p in phases for plan in p.plans for step in plan.steps)
    return Profile(
        phases,
        phases[0].rooflines,
        _describe_run(llm, prompts, decode, repeat),
        _startup_times(llm, plain),
        watch.share() if on_host else None,
    )


def _decoded_meanwhile(step: int, prompts: Sequence[Sequence[int]]) -> int:
    """Return an upper bound of the tokens that a request decodes while others are prefilled.

    ``step``: tokens of a step, of which the decoding requests take one each.
    """
    if len(prompts) == 1:
        return 0
    left = max(1, step - len(prompts))
    return 2 * sum(-(-len(ids) // left) for ids in prompts)


@dataclass(frozen=True)
class _PassTimes:
    """Wall-clock windows of the phases of one pass, its requests, and the tokens of the prefill."""

    windows: tuple[_Window, _Window]
    sequences: Sequence[ActiveSequence]
    prefill_tokens: int


def _run_pass(
    llm: LoadedModel, prompts: Sequence[Sequence[int]], decode: int, recorders: Recorders | None
) -> _PassTimes:
    """Run one pass over all prompts."""
    engine = llm.engine
    engine.clear_cache()
    llm.executor.get_state("ids")  # waits for a step that was launched ahead
    start = time.perf_counter_ns()
    generations = submit_all(engine, prompts, Sampling(seed=0), 2**31 - 1)
    for each in generations:
        each.speculates = False  # a step is one token of each
    while not all(each.count for each in generations):
        run_step(engine, generations, recorders)
    middle = time.perf_counter_ns()
    goals = [each.count + decode for each in generations]
    while any(each.count < goal for each, goal in zip(generations, goals)):
        run_step(engine, generations, recorders)
    end = time.perf_counter_ns()
    for each in generations:
        engine.cancel(each)
    engine.settle()
    computed = sum(each.prefill_tokens for each in generations)
    sequences = [each.sequence for each in generations]
    return _PassTimes(((start, middle), (middle, end)), sequences, computed)


def _phases(
    llm: LoadedModel, decode: int, plain: Sequence[_PassTimes], profiled: Sequence[_PassTimes],
    recorders: Recorders,
) -> tuple[Phase, ...]:  # fmt: skip
    found = []
    rooflines: dict[str, Roofline] = {}
    indices = {s: index for each in profiled for index, s in enumerate(each.sequences)}
    counts = profiled[0].prefill_tokens, decode * len(profiled[0].sequences)
    for index, (name, tokens) in enumerate(zip(("prefill", "decode"), counts)):
        if not tokens:
            continue
        spans = [each.windows[index] for each in profiled]
        lengths = [each.windows[index][1] - each.windows[index][0] for each in plain]
        passes = tuple(Pass(*span, length) for span, length in zip(spans, lengths))
        runs = recorders[index].runs
        if name == "decode":  # steps that a device ran ahead of the last one taken do not count
            runs = [run for each in passes for run in runs_of(each, runs)[:decode]]
        for backend in {step.backend.name for run in runs for step in run.plan.steps}:
            add_roofline(rooflines, backend, _threads(llm))
        found.append(Phase(name, tokens, passes, tuple(runs), rooflines, indices))
    return tuple(found)


def _threads(llm: LoadedModel) -> int:
    """Return the number of CPU threads of the run."""
    from ..backends.cpu.runtime.cores import thread_count

    return thread_count(llm.executor.options)


def add_roofline(rooflines: dict[str, Roofline], backend: str, threads: int) -> None:
    """Add the cached ceilings of ``backend`` to ``rooflines``, if it was measured."""
    ceilings = roofline.load_cached(backend)
    if ceilings is None or backend in rooflines:
        return
    flops = [ceilings.peak_flop_s(kind, threads) for kind in ("float", "integer")]
    known = ceilings.date, not ceilings.is_fresh(), ceilings.remeasure_reason()
    rooflines[backend] = Roofline(*known, ceilings.bytes_s(threads), *flops)


def _describe_run(
    llm: LoadedModel, prompts: Sequence[Sequence[int]], decode: int, repeat: int
) -> dict[str, Any]:
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
            "deterministic": executor.options.deterministic,
            "no_fuse": list(executor.options.without),
            "no_kernels": list(executor.options.no_kernels),
            "gpu_layers": facts["n_gpu_layers"],
            "sequences": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "decode_tokens": decode,
            "repeat": repeat,
        },
    }


def _startup_times(llm: LoadedModel, plain: Sequence[_PassTimes]) -> dict[str, float]:
    """Return the seconds of one-time work: loading, compilation, first run."""
    walls = [(each.windows[1][1] - each.windows[0][0]) / 1e9 for each in plain]
    first = max(0.0, walls[0] - statistics.median(walls[1:]))
    return {"load_s": llm.load_s, **llm.executor.load_times, "first_run_s": first}
