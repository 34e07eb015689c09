"""What HTTP costs: streams of `graphllm serve` and the same requests in one process, interleaved.

    pip install 'graphllm[serve,demo]'
    python benchmarks/http_server.py --model demo -b 1,16,64 -n 64 -t 2 -r 5
    python benchmarks/http_server.py --model mistral-7b:q8_0 --device cuda -b 1,64
    python benchmarks/http_server.py --model tiny -t 1 -b 64 -n 256
    python benchmarks/http_server.py --model mistral-7b:q4_0 --device cuda -b 64 -n 400 -k 4

A model is a file, ``demo``, or SHAPE:TYPE for random weights in the shape of a real model, which
`make_random_gguf` writes; its artificial vocabulary makes a token of each byte of a prompt.
``tiny`` is a random model whose kernels take so little time that steps are work of Python, as those
of a small model on a GPU.

Batches of all sizes run before. Each round computes ``-b`` requests at once, each with a prompt of
its own of about 32 tokens and ``-n`` sampled tokens, first through the engine and then through a
server on localhost. With ``-k``, each stream computes so many requests, one after another, so that
most of them come while others decode. Rates are tokens per second of all requests, from the first
submission to the last token; the ratio is that of the same round. Column ``decode``: the same ratio
of the sums of the streams' own rates after their first token. It leaves out the beginning and the
end, when the batch is not full, as requests come one after another through HTTP. TTFT: the median
time of a request to its first piece of text, which in the engine is the time of the step that ends
the prompt.

The client is this process. It must take no time of the cores that the server needs, so it leaves
the streams in the buffers of its sockets after their first text, and sleeps until the server
closes them. Columns ``loop`` and ``client``: CPU time per token of the server's event loop, parsing
of requests included, and of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.checkpoints.model_shapes import SHAPES, TYPES, ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
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
_TINY = ModelShape("llama", 1, 64, 2, 2, 128, 2000, context=2048)
# Complete, since the API of OpenAI has other defaults than `LLM.stream`.
_SETTINGS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "penalty_last_n": 64,
    "seed": 1,
    "ignore_eos": True,
}


class Round(NamedTuple):
    """Figures of one round; see the docstring of the module."""

    rate: float
    decode: float
    ttft_ms: float
    loop_us: float = 0.0
    client_us: float = 0.0


class Times(NamedTuple):
    """Times of a request in seconds: its submission, its first and its last text."""

    begin: float
    first: float
    end: float


def prompts(count: int) -> list[str]:
    """Different texts of about 32 tokens."""
    return [" ".join(_WORDS[(i + 5 * j) % 12] for j in range(28)) + f" {i}" for i in range(count)]


def through_engine(llm: graphllm.LLM, texts: list[str], tokens: int, count: int) -> Round:
    """Compute the requests in this process, at most ``count`` at once."""
    start, firsts, ends = time.perf_counter(), dict[int, float](), dict[int, float]()
    for index, _ in llm.stream(texts, max_tokens=tokens, **_SETTINGS):
        ends[index] = time.perf_counter()
        firsts.setdefault(index, ends[index])
    # A request that waits for another one's end is submitted then by a client.
    begins = [start] * count + sorted(ends.values())
    times = [Times(begins[i], firsts[each], ends[each]) for i, each in enumerate(sorted(firsts))]
    return Round(*rates(times, tokens, count))


def rates(times: list[Times], tokens: int, count: int) -> tuple[float, float, float]:
    """Return the first fields of a `Round` of ``count`` streams."""
    wall = max(each.end for each in times) - min(each.begin for each in times)
    own = sum((tokens - 1) / max(each.end - each.first, 1e-9) for each in times)
    ttft = 1e3 * median(each.first - each.begin for each in times)
    return len(times) * tokens / wall, own * count / len(times), ttft


def post(port: int, text: str, tokens: int) -> socket.socket:
    """Send the request of a stream."""
    body = json.dumps({"prompt": text, "max_tokens": tokens, "stream": True, **_SETTINGS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    found = socket.create_connection(("127.0.0.1", port))
    found.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
    found.sendall(body)
    return found


def through_http(port: int, server: int, texts: list[str], tokens: int, count: int) -> Round:
    """Compute the requests in a server, ``count`` at once; ``server``: its process id."""
    cpu, loop = time.process_time(), loop_seconds(server)
    poll, waiting = select.epoll(), texts[::-1]
    streams, data = dict[int, socket.socket](), dict[int, bytes]()
    begins, firsts, ends = dict[int, float](), dict[int, float](), dict[int, float]()

    def submit() -> None:
        begin, stream = time.perf_counter(), post(port, waiting.pop(), tokens)
        number = stream.fileno()
        streams[number], data[number], begins[number] = stream, b"", begin
        poll.register(number, select.EPOLLIN | select.EPOLLRDHUP)

    for _ in range(count):
        submit()
    while len(ends) < len(texts):
        for number, events in poll.poll():
            if b'"text":' not in data[number]:
                data[number] += streams[number].recv(1 << 16)
                if b'"text":' in data[number]:
                    firsts[number] = time.perf_counter()
                    poll.modify(number, select.EPOLLRDHUP)
            elif events & select.EPOLLRDHUP:
                ends[number] = time.perf_counter()
                poll.unregister(number)
                if waiting:
                    submit()
    spent = time.process_time() - cpu, loop_seconds(server) - loop
    for number, each in streams.items():
        while more := each.recv(1 << 16):
            data[number] += more
        each.close()
        if b"[DONE]" not in data[number]:
            raise SystemExit("error: a stream ended early")
    poll.close()
    own = rates([Times(begins[n], firsts[n], ends[n]) for n in streams], tokens, count)
    per_token = 1e6 / (len(texts) * tokens)
    return Round(*own, per_token * spent[1], per_token * spent[0])


def loop_seconds(process: int) -> float:
    """Return the CPU time of a process's main thread, in which the event loop runs."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def server(model: str, sequences: int, threads: int, device: str) -> Iterator[tuple[int, int]]:
    """Serve a model in another process; yields the port and the process id."""
    command = [sys.executable, "-m", "graphllm", "serve", model, "--port", "0", "-t", str(threads),
               "--parallel", str(sequences), "-c", "512", "--device", device]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        port, lines = None, list[str]()
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://[^ :]+:(\d+)", line):
                port = int(found[1])
                break
        if port is None:
            raise SystemExit(f"error: the server did not start: {''.join(lines[-5:])}")
        try:
            yield port, process.pid
        finally:
            process.terminate()


