"""The verb ``validate``: compare a model with transformers, and its backends with each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Argument, Option, exit_with, verb
from .options import AsJson, ModelDef
from .output import check_writable, show_json, show_table, write_file

if TYPE_CHECKING:
    from ..validation import Report


@dataclass
class ValidationOptions:
    """Options of the model and of the implementation to compare it with."""

    model: Annotated[
        str | None,
        Argument(
            help="A Hugging Face directory; with --tiny, a model family or a model file.",
            show_default=False,
        ),
    ] = None
    model_def: ModelDef = None
    tiny: Annotated[
        bool,
        Option("--tiny", help="Validate small random models, built from TINY of the model file."),
    ] = False
    oracle: Annotated[
        Path | None,
        Option(
            "--oracle",
            metavar="FILE",
            help="Python file to compare with: oracle(config, weights, ids), or a torch module.",
        ),
    ] = None
    device: Annotated[
        str, Option("--device", help="First backend to try: auto, cuda, cpu or reference.")
    ] = "auto"
    tokens: Annotated[int, Option("--tokens", help="Number of prompt tokens.")] = 64
    new: Annotated[
        int, Option("-n", "--max-tokens", help="Number of tokens to generate greedily.")
    ] = 16


@verb
def validate(
    subject: ValidationOptions,
    verbose: Annotated[
        bool, Option("-v", "--verbose", help="Show the measured values of each check.")
    ] = False,
    as_json: AsJson = False,
    output: Annotated[
        list[Path] | None,
        Option(
            "-o", "--output", help="Also write a report NAME.html or NAME.json; may be repeated."
        ),
    ] = None,
) -> None:
    """Compare a model with transformers, and its backends with each other.

    Checks the tokenizer, configuration, weights, every layer, logits, greedy
    tokens and perplexity. The exit code is 1 if a check fails; the first
    failure is located to a module, an op and its line of code.

    graphllm validate path/to/directory

    graphllm validate path/to/directory --model-def my_model.py -o report.html

    graphllm validate --tiny --model-def my_model.py

    graphllm validate qwen2 --tiny
    """
    from ..checkpoints.model_files import check_not_input
    from ..validation import validate as validated

    writers = [(path, _writer(path)) for path in output or ()]
    for path in output or ():
        files = [("the model file", subject.model_def), ("the oracle", subject.oracle)]
        models = [None if subject.tiny else subject.model]
        check_not_input(path, models=models, files=files, flag="-o")
    with progress_line("validating") as progress:
        found = validated(**vars(subject), progress=progress)
    if as_json:
        show_json(found.as_dict())
    else:
        show_table(found.table(verbose, sys.stdout.isatty()))
    for path, write in writers:
        write_file(path, write(found))
    if found.first is not None:
        exit_with(1)


def _writer(path: Path) -> Callable[[Report], str]:
    """Return the function that renders the file. RequestError: unknown file type."""
    from ..validation.html_page import render_page

    check_writable(path)
    if path.suffix == ".html":
        return render_page
    if path.suffix == ".json":
        return lambda report: json.dumps(report.as_dict())
    raise RequestError(f"-o {path}: the name must end in .html or .json")
