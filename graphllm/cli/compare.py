"""``compare``: what changed from one profile or bench to another, and whether it is noise."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import RequestError
from .options import verb
from .output import show_json, show_table
from .progress import progress_line

if TYPE_CHECKING:
    from ..profiler.compare.comparison import Comparison

_A = "A file, or several with commas, of `profile -o` or `bench -o json`. With --against: MODEL."


@dataclass
class InterleavedOptions:
    """Runs that are made now."""

    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="WHAT",
            help="Profile MODEL in turns with commit=REV, backend=NAME, or '--other --flags'.",
        ),
    ] = None
    flags: Annotated[
        str,
        typer.Option("--with", metavar="FLAGS", help="Of profile, for both sides: '-n 32 -t 2'."),
    ] = ""
    repeat: Annotated[int, typer.Option("-r", "--repetitions", help="Turns of --against.")] = 5

    def compared(self, model: str | None, other: str | None, asked: dict[str, Any]) -> Comparison:
        """Runs of the model in turns, and what they tell. RequestError."""
        from ..profiler.compare.comparison import compare
        from ..profiler.compare.interleaved_runs import run_interleaved, split_arguments, variants

        if other is not None:
            raise RequestError(f"--against takes one MODEL, not also {other!r}")
        if self.repeat < 2:
            raise RequestError(f"-r {self.repeat} must be at least 2")
        words = [*([model] if model is not None else []), *split_arguments("--with", self.flags)]
        with (
            variants(words, self.against or "") as (a, b),
            TemporaryDirectory(prefix="graphllm-") as folder,
        ):
            with progress_line("profiling") as progress:
                files = run_interleaved((a, b), self.repeat, Path(folder), progress)
            return compare(*files, names=(a.name, b.name), **asked)


@dataclass
class ReportOptions:
    """What is asked of the numbers."""

    by: Annotated[str, typer.Option("--by", help="op, scope, layer, backend or format.")] = "op"
    min_effect: Annotated[
        str, typer.Option("--min-effect", help="Changes up to this do not matter.")
    ] = "3%"
    fail_above: Annotated[
        str | None,
        typer.Option("--fail-above", metavar="5%", help="Exit with 1 if a row is slower by more."),
    ] = None
    force: Annotated[
        bool, typer.Option("--force", help="Compare different models or shapes, too.")
    ] = False

    def asked(self) -> dict[str, Any]:
        """As `graphllm.compare` takes it. RequestError."""
        found = {"by": self.by, "force": self.force}
        found["min_effect"] = parse_percentage("--min-effect", self.min_effect)
        if self.fail_above is not None:
            found["fail_above"] = parse_percentage("--fail-above", self.fail_above)
        return found


@verb
def compare(
    turns: InterleavedOptions,
    report: ReportOptions,
    first: Annotated[str | None, typer.Argument(metavar="A", help=_A, show_default=False)] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="As many files.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Rows besides those that changed; 0: all.")] = 0,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json.")] = "text",
) -> None:
    """Compare the times of two runs step by step, and tell changes from noise.

    Slower and faster are said with 95 % confidence over all rows together,
    of changes above --min-effect; unclear: the interval is wider than that.
    Two files know little of the machine's noise; --against makes runs in
    turns, where A is what it names, and B is MODEL as it is here and now.

    graphllm compare before.json after.json --fail-above 5%

    graphllm compare demo --against commit=HEAD~1

    graphllm compare demo --against "--threads 1" --with "-n 32" --by layer
    """
    from ..profiler.compare.comparison import compare as compared

    if output not in ("text", "json"):
        raise RequestError(f"-o {output} must be text or json")
    if top < 0:
        raise RequestError(f"--top {top} must be at least 0")
    asked = report.asked()
    if turns.against is not None:
        found = turns.compared(first, second, asked)
    elif first is None or second is None:
        raise RequestError("give two files, A and B, or a MODEL and --against WHAT")
    elif turns.flags:
        raise RequestError(f"--with {turns.flags!r} needs --against")
    else:
        found = compared(first.split(","), second.split(","), **asked)
    colour = sys.stdout.isatty()
    if output == "json":
        show_json(found.as_dict())
    else:
        show_table(found.table(top, colour))
    if found.failed:
        raise typer.Exit(1)


def parse_percentage(flag: str, text: str) -> float:
    """0.05 of ``5%`` or ``5``. RequestError names the flag."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?%?", text.strip(), re.ASCII)
    if match is None:
        raise RequestError(f"{flag} {text!r} must be a percentage, as 5%")
    return float(match[1]) / 100
