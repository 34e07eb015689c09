"""Report of `graphllm validate`: the checks of one or several models."""

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
    """Result of one check.

    Attributes:
        name: name of the check.
        status: `PASSED`, `FAILED` or `SKIPPED`.
        summary: one line.
        lines: details, above all of a failure.
        rows: figures; mappings with the same keys.
    """

    name: str
    status: str
    summary: str
    lines: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Run:
    """Checks of one model. ``oracle``: its name, or empty; ``device``: the first backend."""

    title: str
    oracle: str
    device: str
    checks: tuple[Check, ...]

    @property
    def first(self) -> Check | None:
        """First check that failed, or None."""
        return next((c for c in self.checks if c.status == FAILED), None)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.first is not None:
            return f"failed: {self.first.name}: {self.first.summary}"
        if self.oracle:
            return "passed"
        return (
            "passed, but only against itself: transformers has no such model, and the model file "
            "has no oracle(config, weights, ids); pass one with --oracle FILE"
        )


@dataclass(frozen=True)
class Report:
    """Report on one model, or on the small models of a model file."""

    model: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> tuple[Run, Check] | None:
        """First check that failed, with its model."""
        return next(((run, run.first) for run in self.runs if run.first), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form.

        Keys: ``schema``, ``version`` (incremented on incompatible changes), ``model``, ``passed``,
        ``failed`` (name of the first failed check, or null) and ``runs``.
        """
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
        """Return the report as text.

        Of several models only the first that failed is shown in full, unless ``verbose``; the
        others are a line each.
        """
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
    """Replace infinity and NaN, which JSON lacks, by their names."""
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
    names = ("logits", "hidden") if run.oracle else ("steps", "batches")
    check = next(c for c in run.checks if c.name in names)
    line = f"{run.title} {run.verdict}{against}: {check.name}: {check.summary}"
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
    """Format rows as columns under their keys."""
    cells = [[*rows[0]], *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells]


def shown(value: Any) -> str:
    """Format a float in few digits; other values with str."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if 0.1 <= abs(value) < 1e6 else f"{value:.1e}"
