"""The verb ``profile``: time, bandwidth and share of the roofline of every op."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from ..progress import progress_line
from .options import LoadOptions, ModelSource, verb
from .output import check_writable, show_table, write_file

if TYPE_CHECKING:
    from ..profiler.profile import Profile

_PROMPT = "The capital of France is"


@verb
def profile(
    source: ModelSource,
    load_options: LoadOptions,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help=f"Prompt; {_PROMPT!r} by default.")
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option("--prompt-tokens", help="Use this many arbitrary tokens as the prompt."),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", "--n-predict", help="Number of tokens to generate.")
    ] = 64,
    repeat: Annotated[int, typer.Option("-r", "--repeat", help="Number of profiled passes.")] = 3,
    by: Annotated[
        str, typer.Option("--by", help="Group rows by op, scope, layer, backend or format.")
    ] = "op",
    top: Annotated[
        int, typer.Option("--top", help="Number of rows of each table; 0 shows all.")
    ] = 0,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "-o",
            "--output",
            help="Also write NAME.html, NAME.json or NAME.trace.json (Perfetto); may be repeated.",
        ),
    ] = None,
) -> None:
    """Profile prefill and decode: time, bandwidth and share of the roofline for every op.

    graphllm profile demo -n 64

    graphllm profile demo --by layer --top 5 -t 1 -o report.html

    graphllm profile --random mistral-7b --type q4_0 --prompt-tokens 512

    Speed: median of passes without profiling. Share: of the wall time of profiled passes.
    Roofline: time at the ceiling that bounds the op (doctor --measure) as a share of its time.
    Headroom: time above that, in ms per token.
    """
    from ..profiler.record import GROUP_KEYS

    if by not in GROUP_KEYS:
        raise RequestError(f"--by {by} must be one of {', '.join(GROUP_KEYS)}")
    if top < 0:
        raise RequestError(f"--top {top} must be at least 0")
    if prompt_tokens < 0:
        raise RequestError(f"--prompt-tokens {prompt_tokens} must be at least 0")
    writers = [(path, _writer(path)) for path in output or ()]
    if prompt is not None and prompt_tokens:
        raise RequestError("give --prompt or --prompt-tokens, not both")
    if prompt is None and source.random is not None:
        prompt_tokens = prompt_tokens or 512
    found = _measure(source, load_options, prompt or _PROMPT, prompt_tokens, max_tokens, repeat)
    show_table(found.table(by, top, sys.stdout.isatty()))
    for path, write in writers:
        write_file(path, write(found))


def _measure(
    source: ModelSource,
    load_options: LoadOptions,
    prompt: str,
    prompt_tokens: int,
    decode: int,
    repeat: int,
) -> Profile:
    from ..profiler.bench import filler_tokens

    llm = load_options.load(source.open(load_options))
    ids = filler_tokens(prompt_tokens, llm.decoder.cfg.vocab)
    with progress_line("profiling") as progress:
        return llm.profile(ids or prompt, decode, repeat, progress)


def _writer(path: Path) -> Callable[[Profile], str]:
    """Return the function that renders the file. RequestError: unknown file type."""
    from ..profiler.html import render_page
    from ..profiler.trace import trace

    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        ".trace.json": lambda report: json.dumps(trace(report), separators=(",", ":")),
        ".json": json.dumps,
        ".html": render_page,
    }
    for end, write in kinds.items():
        if path.name.endswith(end):
            check_writable(path)
            return lambda profile: write(profile.as_dict())
    raise RequestError(f"-o {path}: the name must end in {', '.join(kinds)}")
