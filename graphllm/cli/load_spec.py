"""Synthetic loads on the command line (``--load rate=4,prompt=128,output=64``), and their table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .number_lists import parse_numbers

if TYPE_CHECKING:
    from ..profiler.load_requests import Load

SPEC = "rate=R,prompt=N,output=N"
SPEC_HELP = (
    "R requests per second (Poisson) with prompts and outputs of N tokens, or of a range as in "
    "16-256. Also requests=100, parallel=16 (sequences that are computed at once) and seed=0."
)
_KEYS = ("rate", "prompt", "output", "requests", "parallel", "seed")
LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "queue_s": "queue time",
    "e2e_s": "end to end",
}
RATES = {
    "requests_s": "requests/s",
    "output_tok_s": "output tok/s",
    "total_tok_s": "total tok/s",
}
_PERCENTILES = ("mean", "p50", "p90", "p99")


def parse_load(text: str) -> Load:
    """Return the load. RequestError: a part is unknown, missing, given twice or invalid."""
    from ..profiler.load_requests import RANDOM_IDS, Load, synthetic_requests

    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in _KEYS or not equals or name in found:
            raise RequestError(f"--load {text!r}: {part!r} must be one of {'=, '.join(_KEYS)}=")
        found[name] = value
    for name in ("rate", "prompt", "output"):
        if name not in found:
            raise RequestError(f"--load {text!r}: {name}= is missing")
    count, parallel, seed = (
        _one(f"--load {name}=", found.get(name, default), name != "seed")
        for name, default in (("requests", "100"), ("parallel", "16"), ("seed", "0"))
    )
    prompts, outputs = (_lengths(f"--load {name}=", found[name]) for name in ("prompt", "output"))
    rate = _rate(found["rate"])
    requests = synthetic_requests(count, rate, prompts, outputs, RANDOM_IDS, seed)
    return Load(requests, parallel, seed)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not math.isfinite(rate) or rate < 0:
        raise RequestError(f"--load rate={text} must be a number of requests per second")
    return rate


def _lengths(flag: str, text: str) -> list[int]:
    values = parse_numbers(flag, text)
    if 0 in values:
        raise RequestError(f"{flag}{text} must be at least 1")
    return values


def _one(flag: str, text: str, positive: bool) -> int:
    values = parse_numbers(flag, text)
    if len(values) > 1 or (positive and not values[0]):
        raise RequestError(f"{flag}{text} must be one number{' above 0' if positive else ''}")
    return values[0]


def load_table(columns: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield the lines of a table: rates, latencies and steps, with a column for each measurement.

    ``columns``: `LoadTimes.as_dict` by title; None leaves a column out.
    """
    known = {title: values for title, values in columns.items() if values is not None}
    yield f"{'':<27}" + "".join(f" {title:>12}" for title in known)
    for key, title in RATES.items():
        yield f"{title:<27}" + "".join(f" {values[key]:>12.2f}" for values in known.values())
    for key, title in LATENCIES.items():
        for name in _PERCENTILES:
            cells = [values[key].get(name) for values in known.values()]
            if any(cell is not None for cell in cells):
                yield f"{f'{title}, {name}, ms':<27}" + "".join(map(_cell, cells))
    for kind in ("prefill", "decode"):
        steps = [values.get("phases", {}).get(kind) for values in known.values()]
        if any(each and each["steps"] for each in steps):
            counts = [each["steps"] if each else "-" for each in steps]
            yield f"{f'{kind} steps':<27}" + "".join(f" {count:>12}" for count in counts)
            means = [each and each["seconds"] / max(1, each["steps"]) for each in steps]
            yield f"{f'{kind} step, mean, ms':<27}" + "".join(map(_cell, means))


def _cell(seconds: float | None) -> str:
    return f" {'-':>12}" if seconds is None else f" {1e3 * seconds:>12.1f}"


def capacity_line(found: Mapping[str, Any]) -> str:
    """Return a line on the load at which something is full: `Capacity` as a mapping."""
    pool = found["pool_sequences"]
    if pool < found["sequences"]:
        what = f"the KV cache, which holds {pool} sequences of mean length"
    else:
        what = f"compute, with {found['sequences']} sequences at once; the KV cache holds {pool}"
    rates = f"{found['requests_s']:.2f} requests/s, {found['output_tok_s']:.1f} output tok/s"
    return f"full at {rates}: {what}"
