"""Time of the host in a step of beam search, apart from the time of the device.

    pip install torch transformers
    python benchmarks/beam_steps.py -d cpu -t 1                 # a model whose layers cost nothing
    python benchmarks/beam_steps.py -d cuda --base -n 64        # T5-base's shape

Sources have 1 to 127 random tokens, all answers the same number of tokens. Microseconds are means
of the steps of a round, of the round with the least total:

``plans``: runs of plans that encode, prefill and copy blocks.
``launch``, ``wait``: starting a step of the decode loop, and waiting for its results. On the CPU
the device's time is in ``launch``, on a GPU in ``wait``.
``host``: the rest of the step: scheduling, feeds, the choice of beams, bookkeeping.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

import graphllm
from graphllm.engine.batcher import Batcher
from graphllm.runtime.decode_loop import DecodeLoop
from graphllm.runtime.executor import Executor

EOS, FIRST = 1, 10  # the id after an answer; the first that is no control token
SECONDS: Counter[str] = Counter()


def write_model(folder: Path, base: bool) -> int:
    """Write a directory of a T5 with random weights; return the size of its vocabulary."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    tiny = {
        "vocab_size": 500,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 2,
    }
    shape = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12} if base else tiny
    config = T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS)
    T5ForConditionalGeneration(config).half().save_pretrained(folder)
    return config.vocab_size


def time_calls(owner: type, method: str, name: str) -> None:
    """Add the seconds of all calls of a method to ``SECONDS[name]``."""
    call: Callable[..., Any] = getattr(owner, method)

    @wraps(call)
    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            SECONDS[name] += time.perf_counter() - start

    setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-d", "--device", default="cpu")
    parser.add_argument("--base", action="store_true", help="T5-base's shape.")
    parser.add_argument("-n", "--sources", default="1,16,64", help="Numbers of sources.")
    parser.add_argument("-b", "--beams", type=int, default=4)
    parser.add_argument("-g", "--new", type=int, default=64, help="Tokens of an answer.")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-r", "--rounds", type=int, default=4)
    opts = parser.parse_args()
    time_calls(Batcher, "step", "step")
    time_calls(Executor, "run", "plans")
    time_calls(DecodeLoop, "launch", "launch")
    for method in ("take", "take_others"):
        time_calls(DecodeLoop, method, "wait")
    folder = Path(tempfile.mkdtemp())
    vocab, rng = write_model(folder, opts.base), np.random.default_rng(0)
    for count in map(int, opts.sources.split(",")):
        lengths = rng.integers(1, 128, count)
        sources = [[*rng.integers(FIRST, vocab, n - 1).tolist(), EOS] for n in lengths]
        rows = count * opts.beams
        llm = graphllm.load(
            folder, device=opts.device, threads=opts.threads, context=512, max_sequences=rows
        )
        rounds = []
        for _ in range(opts.rounds + 1):  # the first one warms up
            SECONDS.clear()
            before = llm.engine.batcher.steps
            llm.generate(sources, beams=opts.beams, max_tokens=opts.new, ignore_eos=True)
            steps = llm.engine.batcher.steps - before
            rounds.append({name: 1e6 * s / steps for name, s in SECONDS.items()})
        best = min(rounds[1:], key=lambda each: each["step"])
        best["host"] = best["step"] - best["plans"] - best["launch"] - best["wait"]
        print(f"{rows} rows:", *(f"{k} {v:.0f}" for k, v in best.items()), "us", flush=True)


if __name__ == "__main__":
    main()
