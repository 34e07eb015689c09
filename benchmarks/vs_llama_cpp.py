"""Compare graphllm with llama.cpp in one interleaved run, on the same file and threads.

    pip install 'graphllm[demo,peers]'
    python benchmarks/vs_llama_cpp.py demo -p 128,512 -n 64 -d 0,4096 -t 2 -r 5 --rss

Each test is a prefill (pp) or a decode (tg) after tokens that both caches already contain. Rates
are medians over the rounds. The ratio is computed per round, since the speed of a shared machine
drifts; its median, minimum and maximum are shown. The first round is a warm-up. Nothing is
tokenized; llama.cpp does not sample, graphllm samples greedily. ``--rss``: peak memory of each
side, in a separate process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp

import graphllm
from graphllm.api import LLM
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.cli.bench import BenchGrid, parse_numbers
from graphllm.profiler.bench import Test, filler_tokens, time_once


class Peer:
    """llama.cpp with one sequence in its KV cache."""

    def __init__(self, path: Path, threads: int, context: int, flash: bool) -> None:
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads,
            flash_attn=flash, verbose=False,
        )  # fmt: skip
        self._kept: list[int] = []  # prefix of the cache

    def _rewind(self, tokens: list[int]) -> None:
        """Leave exactly ``tokens`` in the cache."""
        if self._kept[: len(tokens)] != tokens:
            self.llama.reset()
            if tokens:
                self.llama.eval(tokens)
        self._kept = tokens
        self.llama.n_tokens = len(tokens)  # the next `eval` removes what follows

    def time_once(self, test: Test, tokens: list[int]) -> int:
        """Return the nanoseconds of one run of the test."""
        depth = test.depth if test.prompt else max(test.depth, 1)
        self._rewind(tokens[:depth])
        rest = tokens[depth : depth + test.tokens]
        start = time.perf_counter_ns()
        for piece in [rest] if test.prompt else [[token] for token in rest]:
            self.llama.eval(piece)
        return time.perf_counter_ns() - start


def row(name: str, test: Test, threads: int, llm: LLM, peer: Peer, rounds: int) -> str:
    """Run one test; return a row of the table."""
    tokens = filler_tokens(test.context, llm.decoder.cfg.vocab)
    pairs = [
        (time_once(llm.engine, test, tokens, number), peer.time_once(test, tokens))
        for number in range(rounds + 1)
    ][1:]  # the first pair warms up
    us, them = ([test.tokens * 1e9 / ns for ns in side] for side in zip(*pairs))
    ratios = [u / t for u, t in zip(us, them)]
    return (
        f"| {name} | {test.name} | {threads} | {statistics.median(us):.1f} | "
        f"{statistics.median(them):.1f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) |"
    )


# ------------------------------------------------------------------------------------------ memory


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def hold(side: str, model: str, threads: int, context: int, flash: bool) -> None:
    """Load one side, prefill 128 tokens, decode 16, and print the peak memory."""
    tests = Test(128, 0), Test(0, 16)
    if side == "ours":
        llm = graphllm.load(model, threads=threads, context=context)
        for test in tests:
            time_once(llm.engine, test, filler_tokens(test.context, llm.decoder.cfg.vocab), 0)
    else:
        peer = Peer(checkpoint_path(model), threads, context, flash)
        for test in tests:
            peer.time_once(test, filler_tokens(test.context, peer.llama.n_vocab()))
    print(peak_mb())


def memory_row(a: argparse.Namespace, name: str, threads: int) -> str:
    """Return the peak memory of both sides as a row."""
    words = [sys.executable, __file__, a.model, "-t", str(threads), "-c", str(a.context)]
    words += ["--flash-attn"] * a.flash_attn
    us, them = (
        float(subprocess.check_output([*words, "--hold", side], text=True))
        for side in ("ours", "theirs")
    )
    return f"| {name} | peak MB | {threads} | {us:.0f} | {them:.0f} | {us / them:.2f} |"


# -------------------------------------------------------------------------------------------- main


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-p", default="128", help="Prompt tokens, comma-separated; 0 for none.")
    parser.add_argument("-n", default="64", help="Generated tokens, comma-separated.")
    parser.add_argument("-d", default="0", help="Cached tokens, comma-separated.")
    parser.add_argument("-t", default="2", help="Threads, comma-separated.")
    parser.add_argument("-c", dest="context", type=int, default=4096, help="Minimum context.")
    parser.add_argument("-r", dest="rounds", type=int, default=5)
    parser.add_argument("--rss", action="store_true", help="Also measure peak memory.")
    parser.add_argument("--flash-attn", action="store_true", help="Flash attention in llama.cpp.")
    parser.add_argument("--hold", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    a = arguments()
    if a.hold:
        hold(a.hold, a.model, int(a.t), a.context, a.flash_attn)
        return
    path, tests = checkpoint_path(a.model), BenchGrid(a.p, a.n, a.d).tests()
    context = max([a.context, *(test.context for test in tests)])
    print("| model | test | threads | graphllm t/s | llama.cpp t/s | ratio |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for threads in parse_numbers("-t", a.t):
        if a.rss:
            print(memory_row(a, path.stem, threads), flush=True)
        llm = graphllm.load(path, threads=threads, context=context)
        peer = Peer(path, threads, context, a.flash_attn)
        for test in tests:
            print(row(path.stem, test, threads, llm, peer, a.rounds), flush=True)


if __name__ == "__main__":
    main()
