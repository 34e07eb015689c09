"""The verb ``profile``: time, bandwidth and share of the roofline of every op."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Option, verb
from .options import LoadOptions, ModelSource
from .output import check_writable, show_table, write_file

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint
    from ..profiler.profile import Profile

_MAX_TOKENS = 64
_PROMPT = "The capital of France is"

Batch = Annotated[
    int, Option("-b", "--batch", help="Number of sequences; each has arbitrary tokens of its own.")
]
Ramps = Annotated[
    bool,
    Option(
        "--ramps",
        help="On CUDA: one more pass, and tables of the time in which each launch keeps memory "
        "below 80 % of its bandwidth.",
    ),
]


@verb
def profile(
    source: ModelSource,
    load_options: LoadOptions,
    prompt: Annotated[
        str | None, Option("-p", "--prompt", help=f"Prompt; {_PROMPT!r} by default.")
    ] = None,
    prompt_tokens: Annotated[
        int,
        Option("--prompt-tokens", help="Use this many arbitrary tokens as the prompt."),
    ] = 0,
    max_tokens: Annotated[
        int | None,
        Option(
            "-n",
            "--max-tokens",
            "--n-predict",
            help=f"Number of tokens to generate; {_MAX_TOKENS} by default.",
            show_default=False,
        ),
    ] = None,
    batch: Batch = 1,
    repeat: Annotated[int, Option("-r", "--repeat", help="Number of profiled passes.")] = 3,
    by: Annotated[
        str, Option("--by", help="Group rows by op, scope, layer, backend or format.")
    ] = "op",
    top: Annotated[int, Option("--top", help="Number of rows of each table; 0 shows all.")] = 0,
    ramps: Ramps = False,
    output: Annotated[
        list[Path] | None,
        Option(
            "-o",
            "--output",
            help="Also write NAME.html, NAME.json or NAME.trace.json (Perfetto); may be repeated.",
        ),
    ] = None,
) -> None:
    """Profile prefill and decode, or an encoder: time, bandwidth and share of the roofline.

    graphllm profile demo -n 64

    graphllm profile demo --by layer --top 5 -t 1 -o report.html

    graphllm profile --random mistral-7b --type q4_0 --prompt-tokens 512

    graphllm profile demo -b 8 --prompt-tokens 100 -n 32

    graphllm profile --random mistral-7b --type q4_k_m --device cuda --ramps

    Speed: median of passes without profiling. Share: of the wall time of profiled passes.
    Roofline: time at the ceiling that bounds the op (doctor --measure) as a share of its time.
    Headroom: time above that, in ms per token. With -b: a batch of sequences, and the cost of
    each of them. With --ramps: the time of each launch in which memory is not busy.
    Of an encoder, the texts are computed, and nothing is generated.
    """
    from ..profiler.record import GROUP_KEYS

    if by not in GROUP_KEYS:
        raise RequestError(f"--by {by} must be one of {', '.join(GROUP_KEYS)}")
    if top < 0:
        raise RequestError(f"--top {top} must be at least 0")
    if prompt_tokens < 0:
        raise RequestError(f"--prompt-tokens {prompt_tokens} must be at least 0")
    writers = [(path, _writer(path, source, load_options)) for path in output or ()]
    if batch < 1:
        raise RequestError(f"-b {batch} must be at least 1")
    if prompt is not None and prompt_tokens:
        raise RequestError("give --prompt or --prompt-tokens, not both")
    if batch > 1 and prompt is not None:
        raise RequestError("-b has prompts of its own: give --prompt-tokens, not --prompt")
    if prompt is None and (source.random is not None or batch > 1):
        prompt_tokens = prompt_tokens or 512
    prompts = partial(_prompts, prompt or _PROMPT, prompt_tokens, batch)
    how = {"repeat": repeat, "ramps": ramps}
    found = _profile(source.open(load_options), load_options, prompts, batch, max_tokens, how)
    show_table(found.table(by, top, sys.stdout.isatty()))
    for path, write in writers:
        write_file(path, write(found))


def _profile(
    file: Checkpoint, options: LoadOptions, prompts: Callable[[int], list[Any]], batch: int,
    max_tokens: int | None, how: Mapping[str, Any],
) -> Profile:  # fmt: skip
    """Load and profile a model.

    ``prompts``: returns the prompts for the size of a vocabulary; ``how``: other arguments.
    """
    from ..loading.load import model_spec

    if model_spec(file, options.model_def).is_encoder:
        if max_tokens is not None:
            raise RequestError("-n has no meaning for an encoder")
        with options.load_encoder(file) as encoder, progress_line("profiling") as progress:
            return encoder.profile(prompts(encoder.encoder.cfg.vocab), show=progress, **how)
    tokens = _MAX_TOKENS if max_tokens is None else max_tokens
    llm = options.load(file, max_sequences=batch)
    with progress_line("profiling") as progress:
        return llm.profile(prompts(llm.decoder.cfg.vocab), tokens, show=progress, **how)


def _prompts(prompt: str, tokens: int, batch: int, vocab: int) -> list[Any]:
    """Return the prompt, or ``batch`` prompts of arbitrary tokens without a common prefix."""
    from ..profiler.bench import filler_prompts

    return list(filler_prompts(batch, tokens, vocab)) if tokens else [prompt]


def _writer(path: Path, source: ModelSource, options: LoadOptions) -> Callable[[Profile], str]:
    """Return the function that renders the file. RequestError: unknown file type, or an input."""
    from ..checkpoints.model_files import check_not_input
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
            files = [("the model file", options.model_def)]
            check_not_input(path, models=[source.model], files=files, flag="-o")
            return lambda profile: write(profile.as_dict())
    raise RequestError(f"-o {path}: the name must end in {', '.join(kinds)}")
