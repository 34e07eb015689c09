"""The verb ``replay``: compute recorded requests again, and compare the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import note
from .declarations import Argument, Option, exit_with, verb
from .options import MODEL, AsJson, LoadOptions
from .output import show, show_json

if TYPE_CHECKING:
    from ..api.recording import RecordedTraffic
    from ..validation.replay import Difference, Replay

_NOT_OF_DIFF = {"device", "context", "gpu_layers", "strict", "no_fuse"}


@verb
def replay(
    recording: Annotated[
        Path, Argument(metavar="FILE", help="A recording of `serve --record`.", show_default=False)
    ],
    load_options: LoadOptions,
    model: Annotated[
        str | None,
        Option("--model", help=f"Model instead of the recorded one. {MODEL}", show_default=False),
    ] = None,
    parallel: Annotated[
        int, Option("--parallel", help="Number of sequences that are computed at once.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Replay recorded requests and compare every token with the recording.

    Options of loading that are not given are those of the recording. If a token
    differs, the exit code is 1, and the step of the first one runs again on the
    recording's backend or the reference backend, to name the op that diverges.

    graphllm replay traffic.jsonl

    graphllm replay traffic.jsonl --parallel 16 --model new.gguf
    """
    from ..api.recording import read_recording
    from ..validation import replay as module

    if parallel < 1:
        raise RequestError(f"--parallel {parallel} must be at least 1")
    traffic = read_recording(recording)
    options, changed = _options(load_options, traffic)
    own = model or traffic.model
    with options.load(own, max_sequences=parallel) as llm:
        with progress_line("replay") as progress:
            found = module.replay(llm, traffic, 2 * parallel, progress)
        difference, device = found.difference, llm.device
        if device != (traffic.device or device):
            changed.append(_changed("device in use", device, traffic.device))
        lines = [] if difference is None else module.logit_lines(llm, difference)
    if difference is not None:
        own_options = {n: v for n, v in options.arguments().items() if n not in _NOT_OF_DIFF}
        own_options["no_fuse"] = options.no_fuse or ()
        recorded = traffic.device or traffic.options.get("device", "auto")
        backends = device, _other(device, recorded)
        lines += module.cause_lines(own, difference, backends, own_options)
        found = replace(found, difference=replace(difference, lines=(*changed, *lines)))
    if as_json:
        show_json(found.as_dict())
    else:
        for line in _lines(found, traffic):
            show(line)
    if difference is not None:
        exit_with(1)


def _options(given: LoadOptions, traffic: RecordedTraffic) -> tuple[LoadOptions, list[str]]:
    """Return the options of loading, and a line for each that is not that of the recording.

    RequestError: the recording has an option that is unknown, or of another type.
    """
    defaults, found, changed = LoadOptions(), replace(given), list[str]()
    known = {each.name for each in fields(LoadOptions)}
    for name, value in traffic.options.items():
        if name not in known or not isinstance(value, (str, int, list)):
            raise RequestError(f"the recording has the unknown option {name} = {value!r}")
        if getattr(given, name) == getattr(defaults, name):
            setattr(found, name, Path(str(value)) if name == "model_def" else value)
    for each in fields(LoadOptions):
        default = getattr(defaults, each.name)
        was, now = traffic.options.get(each.name, default), getattr(found, each.name)
        if str(was) != str(now):
            changed.append(_changed(each.name, now, was))
    if traffic.speculate != "off":  # a replay decodes without drafts, which change no token
        changed.append(_changed("speculate", "off", traffic.speculate))
    return found, changed


def _changed(name: str, now: object, was: object) -> str:
    """Return the line on a difference from the recording, and show it."""
    line = f"{name} = {now}, recorded with {was}"
    note(f"note: {line}")
    return line


def recorded_options(options: LoadOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, for the head of a recording."""
    defaults = LoadOptions()
    own = {each.name: getattr(options, each.name) for each in fields(LoadOptions)}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in own.items()
        if value != getattr(defaults, name)
    }


def _other(device: str, recorded: str) -> str:
    """Return the backend to compare with: the recorded one if it comes after, else NumPy."""
    from ..backends import names

    order = names()
    after = recorded in order and order.index(recorded) > order.index(device)
    return recorded if after else order[-1]


def _lines(found: Replay, traffic: RecordedTraffic) -> Iterator[str]:
    for line in found.skipped:
        yield f"not compared: {line}"
    if found.difference is None:
        yield f"{found.requests} requests, {found.tokens} tokens: all are the same"
        return
    yield from _difference(found.difference, traffic)


def _difference(found: Difference, traffic: RecordedTraffic) -> Iterator[str]:
    pair = ("the end" if token is None else token for token in (found.recorded, found.replayed))
    sample = f", sample {found.sample}" if found.sample else ""
    yield (
        f"{found.where}: token {found.position}{sample} differs: recorded {next(pair)}, replayed "
        f"{next(pair)} (recorded by graphllm {traffic.version})"
    )
    yield from (f"  {line}" for line in found.lines)
