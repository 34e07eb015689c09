"""Bills against callers' clocks: the rows of a bill as a share of the wall time of its request.

    pip install 'graphllm[serve,demo]'
    python benchmarks/bills.py demo -b 1,16,24:16 -n 8,64 -t 2 -r 4

Each request has a thread of its own, which notes the time before it sends the request and after it
has the whole answer. Requests are computed in this process (`LLM.submit`), and by `graphllm serve`
in another one, whole and streamed, each over a connection of its own. In each round ``-b`` requests
begin at once; of ``-b 24:16``, 24 requests, of which 16 run at once and the others wait.

Columns: the caller's wall time (median), the sum of the rows as a share of it (median and extremes
of all requests), and the shares of causes in the sum. The exit code is 1 if the rows of any request
are more than 3 % away from its wall time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from http_server import prompts, server

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.profiler.roofline import cpu_name

_LIMIT = 0.03  # of the wall time
_SETTINGS = {"temperature": 0.8, "seed": 1, "ignore_eos": True}
_CAUSES = "gaps", "host", "other requests", "prompt", "queue", "preemption", "http"


class Billed(NamedTuple):
    """A request: nanoseconds that its caller measured, and its bill."""

    wall_ns: int
    bill: dict[str, Any]

    @property
    def share(self) -> float:
        """Sum of the rows as a share of the wall time."""
        return sum(row["ns"] for row in self.bill["rows"]) / self.wall_ns

    def cause(self, name: str) -> float:
        """Share of a row in the sum of all; 0 if the bill does not have it."""
        times = {row["name"]: row["ns"] for row in self.bill["rows"]}
        return times.get(name, 0) / sum(times.values())


Call = Callable[[str], dict[str, Any]]  # returns the bill of a request


def in_process(llm: graphllm.LLM, tokens: int, text: str) -> dict[str, Any]:
    """Compute a request in this process."""
    done = llm.submit(text, max_tokens=tokens, profile=True, **_SETTINGS).result()
    assert done.bill is not None
    return done.bill.as_dict()


def over_http(port: int, tokens: int, stream: bool, text: str) -> dict[str, Any]:
    """Let a server compute a request."""
    body = {"prompt": text, "max_tokens": tokens, "x_profile": True, "stream": stream, **_SETTINGS}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"error: status {response.status}: {data[:200]!r}")
    if stream:
        *_, data, done = (each for each in data.split(b"\n\n") if each)
        if done != b"data: [DONE]":
            raise SystemExit("error: a stream ended early")
    found: dict[str, Any] = json.loads(data.removeprefix(b"data: "))["x_profile"]
    return found


def timed(call: Call, text: str) -> Billed:
    """Return the bill of a request and the time around it."""
    start = time.perf_counter_ns()
    bill = call(text)
    return Billed(time.perf_counter_ns() - start, bill)


def measure(call: Call, count: int, rounds: int) -> list[Billed]:
    """Return the requests of all rounds but a first one, which warms up."""
    found: list[list[Billed]] = []
    with ThreadPoolExecutor(count) as pool:
        for number in range(rounds + 1):
            texts = [f"{number} {text}" for text in prompts(count)]  # not in the prefix cache
            found.append([*pool.map(partial(timed, call), texts)])
    return [each for own in found[1:] for each in own]


def report(title: str, count: int, tokens: int, found: Sequence[Billed]) -> bool:
    """Print a row; return whether all bills are within the limit."""
    shares = [each.share for each in found]
    causes = [median(each.cause(name) for each in found) for name in _CAUSES]
    wall = median(each.wall_ns for each in found) / 1e6
    spread = f"{median(shares):.2%} ({min(shares):.2%}-{max(shares):.2%})"
    print(
        f"{title:<14} | {count:8} | {tokens:6} | {wall:8.1f} | {spread:<24} | "
        + " | ".join(f"{100 * share:{len(name)}.1f}" for name, share in zip(_CAUSES, causes)),
        flush=True,
    )
    return all(abs(share - 1) <= _LIMIT for share in shares)


def parse_batch(text: str) -> tuple[int, int]:
    """Return the numbers of requests and of sequences."""
    count, _, sequences = text.partition(":")
    return int(count), int(sequences or count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-b", dest="batches", default="1,16,24:16", help="Requests at once.")
    parser.add_argument("-n", dest="tokens", default="64", help="Tokens of each answer.")
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-r", dest="rounds", type=int, default=5)
    opts = parser.parse_args()
    batches = [parse_batch(each) for each in opts.batches.split(",")]
    lengths = [int(each) for each in opts.tokens.split(",")]
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads")
    print("by             | requests | tokens |  wall ms | rows / wall              | "
          + " | ".join(_CAUSES) + " (%)")  # fmt: skip
    within = True
    for count, sequences in batches:
        with (
            graphllm.load(
                opts.model, context=512, max_sequences=sequences, threads=opts.threads
            ) as llm,
            server(opts.model, sequences, opts.threads) as (port, _),
        ):
            for tokens in lengths:
                calls: dict[str, Call] = {
                    "submit": partial(in_process, llm, tokens),
                    "HTTP, whole": partial(over_http, port, tokens, False),
                    "HTTP, streamed": partial(over_http, port, tokens, True),
                }
                for title, call in calls.items():
                    found = measure(call, count, opts.rounds)
                    within &= report(title, count, tokens, found)
    if not within:
        sys.exit("error: the rows of a bill are more than 3 % away from the wall time")


if __name__ == "__main__":
    main()
