"""What `graphllm validate` found: checks, in order, of one model or of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from ..terminal import escape_control

SCHEMA, VERSION = "graphllm.validation", 1
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """One check. ``summary``: a line; ``lines``: more of them, what went wrong above all; ``rows``:
    figures, a mapping each, with the same keys."""

    name: str
    status: str
    summary: str
    lines: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Run:
    """One model's checks. ``oracle``: who was compared with, empty if nobody; ``device``: the first
    backend."""

    title: str
    oracle: str
    device: str
    checks: tuple[Check, ...]

    @property
    def first(self) -> Check | None:
        """The first check that failed."""
        return next((c for c in self.checks if c.status == FAILED), None)

    @property
    def verdict(self) -> str:
        """In a line."""
        if self.first is not None:
            return f"failed: {self.first.name}: {self.first.summary}"
        if self.oracle:
            return "passed"
        return (
            "passed, but against itself only: transformers has no such model, and the model file "
            "has no oracle(config, weights, ids); --oracle FILE gives one"
        )


@dataclass(frozen=True)
class Report:
    """Of one model, or of the small ones of a model file."""

    model: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> tuple[Run, Check] | None:
        """The first check that failed, and of which model."""
        return next(((run, run.first) for run in self.runs if run.first), None)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: ``schema``, ``version`` (which grows when a reader would have to change),
        ``model``, ``passed``, ``failed`` (the first check's name, or null) and ``runs``."""
        from ..version import __version__

        failed = self.first[1].name if self.first else None
        runs = [
            {**_finite(asdict(run)), "passed": run.first is None, "verdict": run.verdict}
            for run in self.runs
        ]
        return {
            "schema": SCHEMA, "version": VERSION, "graphllm": __version__, "model": self.model,
            "passed": failed is None, "failed": failed, "runs": runs,
        }  # fmt: skip

    def table(self, verbose: bool = False, colour: bool = False) -> str:
        """For a terminal. Of several models those that passed are a line each, unless ``verbose``,
        and so are those after the first that failed."""
        if len(self.runs) == 1:
            return "\n".join(_block(self.runs[0], verbose, colour))
        blocks: list[str] = []
        first = self.first[0] if self.first else None
        for run in self.runs:
            full = verbose or run is first
            blocks += _block(run, verbose, colour) if full else [_line(run, colour)]
        passed = sum(run.first is None for run in self.runs)
        last = f"{passed} of {len(self.runs)} passed"
        if first is not None:
            last += f"; {first.title} {first.verdict}"
        return "\n".join([*blocks, _coloured(last, first, colour)])


def _finite(value: Any) -> Any:
    """JSON has no numbers for infinity and NaN: their names."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


_COLOURS = {PASSED: "\033[32m", FAILED: "\033[31m", SKIPPED: "\033[2m"}
_PLAIN = "\033[0m"
_MARKS = {PASSED: "passed", FAILED: "FAILED", SKIPPED: "-"}


def _line(run: Run, colour: bool) -> str:
    if run.first is not None:
        return _coloured(f"{run.title} {run.verdict}", run.first, colour)
    against = f" against {run.oracle}" if run.oracle else ""
    told = next(c for c in run.checks if c.name == ("logits" if run.oracle else "steps"))
    line = f"{run.title} {run.verdict}{against}: {told.name} {told.summary}"
    return _coloured(line, None, colour)


def _block(run: Run, verbose: bool, colour: bool) -> Iterator[str]:
    against = f" against {run.oracle}" if run.oracle else ""
    yield escape_control(f"{run.title} on {run.device}{against}")
    width = max(len(c.name) for c in run.checks)
    for check in run.checks:
        mark = f"{_MARKS[check.status]:<6}"
        shown = f"{_COLOURS[check.status]}{mark}{_PLAIN}" if colour else mark
        yield f"  {check.name:<{width}}  {shown}  {escape_control(check.summary)}"
        if verbose or check.status == FAILED:
            yield from (f"  {'':<{width}}          {escape_control(line)}" for line in check.lines)
        if verbose and check.rows:
            yield from (
                f"  {'':<{width}}          {escape_control(line)}" for line in columns(check.rows)
            )
    yield _coloured(run.verdict, run.first, colour)


def _coloured(text: str, bad: object, colour: bool) -> str:
    text = escape_control(text)
    return f"{_COLOURS[FAILED if bad else PASSED]}{text}{_PLAIN}" if colour else text


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows under their keys, in columns."""
    cells = [[*rows[0]], *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]


def shown(value: Any) -> str:
    """A figure in few digits; other values as they are."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e6 else f"{value:.1e}"
