"""The verb ``compare``: changes between two profiles or benchmarks, with confidence intervals."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Argument, Option, exit_with, verb
from .output import show_json, show_table

if TYPE_CHECKING:
    from ..profiler.compare.comparison import Comparison

_A = (
    "One or more comma-separated files written by `profile -o` or `bench -o json`; with --against, "
    "a MODEL."
)


@dataclass
class InterleavedOptions:
    """Options of interleaved runs (--against)."""

    against: Annotated[
        str | None,
        Option(
            "--against",
            metavar="WHAT",
            help="Profile MODEL interleaved with commit=REV, backend=NAME or other flags.",
        ),
    ] = None
    flags: Annotated[
        str,
        Option(
            "--with", metavar="FLAGS", help="Flags of profile for both runs, such as '-n 32 -t 2'."
        ),
    ] = ""
    repeat: Annotated[
        int,
        Option("-r", "--repetitions", help="Number of interleaved pairs of runs of --against."),
    ] = 5

    def compare(self, model: str | None, other: str | None, options: dict[str, Any]) -> Comparison:
        """Profile the model in interleaved runs and compare them. RequestError: invalid option."""
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
            return compare(*files, names=(a.name, b.name), **options)


@dataclass
class ReportOptions:
    """Options of the comparison."""

    by: Annotated[
        str, Option("--by", help="Group rows by op, scope, layer, backend or format.")
    ] = "op"
    min_effect: Annotated[
        str, Option("--min-effect", help="Smallest change to report as slower or faster.")
    ] = "3%"
    fail_above: Annotated[
        str | None,
        Option(
            "--fail-above",
            metavar="5%",
            help="Exit with code 1 if a row is slower by more than this.",
        ),
    ] = None
    force: Annotated[bool, Option("--force", help="Allow different models or shapes.")] = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `graphllm.compare`. RequestError: invalid percentage."""
        found = {"by": self.by, "force": self.force}
        found["min_effect"] = parse_percentage("--min-effect", self.min_effect)
        if self.fail_above is not None:
            found["fail_above"] = parse_percentage("--fail-above", self.fail_above)
        return found


@verb
def compare(
    interleaved: InterleavedOptions,
    report: ReportOptions,
    first: Annotated[str | None, Argument(metavar="A", help=_A, show_default=False)] = None,
    second: Annotated[
        str | None, Argument(metavar="B", help="As many files as A.", show_default=False)
    ] = None,
    top: Annotated[int, Option("--top", help="Number of unchanged rows to show; 0 shows all.")] = 0,
    output: Annotated[str, Option("-o", "--output", help="Output format: text or json.")] = "text",
) -> None:
    """Compare two profiles or benchmarks step by step, and distinguish changes from noise.

    A row is slower or faster if it changed by more than --min-effect at a
    joint confidence level of 95 %, and unclear if its confidence interval is
    too wide to tell. Two single runs cannot show the noise of the machine:
    --against profiles MODEL in interleaved runs. A is then the version or
    configuration that --against names, B the current one.

    graphllm compare before.json after.json --fail-above 5%

    graphllm compare demo --against commit=HEAD~1

    graphllm compare demo --against "--threads 1" --with "-n 32" --by layer
    """
    from ..profiler.compare.comparison import compare as compared

    if output not in ("text", "json"):
        raise RequestError(f"-o {output} must be text or json")
    if top < 0:
        raise RequestError(f"--top {top} must be at least 0")
    options = report.arguments()
    if interleaved.against is not None:
        found = interleaved.compare(first, second, options)
    elif first is None or second is None:
        raise RequestError("give two files, A and B, or a MODEL and --against WHAT")
    elif interleaved.flags:
        raise RequestError(f"--with {interleaved.flags!r} needs --against")
    else:
        found = compared(first.split(","), second.split(","), **options)
    colour = sys.stdout.isatty()
    if output == "json":
        show_json(found.as_dict())
    else:
        show_table(found.table(top, colour))
    if found.failed:
        exit_with(1)


def parse_percentage(flag: str, text: str) -> float:
    """Return 0.05 for ``5%`` or ``5``. RequestError: not a percentage."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?%?", text.strip(), re.ASCII)
    if match is None:
        raise RequestError(f"{flag} {text!r} must be a percentage, such as 5%")
    return float(match[1]) / 100
