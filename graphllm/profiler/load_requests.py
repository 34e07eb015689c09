"""Requests of a load test: generated from a seed, or read from a JSON-lines file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError

RANDOM_IDS = 256  # of random prompts; each vocabulary has as many, also a server's
_FIELDS = ("arrival_s", "prompt_tokens", "prompt", "max_tokens")


@dataclass(frozen=True)
class LoadRequest:
    """A request of a load test.

    Attributes:
        arrival_s: arrival in seconds from the beginning of the test.
        prompt: token ids.
        max_tokens: tokens to sample.
    """

    arrival_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """Requests of a load test.

    Attributes:
        requests: the requests, in the order of arrival.
        parallel: number of sequences that are computed at once.
        seed: request i is sampled with ``seed + i``.
        over_http: whether they come over HTTP from a client on the server's machine.
    """

    requests: Sequence[LoadRequest]
    parallel: int = 16
    seed: int = 0
    over_http: bool = False

    @property
    def context(self) -> int:
        """Tokens of the longest request, at least those of a decode step."""
        longest = max(len(each.prompt) + each.max_tokens for each in self.requests)
        return max(longest, self.parallel)


def synthetic_requests(
    count: int, rate: float, prompts: Sequence[int], outputs: Sequence[int], vocab: int, seed: int
) -> list[LoadRequest]:
    """Return random requests; equal arguments give equal requests.

    Args:
        count: number of requests.
        rate: mean arrivals per second of a Poisson process; 0 lets all arrive at once.
        prompts: lengths of prompts in tokens, of which each request takes one at random.
        outputs: numbers of tokens to sample, of which each request takes one at random.
        vocab: size of the vocabulary.
        seed: seed of the random numbers.
    """
    draw, at, found = random.Random(seed), 0.0, []
    for index in range(count):
        if rate and index:
            at += draw.expovariate(rate)
        ids = draw.choices(range(vocab), k=draw.choice(prompts))
        found.append(LoadRequest(at, ids, draw.choice(outputs)))
    return found


def read_requests(path: Path, encode: Callable[[str], list[int]], seed: int) -> list[LoadRequest]:
    """Read requests from a file with one JSON object per line.

    ``arrival_s`` (seconds, 0 by default), ``max_tokens``, and either ``prompt`` (a string or token
    ids) or ``prompt_tokens`` (the length of a random prompt).

    Args:
        path: the file.
        encode: returns the token ids of a string.
        seed: seed of random prompts.

    Returns:
        The requests in the order of arrival.

    Raises:
        RequestError: the file cannot be read, has no request, or a line is invalid.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise RequestError(f"{path}: {what}") from None
    draw, found = random.Random(seed), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where}: not JSON: {error}") from None
        found.append(_request(row, where, encode, draw))
    if not found:
        raise RequestError(f"{path}: contains no request")
    return sorted(found, key=lambda request: request.arrival_s)


def _request(
    row: Any, where: str, encode: Callable[[str], list[int]], draw: random.Random
) -> LoadRequest:
    """Return the request of one line. RequestError: it is invalid."""
    if not isinstance(row, dict):
        raise RequestError(f"{where}: not an object")
    unknown = sorted(row.keys() - set(_FIELDS))
    if unknown:
        raise RequestError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(_FIELDS)}")
    arrival = row.get("arrival_s", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < 1e9:
        raise RequestError(f"{where}: arrival_s = {arrival!r} must be a number of seconds")
    if ("prompt" in row) == ("prompt_tokens" in row):
        raise RequestError(f"{where}: give prompt or prompt_tokens")
    if "prompt_tokens" in row:
        prompt = draw.choices(range(RANDOM_IDS), k=_count(row, "prompt_tokens", where))
    else:
        prompt = _prompt(row["prompt"], where, encode)
    return LoadRequest(float(arrival), prompt, _count(row, "max_tokens", where))


def _prompt(value: Any, where: str, encode: Callable[[str], list[int]]) -> list[int]:
    if isinstance(value, str):
        value = encode(value)
    elif not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise RequestError(f"{where}: prompt must be a string or token ids")
    if not value:
        raise RequestError(f"{where}: the prompt is empty")
    return list(value)


def _count(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise RequestError(f"{where}: {name} = {value!r} must be a positive integer")
    return value
