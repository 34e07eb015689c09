"""The verb ``profile``: where the time of a prompt and of the tokens after it goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from .options import LoadOptions, ModelSource, verb
from .output import check_writable, show_table, write_file
from .progress import progress_line

if TYPE_CHECKING:
    from ..profiler.profile import Profile

_PROMPT = "The capital of France is"


@verb
def profile(
    source: ModelSource,
    loading: LoadOptions,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help=f"The text to continue; {_PROMPT!r}.")
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option("--prompt-tokens", help="Instead of a text, so many tokens without meaning."),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", "--n-predict", help="Tokens after the prompt.")
    ] = 64,
    repeat: Annotated[int, typer.Option("-r", "--repeat", help="Passes over all of it.")] = 3,
    by: Annotated[str, typer.Option("--by", help="op, scope, layer, backend or format.")] = "op",
    top: Annotated[int, typer.Option("--top", help="Rows of each table; 0: all.")] = 0,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "-o",
            "--output",
            help="Also write NAME.html, .json or .trace.json (for Perfetto); repeatable.",
        ),
    ] = None,
) -> None:
    """Show what each op of a prompt and of the tokens after it costs, and the rest of the time.

    graphllm profile demo -n 64

    graphllm profile demo --by layer --top 5 -t 1 -o report.html

    graphllm profile --random mistral-7b --type q4_0 --prompt-tokens 512

    The speed is the median of passes without profiling. Share: of the profiled passes' wall time.
    Limit: the time at the ceiling that binds the op (doctor --measure) as a share of its time. To
    gain: ms a token above that.
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
    found = _taken(source, loading, prompt or _PROMPT, prompt_tokens, max_tokens, repeat)
    show_table(found.table(by, top, sys.stdout.isatty()))
    for path, write in writers:
        write_file(path, write(found))


def _taken(
    source: ModelSource,
    loading: LoadOptions,
    prompt: str,
    prompt_tokens: int,
    decode: int,
    repeat: int,
) -> Profile:
    from ..profiler.bench import filler_tokens

    llm = loading.load(source.open(loading))
    ids = filler_tokens(prompt_tokens, llm.decoder.cfg.vocab)
    with progress_line("profiling") as progress:
        return llm.profile(ids or prompt, decode, repeat, progress)


def _writer(path: Path) -> Callable[[Profile], str]:
    """What makes the file's text. RequestError for an unknown kind."""
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
