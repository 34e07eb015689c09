"""The verb ``validate``: is a model right?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import RequestError
from .options import AsJson, ModelDef, verb
from .output import check_writable, show_json, show_table, write_file
from .progress import progress_line

if TYPE_CHECKING:
    from ..validation import Report


@dataclass
class Subject:
    """What is validated, and who knows better."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face directory; with --tiny a family, or a model file.",
            show_default=False,
        ),
    ] = None
    model_def: ModelDef = None
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Small models of the model file's TINY, with random weights."),
    ] = False
    oracle: Annotated[
        Path | None,
        typer.Option(
            "--oracle",
            metavar="FILE",
            help="A Python file to compare with: oracle(config, weights, ids), or a torch module.",
        ),
    ] = None
    device: Annotated[
        str, typer.Option("--device", help="auto, or the first to ask: cuda, cpu, reference.")
    ] = "auto"
    tokens: Annotated[int, typer.Option("--tokens", help="Of a text that is read.")] = 64
    new: Annotated[int, typer.Option("-n", "--max-tokens", help="Greedy tokens after it.")] = 16


@verb
def validate(
    subject: Subject,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the figures of each check.")
    ] = False,
    as_json: AsJson = False,
    output: Annotated[
        list[Path] | None,
        typer.Option("-o", "--output", help="Also write NAME.html or NAME.json; repeatable."),
    ] = None,
) -> None:
    """Compare a model with transformers, check by check: tokenizer, configuration, weights, every
    layer, logits, greedy tokens, perplexity; then one way to run it with another.

    The exit code is 1 if a check fails. What fails first is named: for a
    layer the module and the op in it that part, with its line of code.

    graphllm validate path/to/directory

    graphllm validate path/to/directory --model-def my_model.py -o report.html

    graphllm validate --tiny --model-def my_model.py

    graphllm validate qwen2 --tiny
    """
    from ..validation import validate as validated

    writers = [(path, _writer(path)) for path in output or ()]
    with progress_line("validating") as progress:
        found = validated(**vars(subject), progress=progress)
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(found.table(verbose, sys.stdout.isatty()))
    for path, write in writers:
        write_file(path, write(found))
    if found.first is not None:
        raise typer.Exit(1)


def _writer(path: Path) -> Callable[[Report], str]:
    """What makes the file's text. RequestError for an unknown kind."""
    from ..validation.page import page

    check_writable(path)
    if path.suffix == ".html":
        return page
    if path.suffix == ".json":
        return lambda report: json.dumps(report.as_dict())
    raise RequestError(f"-o {path}: the name must end in .html or .json")
