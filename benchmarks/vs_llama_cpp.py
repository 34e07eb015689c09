"""Decode and prefill rates beside llama.cpp's, in turns within one run, on the same file.

    pip install 'graphllm[demo,peers]'
    python benchmarks/vs_llama_cpp.py demo -p 128 -n 64 -t 2 -r 5

Rates are medians over the rounds; the ratio is taken round by round, since the speed of a shared
machine drifts. Tokenisation and sampling are left out on llama.cpp's side and cost ours little.
"""

from __future__ import annotations

import argparse
import statistics
import time

import llama_cpp

import graphllm
from graphllm.generation.request import Sampling
from graphllm.llm import LLM, model_path


def ours(llm: LLM, ids: list[int], count: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second."""
    llm.engine.forget()
    greedy = Sampling(count + 1, temperature=0.0, seed=0)
    start = time.perf_counter()
    tokens = llm.engine.generate(ids, greedy, [])
    next(tokens)
    first = time.perf_counter()
    for _ in range(count):
        next(tokens)
    return len(ids) / (first - start), count / (time.perf_counter() - first)


def theirs(llm: llama_cpp.Llama, ids: list[int], count: int) -> tuple[float, float]:
    llm.reset()
    start = time.perf_counter()
    llm.eval(ids)
    first = time.perf_counter()
    for i in range(count):
        llm.eval([ids[i % len(ids)]])
    return len(ids) / (first - start), count / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-p", type=int, default=128, help="prompt tokens")
    parser.add_argument("-n", type=int, default=64, help="generated tokens")
    parser.add_argument("-t", type=int, default=2, help="threads")
    parser.add_argument("-c", type=int, default=4096, help="context")
    parser.add_argument("-r", type=int, default=5, help="rounds")
    a = parser.parse_args()
    mine = graphllm.load(a.model, threads=a.t, context=a.c)
    peer = llama_cpp.Llama(
        str(model_path(a.model)), n_ctx=a.c, n_threads=a.t, n_threads_batch=a.t, verbose=False
    )
    ids = [2] + [(i * 7919) % (mine.decoder.cfg.vocab - 1000) + 500 for i in range(a.p - 1)]
    rounds = []
    for i in range(a.r + 1):
        pair = ours(mine, ids, a.n), theirs(peer, ids, a.n)
        if i:  # the first round warms caches
            rounds.append(pair)
    for phase, name in enumerate((f"prefill {a.p}", f"decode {a.n}")):
        us, them = ([side[phase] for side in sides] for sides in zip(*rounds))
        ratios = [u / t for u, t in zip(us, them)]
        print(
            f"{name:<12} graphllm {statistics.median(us):8.1f} tok/s   llama.cpp "
            f"{statistics.median(them):8.1f} tok/s   ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
