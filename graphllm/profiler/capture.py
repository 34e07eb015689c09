"""Capture of a profile: interleaved passes with and without profiling."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from ..compiler.plan import HOST
from ..engine.request import Sampling
from ..errors import RequestError
from ..loading.loaded_encoder import LoadedEncoder
from ..loading.loaded_model import LoadedModel
from ..model.batch import source_length
from ..system_info import OtherProcesses
from ..version import __version__
from . import roofline
from .accounting import Pass, runs_of
from .batch_limits import check_batch
from .bench import describe_model, offloaded_layers
from .engine_requests import run_step, submitted
from .profile import Phase, Profile, Roofline
from .ramp_record import MAX_RUNS, PhaseRamps, RampRecorder, bandwidth_of
from .record import Recorder

if TYPE_CHECKING:
    from ..engine.sequence import ActiveSequence

Show = Callable[[str, int, int], None]  # what, done, total
Recorders = Sequence[Recorder]  # of each phase
_Model = LoadedModel | LoadedEncoder
_Window = tuple[int, int]  # begin and end in nanoseconds


def profile(
    llm: LoadedModel, prompts: Sequence[Sequence[int]], decode: int, repeat: int, show: Show,
    ramps: bool = False,
) -> Profile:  # fmt: skip
    """Profile prefill and decode. Every pass runs first without and then with profiling.

    One more pass of each kind runs before, as warm-up. In each pass all prompts are submitted at
    once. The prefill ends when each request has its first token; requests whose prompts end early
    decode meanwhile, in the same steps.

    Args:
        llm: the model; its cache is cleared.
        prompts: checked tokens of each request; of an encoder-decoder source and target.
        decode: number of decode steps of all requests in each pass.
        repeat: number of passes.
        show: progress callback.
        ramps: run one more pass, which records the ramps of each launch (`ramp_record`).

    Raises:
        RequestError: a prompt is empty, the tokens do not fit in the context or the KV cache, there
            are more prompts than the engine computes at once, a count is invalid, or ramps cannot
            be recorded.
    """
    if decode < 0 or repeat < 1:
        raise RequestError(f"decode = {decode} must be at least 0, repeat = {repeat} at least 1")
    bytes_s = bandwidth_of(llm.executor.backends) if ramps else None
    own = decode + _decoded_meanwhile(llm.limits.tokens, prompts)
    check_batch(llm.decoder.caches, llm.limits, [(len(ids), own) for ids in prompts])
    if llm.seq2seq is not None:
        llm.seq2seq.check_targets([len(ids) - source_length(ids) + own for ids in prompts])
    llm.engine.prepare()
    # CUDA graphs are captured in the second run of each kind.
    warm_up = partial(_run_pass, llm, prompts, min(decode, 3))
    run = partial(_run_pass, llm, prompts, decode)
    settings = {"prompt_tokens": sum(map(len, prompts)), "decode_tokens": decode}
    about = describe_run(llm, settings | {"sequences": len(prompts), "repeat": repeat})
    names = "prefill", "decode"
    return _capture(llm, names, run, warm_up, repeat, show, about, bytes_s)


def profile_encoder(
    model: LoadedEncoder, work: Callable[[], None], lengths: Sequence[int], repeat: int, show: Show,
    ramps: bool = False,
) -> Profile:  # fmt: skip
    """Profile an encoder. Passes are as in `profile`; the only phase is ``encode``.

    Args:
        model: the encoder.
        work: what a pass computes.
        lengths: tokens of each sequence that it computes.
        repeat: number of passes.
        show: progress callback.
        ramps: as in `profile`.
    """
    bytes_s = bandwidth_of(model.executor.backends) if ramps else None
    tokens = sum(lengths)

    def run(recorders: Recorders | None) -> _PassTimes:
        model.engine.recorder = recorders[0] if recorders else None
        try:
            start = time.perf_counter_ns()
            work()
            return _PassTimes(((start, time.perf_counter_ns()),), (tokens,))
        finally:
            model.engine.recorder = None

    settings = {"prompt_tokens": tokens, "decode_tokens": 0, "sequences": len(lengths)}
    about = describe_run(model, settings | {"repeat": repeat})
    return _capture(model, ("encode",), run, run, repeat, show, about, bytes_s)


_RunPass = Callable[["Recorders | None"], "_PassTimes"]


def _capture(
    model: _Model, names: Sequence[str], run: _RunPass, warm_up: _RunPass,
    repeat: int, show: Show, about: Mapping[str, Any], bytes_s: float | None,
) -> Profile:  # fmt: skip
    """Run the passes and return their profile.

    Args:
        model: the model.
        names: names of the phases of a pass.
        run: runs a pass with a recorder for each phase, or None.
        warm_up: runs the first profiled pass, which does not count.
        repeat: number of passes.
        show: progress callback.
        about: sections of the report on versions, machine, model and settings.
        bytes_s: memory bandwidth for a pass that records ramps; None makes no such pass.
    """
    recorders = tuple(Recorder() for _ in names)
    plain: list[_PassTimes] = []
    profiled: list[_PassTimes] = []
    watch = OtherProcesses()
    for done in range(repeat + 1):
        show("profiling", done, repeat + 1)
        plain.append(run(None))
        if not done:
            warm_up(tuple(Recorder() for _ in names))
            continue
        profiled.append(run(recorders))
    show("profiling", repeat + 1, repeat + 1)
    phases = _phases(names, _threads(model), plain[1:], profiled, recorders)
    if bytes_s is not None:
        show("recording thread blocks", 0, 1)
        found = _ramps(names, run, warm_up, bytes_s, profiled[0].steps)
        phases = tuple(replace(phase, ramps=found[phase.name]) for phase in phases)
        show("recording thread blocks", 1, 1)
    on_host = any(step.memory == HOST for p in phases for plan in p.plans for step in plan.steps)
    times = _startup_times(model, plain)
    others = watch.share() if on_host else None
    return Profile(phases, phases[0].rooflines, about, times, others)


def _ramps(
    names: Sequence[str], run: _RunPass, warm_up: _RunPass, bytes_s: float,
    steps: Sequence[int | None],
) -> dict[str, PhaseRamps]:  # fmt: skip
    """Run a pass that records ramps, after one of warm-up; return those of each phase.

    ``steps``: as in `_PassTimes`.
    """
    counts = [MAX_RUNS if most is None else min(most, MAX_RUNS) for most in steps]
    warm_up(tuple(RampRecorder(bytes_s, count) for count in counts))
    recorders = tuple(RampRecorder(bytes_s, count) for count in counts)
    run(recorders)
    return {name: recorder.ramps() for name, recorder in zip(names, recorders)}


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
    """Wall-clock windows and tokens of the phases of one pass, and the sequences of its requests.

    ``steps``: number of the runs of each phase that count; None counts all.
    """

    windows: tuple[_Window, ...]
    tokens: tuple[int, ...]
    sequences: Sequence[ActiveSequence] = ()
    steps: tuple[int | None, ...] = (None,)


def _run_pass(
    llm: LoadedModel, prompts: Sequence[Sequence[int]], decode: int, recorders: Recorders | None
) -> _PassTimes:
    """Run one pass over all prompts."""
    engine = llm.engine
    engine.clear_cache()
    llm.executor.get_state("ids")  # waits for a step that was launched ahead
    start = time.perf_counter_ns()
    with submitted(engine, prompts, Sampling(seed=0), 2**31 - 1) as generations:
        for each in generations:
            each.speculates = False  # a step is one token of each
        pair = (recorders[0], recorders[1]) if recorders else None
        while not all(each.count for each in generations):
            run_step(engine, generations, pair)
        middle = time.perf_counter_ns()
        goals = [each.count + decode for each in generations]
        while any(each.count < goal for each, goal in zip(generations, goals)):
            run_step(engine, generations, pair)
        end = time.perf_counter_ns()
    tokens = sum(each.prefill_tokens for each in generations), decode * len(generations)
    sequences = [each.sequence for each in generations]
    # Steps that a device ran ahead of the last one taken do not count.
    return _PassTimes(((start, middle), (middle, end)), tokens, sequences, (None, decode))


def _phases(
    names: Sequence[str], threads: int, plain: Sequence[_PassTimes],
    profiled: Sequence[_PassTimes], recorders: Recorders,
) -> tuple[Phase, ...]:  # fmt: skip
    found = []
    rooflines: dict[str, Roofline] = {}
    indices = {s: index for each in profiled for index, s in enumerate(each.sequences)}
    for index, (name, tokens) in enumerate(zip(names, profiled[0].tokens)):
        if not tokens:
            continue
        spans = [each.windows[index] for each in profiled]
        lengths = [each.windows[index][1] - each.windows[index][0] for each in plain]
        passes = tuple(Pass(*span, length) for span, length in zip(spans, lengths))
        runs, most = recorders[index].runs, profiled[0].steps[index]
        runs = [run for each in passes for run in runs_of(each, runs)[:most]]
        for backend in {step.backend.name for run in runs for step in run.plan.steps}:
            add_roofline(rooflines, backend, threads)
        found.append(Phase(name, tokens, passes, tuple(runs), rooflines, indices))
    return tuple(found)


def _threads(model: _Model) -> int:
    """Return the number of CPU threads of the run."""
    from ..backends.cpu.runtime.cores import thread_count

    return thread_count(model.executor.options)


def add_roofline(rooflines: dict[str, Roofline], backend: str, threads: int) -> None:
    """Add the cached ceilings of ``backend`` to ``rooflines``, if it was measured."""
    ceilings = roofline.load_cached(backend)
    if ceilings is None or backend in rooflines:
        return
    flops = [ceilings.peak_flop_s(kind, threads) for kind in ("float", "integer")]
    known = ceilings.date, not ceilings.is_fresh(), ceilings.remeasure_reason()
    rooflines[backend] = Roofline(*known, ceilings.bytes_s(threads), *flops)


def describe_run(model: _Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report's sections on versions, machine, model and settings.

    ``settings``: those of the passes.
    """
    executor = model.executor
    context = model.limits.context if isinstance(model, LoadedModel) else model.max_length
    facts = describe_model(model.file, executor.weights)
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
            "context": context,
            "kv_type": model.limits.kv_dtype if isinstance(model, LoadedModel) else None,
        },
        "settings": {
            "threads": _threads(model),
            "linear": executor.options.linear,
            "prefill": executor.options.prefill,
            "deterministic": executor.options.deterministic,
            "low_mem": executor.options.low_mem,
            "no_fuse": list(executor.options.without),
            "no_kernels": list(executor.options.no_kernels),
            "gpu_layers": offloaded_layers(model) if isinstance(model, LoadedModel) else 0,
            **settings,
        },
    }


def _startup_times(model: _Model, plain: Sequence[_PassTimes]) -> dict[str, float]:
    """Return the seconds of one-time work: loading, compilation, first run."""
    walls = [(each.windows[-1][1] - each.windows[0][0]) / 1e9 for each in plain]
    first = max(0.0, walls[0] - statistics.median(walls[1:]))
    return {"load_s": model.load_s, **model.executor.load_times, "first_run_s": first}
