"""Output of `bench`: JSON, CSV, and Markdown tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# Title (a trailing colon right-aligns the column), width, text.
Column = tuple[str, int, Callable[[Row], str]]


def as_json(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a JSON array, one object per line."""
    before = "["
    for row in rows:
        yield before + json.dumps(row)
        before = ","
    yield "]"


def as_csv(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a header and quoted values; without the samples, as llama-bench does."""
    for number, row in enumerate(rows):
        short = {key: value for key, value in row.items() if not key.startswith("samples")}
        if not number:
            yield ",".join(short)
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(short.values())
        yield line.getvalue()


def markdown(rows: Iterable[Row], columns: Sequence[Column]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    widths = [width for _, width, _ in columns]
    right = [title.endswith(":") for title, _, _ in columns]
    for number, row in enumerate(rows):
        if not number:
            yield _line([title.rstrip(":") for title, _, _ in columns], widths, right)
            yield _line(["-" * (w - r) + ":" * r for w, r in zip(widths, right)], widths, right)
        yield _line([text(row) for _, _, text in columns], widths, right)


def _line(cells: Iterable[str], widths: Iterable[int], right: Iterable[bool]) -> str:
    padded = (f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(cells, widths, right))
    return "| " + " | ".join(padded) + " |"
