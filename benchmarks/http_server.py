"""What HTTP costs: streams of `graphllm serve` and the same requests in one process, interleaved.

    pip install 'graphllm[serve,demo]'
    python benchmarks/http_server.py demo -b 1,16,64 -n 64 -t 2 -r 3

Each round computes ``-b`` requests at once, each with a prompt of its own of about 32 tokens and
``-n`` sampled tokens, first through the engine and then through a server on localhost, whose
client is this process. Rates are tokens per second of all requests, from the first submission to
the last token; the ratio is that of the same round. TTFT: the median time to the first piece of
text, which in the engine is the time of the step that ends the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.profiler.roofline import cpu_name

_WORDS = [
    "water",
    "stone",
    "river",
    "cloud",
    "mountain",
    "forest",
    "winter",
    "summer",
    "morning",
    "night",
    "city",
    "road",
]


def prompts(count: int) -> list[str]:
    """Different texts of about 32 tokens."""
    return [" ".join(_WORDS[(i + 5 * j) % 12] for j in range(28)) + f" {i}" for i in range(count)]


def through_engine(llm: graphllm.LLM, texts: list[str], tokens: int) -> tuple[float, float]:
    """Return tokens per second and the median time to the first token."""
    start, first = time.perf_counter(), dict[int, float]()
    settings = {"max_tokens": tokens, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    for index, _ in llm.stream(texts, **settings):
        first.setdefault(index, time.perf_counter() - start)
    return len(texts) * tokens / (time.perf_counter() - start), median(first.values())


async def one_stream(port: int, text: str, tokens: int, start: float) -> float:
    """Read a stream to its end, and return the time to its first text."""
    body = json.dumps(
        {"prompt": text, "max_tokens": tokens, "temperature": 0.8, "seed": 1, "stream": True,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(
        f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body
    )
    first, ended = 0.0, False
    while line := await reader.readline():
        if not first and b'"text":' in line:
            first = time.perf_counter() - start
        ended = ended or b"[DONE]" in line
    writer.close()
    if not ended:
        raise SystemExit("error: a stream ended early")
    return first


def through_http(port: int, texts: list[str], tokens: int) -> tuple[float, float]:
    """As `through_engine`, through a server."""

    async def run() -> list[float]:
        start = time.perf_counter()
        return await asyncio.gather(*(one_stream(port, text, tokens, start) for text in texts))

    start = time.perf_counter()
    firsts = asyncio.run(run())
    return len(texts) * tokens / (time.perf_counter() - start), median(firsts)


@contextmanager
def server(model: str, sequences: int, threads: int) -> Iterator[int]:
    """Serve a model in another process; yields the port."""
    command = [sys.executable, "-m", "graphllm", "serve", model, "--port", "0", "-t", str(threads),
               "--parallel", str(sequences), "-c", "512"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        port = None
        for line in process.stderr:
            if found := re.search(r"http://[^ :]+:(\d+)", line):
                port = int(found[1])
                break
        if port is None:
            raise SystemExit("error: the server did not start")
        try:
            yield port
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-b", dest="batches", default="1,16,64", help="Requests at once.")
    parser.add_argument("-n", dest="tokens", type=int, default=64)
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-r", dest="rounds", type=int, default=3)
    opts = parser.parse_args()
    batches = [int(each) for each in opts.batches.split(",")]
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.tokens} tokens each")
    print("requests | engine tok/s | HTTP tok/s | HTTP / engine      | TTFT ms: engine | HTTP")
    most = max(batches)
    with (
        graphllm.load(opts.model, context=512, max_sequences=most, threads=opts.threads) as llm,
        server(opts.model, most, opts.threads) as port,
    ):
        for count in batches:
            own, http = [], []
            for _ in range(opts.rounds + 1):
                texts = prompts(count)
                own.append(through_engine(llm, texts, opts.tokens))
                http.append(through_http(port, texts, opts.tokens))
            ratios = [b[0] / a[0] for a, b in zip(own[1:], http[1:])]
            rates = [median(each[0] for each in side[1:]) for side in (own, http)]
            times = [1e3 * median(each[1] for each in side[1:]) for side in (own, http)]
            print(
                f"{count:8} | {rates[0]:12.1f} | {rates[1]:10.1f} | {median(ratios):.3f} "
                f"({min(ratios):.3f}-{max(ratios):.3f}) | {times[0]:15.1f} | {times[1]:.1f}"
            )


if __name__ == "__main__":
    main()
