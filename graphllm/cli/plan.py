"""The verb ``plan``: placement, memory and predicted speed of a model, from its header alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from ..terminal import note
from .declarations import Option, verb
from .load_spec import SPEC, SPEC_HELP, capacity_line, load_table, parse_load
from .options import AsJson, LoadOptions, ModelSource
from .output import show, show_json

if TYPE_CHECKING:
    from ..profiler.prediction import DryRun, StepPrediction


@verb
def plan(
    load_options: LoadOptions,
    source: ModelSource,
    free: Annotated[
        float | None,
        Option(
            "--free",
            help="Free GPU memory in GB; by default that of the GPU, or unlimited without a GPU.",
        ),
    ] = None,
    batch: Annotated[
        str,
        Option(
            "-b", "--batch", metavar="LIST", help="Also predict batches of this many sequences."
        ),
    ] = "",
    depth: Annotated[
        int,
        Option(
            "-d",
            "--n-depth",
            help="With -b: number of tokens of each prompt; of an encoder's texts.",
        ),
    ] = 512,
    load: Annotated[
        str | None,
        Option("--load", metavar=SPEC, help=f"Also predict a load: {SPEC_HELP}"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict placement, memory and speed of a model without loading its weights.

    Prints the number of steps by op and backend, the reasons why ops miss the
    first backend, copies between memories, memory by purpose, and the times of
    prefill and decode, predicted from the ceilings of `doctor --measure`.
    --device may be a device that this machine does not have.

    graphllm plan demo

    graphllm plan --random llama-7b --type q4_0 --device cuda --free 6

    graphllm plan demo -b 1,8,64 -d 1000

    graphllm plan demo --load rate=4,prompt=128,output=64
    """
    from ..loading.load import model_spec
    from ..profiler.prediction import dry_run
    from .number_lists import parse_numbers

    room = None if free is None else round(free * 1e9)
    batches = parse_numbers("-b", batch) if batch else []
    wanted = None if load is None else parse_load(load)
    file = source.open(load_options, data=False)
    is_encoder = model_spec(file, load_options.model_def).is_encoder
    own = ({} if is_encoder else {"max_sequences": 1}) | load_options.arguments()
    found = dry_run(file, **own, free=room, batches=batches, depth=depth, load=wanted)
    if as_json:
        show_json(found.as_dict())
        return
    for line in load_options.notes(found.context):
        note(f"note: {line}")
    for line in _lines(found):
        show(line)


def _lines(found: DryRun) -> Iterator[str]:
    yield f"{found.model}: {found.model_type}"
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    cache = f"KV cache {found.kv_type}, " if found.kv_type else ""
    yield f"context {found.context}, {cache}{threads}"
    yield from found.notes
    phases = found.phases
    yield ""
    yield from _table(phases)
    for phase in phases:
        yield from _misses(phase)
        yield from (f"{phase.name} needs {copies}" for copies in phase.copies)
    yield ""
    yield f"{'MB':<10} {'weights':>9} {'cache':>9} {'state':>9} {'arena':>9} {'total':>9}"
    for name, m in found.memory.items():
        sizes = (m.weights, m.kv, m.state, m.arena, m.total)
        yield f"{name:<10} " + " ".join(f"{size / 1e6:>9.1f}" for size in sizes)
    yield ""
    yield from map(_time, phases)
    yield from _batches(found)
    yield from _load(found)
    yield from found.lacking
    if any(phase.seconds is not None for phase in phases):
        yield from (f"from {line}" for line in found.basis)


def _load(found: DryRun) -> Iterator[str]:
    """Yield the table of the predicted load, and where something is full."""
    if found.load is None:
        return
    own = found.load.as_dict()
    yield ""
    yield from load_table({"predicted": own})
    share = own["busy_s"] / own["wall_s"]
    yield f"{own['steps']} steps in {share:.0%} of the time, {own['preemptions']} preemptions"
    yield capacity_line(own["capacity"])
    yield ""


def _batches(found: DryRun) -> Iterator[str]:
    """Yield a table of the predicted batches."""
    if not found.batches:
        return
    depth = found.batches[0].depth
    yield ""
    yield f"{depth} tokens of each sequence, predicted"
    yield (
        f"{'sequences':>9} {'prefill s':>10} {'tok/s':>9} {'decode ms':>10} {'tok/s':>9} "
        f"{'MB/step':>9} {'KV MB each':>11} {'fit':>6}"
    )
    for each in found.batches:
        tokens, count = each.sequences * depth, each.sequences
        prefill = _rate(each.prefill_s, 1.0, tokens)
        decode = _rate(each.step_s, 1e3, count)
        fits = "" if each.fits is None else str(each.fits)
        yield (
            f"{count:>9} {prefill[0]:>10} {prefill[1]:>9} {decode[0]:>10} {decode[1]:>9} "
            f"{each.nbytes / 1e6:>9.1f} {each.sequence_bytes / 1e6:>11.2f} {fits:>6}"
        )
    yield ""


def _rate(seconds: float | None, unit: float, tokens: int) -> tuple[str, str]:
    """Format a time and tokens per second; both empty if the time is unknown."""
    return (f"{seconds * unit:.2f}", f"{tokens / seconds:.1f}") if seconds else ("", "")


def _table(phases: Sequence[StepPrediction]) -> Iterator[str]:
    """Yield a table of step counts by op, with columns for the kinds of steps by backend."""
    columns = [
        (f"{backend} {phase.kind}", phase.ops.get(backend, {}))
        for backend in dict.fromkeys(b for phase in phases for b in phase.ops)
        for phase in phases
    ]
    ops = list(dict.fromkeys(op for _, counts in columns for op in counts))
    width = max(map(len, ops))
    yield f"{'steps':<{width}} " + " ".join(f"{title:>16}" for title, _ in columns)
    for op in ops:
        cells = (counts.get(op, "") for _, counts in columns)
        yield f"{op:<{width}} " + " ".join(f"{cell:>16}" for cell in cells)


def _misses(phase: StepPrediction) -> Iterator[str]:
    """Yield the ops that miss the first backend, one line per reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for miss in phase.misses:
        reasons.setdefault((miss.backend, miss.why), []).append(f"{miss.op} ({miss.steps})")
    for (backend, why), ops in reasons.items():
        yield f"{phase.name}, on {backend}: {', '.join(ops)}: {why}"


def _time(phase: StepPrediction) -> str:
    """Return a line with the bytes and FLOPs of a phase, and its predicted time."""
    work = f"{phase.nbytes / 1e6:.1f} MB, {phase.flops / 1e9:.2f} GFLOP"
    after = f" after {phase.cached} tokens" if phase.cached else ""
    if phase.seconds is None:
        return f"{phase.name}{after}: {work}"
    rate = phase.tokens / phase.seconds
    return (
        f"{phase.name}{after}: {phase.seconds * 1e3:.2f} ms, {rate:.1f} tok/s ({work}), predicted"
    )