@contextmanager
def model_file(model: str) -> Iterator[str]:
    """Yield a model's file or name; that of random weights is removed afterwards."""
    shape, _, kind = ("tiny", "", "q8_0") if model == "tiny" else model.partition(":")
    if shape not in {*SHAPES, "tiny"} or kind not in TYPES:
        yield model
        return
    from make_random_gguf import write  # needs the package gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        write(RandomCheckpoint(_TINY if shape == "tiny" else shape, kind), path)
        yield str(path)


def warm_up_sizes(most: int) -> list[int]:
    """Return numbers of requests that need all plans, each twice as requests arrive in any order.

    The first step that needs a plan compiles it, which takes some hundredths of a second.
    """
    powers = [1 << power for power in range(most.bit_length())]
    return 2 * [*powers, *([most] if most not in powers else [])]


def spread(ratios: list[float]) -> str:
    """Return the median, and the smallest and the largest value."""
    return f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="A file, demo, tiny, or SHAPE:TYPE.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-b", dest="batches", default="1,16,64", help="Requests at once.")
    parser.add_argument("-n", dest="tokens", type=int, default=64)
    parser.add_argument("-k", dest="each", type=int, default=1, help="Requests of a stream.")
    parser.add_argument("-t", dest="threads", type=int, default=2)
    parser.add_argument("-r", dest="rounds", type=int, default=5)
    opts = parser.parse_args()
    batches = [int(each) for each in opts.batches.split(",")]
    if opts.each > 1 and len(batches) > 1:
        parser.error("-k needs one number of -b, as the engine computes as many requests at once")
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.tokens} tokens each")
    print(f"{opts.model} on {opts.device}")
    print(
        "requests | engine tok/s | HTTP tok/s | HTTP / engine       | decode              | "
        "TTFT ms: engine | HTTP  | us/token: loop | client"
    )
    most = max(batches)
    with (
        model_file(opts.model) as model,
        graphllm.load(
            model, context=512, max_sequences=most, threads=opts.threads, device=opts.device
        ) as llm,
        server(model, most, opts.threads, opts.device) as (port, process),
    ):
        for count in warm_up_sizes(most):
            through_engine(llm, prompts(count), 4, count)
            through_http(port, process, prompts(count), 4, count)
        for count in batches:
            own, http = list[Round](), list[Round]()
            for _ in range(opts.rounds + 1):
                texts = prompts(opts.each * count)
                own.append(through_engine(llm, texts, opts.tokens, count))
                http.append(through_http(port, process, texts, opts.tokens, count))
            del own[0], http[0]
            whole = spread([b.rate / a.rate for a, b in zip(own, http)])
            decode = spread([b.decode / a.decode for a, b in zip(own, http)])
            engine, server_ = (Round(*map(median, zip(*each))) for each in (own, http))
            print(
                f"{count:8} | {engine.rate:12.1f} | {server_.rate:10.1f} | {whole} | {decode} | "
                f"{engine.ttft_ms:15.1f} | "
                f"{server_.ttft_ms:5.1f} | {server_.loop_us:14.1f} | {server_.client_us:.1f}"
            )


if __name__ == "__main__":
    main()
