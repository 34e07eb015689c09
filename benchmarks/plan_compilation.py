"""Time the compilation of decode plans, in total and by pass.

    python benchmarks/plan_compilation.py demo
    python benchmarks/plan_compilation.py --random llama-8b --type q4_0 --device cuda -b 1,16

The first step with another number of sequences (the next power of two) or another sampling stage
compiles its plan, in which time all requests wait. No weights are read, and --device may be a
device that this machine does not have.

Each round compiles every plan once: each batch size of ``-b`` with each of the outputs in
`OUTPUTS`. The clock counts the CPU time of the process. Passes: verify the order of states; narrow
the Vars; select kernels and insert nodes (lower); fuse; order the steps and plan memory (layout).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

from graphllm.backends import Options
from graphllm.checkpoints.checkpoint import open_checkpoint
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.compiler import fusion
from graphllm.compiler.plan import compile_plan
from graphllm.engine.engine import Engine
from graphllm.engine.runner import LOGPROBS
from graphllm.graph import rewrite
from graphllm.loading.load import build_decoder, graph_limits, sized_limits
from graphllm.profiler.planner import Planner
from graphllm.profiler.roofline import cpu_name

OUTPUTS = {
    "plain": ["ids"],
    "log-probabilities": ["ids", *LOGPROBS],
    "grammar": ["ids.masked"],
    "biases": ["ids.biased"],
    "penalties": ["ids.penalised"],
    "filters": ["ids.filtered"],
}
PASSES = ("verify", "narrow", "lower", "fuse", "layout")


@contextmanager
def pass_borders() -> Iterator[list[float]]:
    """Add the times at which `narrow` and `fuse` begin and end to a list."""
    times: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            times.append(time.process_time())
            try:
                return call(*given)
            finally:
                times.append(time.process_time())

        return wrapped

    with (
        mock.patch.object(rewrite, "narrow", timed(rewrite.narrow)),
        mock.patch.object(fusion, "fuse", timed(fusion.fuse)),
    ):
        yield times


def pass_times(engine: Engine, outputs: Sequence[str], sequences: int) -> list[float]:
    """Compile a decode plan; return the milliseconds of each of `PASSES`."""
    placement = engine.executor.model_placement
    assert placement is not None
    bounds = dict.fromkeys("TSN", (1, sequences)) | {"Q": (2, sequences + 1)}
    with pass_borders() as borders:
        start = time.process_time()
        compile_plan(placement.part(outputs), bounds)
        times = [start, *borders, time.process_time()]
    return [1e3 * (end - begin) for begin, end in pairwise(times)]


def report(engine: Engine, batches: Sequence[int], rounds: int) -> Iterator[str]:
    """Yield a table: a line for each plan, and one for all of them."""
    found: dict[tuple[int, str], list[list[float]]] = {}
    for _ in range(rounds + 1):
        for sequences in batches:
            for name, outputs in OUTPUTS.items():
                times = pass_times(engine, outputs, sequences)
                found.setdefault((sequences, name), []).append(times)
    heads = " ".join(f"{name:>7}" for name in PASSES)
    yield f"{'sequences':>9}  {'sampling':<18} {heads} {'median':>7} {'best':>7}   (ms)"
    every = [times for plan in found.values() for times in plan[1:]]
    for (sequences, name), plan in found.items():
        yield f"{sequences:>9}  {name:<18} {line(plan[1:])}"
    yield f"{'':>9}  {'all':<18} {line(every)}"


def line(plans: Sequence[list[float]]) -> str:
    """Format the medians of passes and totals, and the best total."""
    totals = [sum(times) for times in plans]
    numbers = [*map(median, zip(*plans)), median(totals), min(totals)]
    return " ".join(f"{number:7.2f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="A model file or demo, instead of --random.")
    parser.add_argument("--random", default="gemma3-270m", metavar="SHAPE")
    parser.add_argument("--type", default="q4_k_m", help="Format of random weights.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-b", "--batches", default="1,2,16", help="Numbers of sequences.")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.model:
        file = open_checkpoint(asked.model, data=False)
    else:
        file = RandomCheckpoint(asked.random, asked.type)
    batches = [*map(int, asked.batches.split(","))]
    decoder = build_decoder(file)
    planner = Planner(decoder.weights, asked.device, Options(), None)
    limits = graph_limits(4096, None, asked.device, max(batches))
    engine = Engine(decoder, planner, sized_limits(decoder, planner, limits, "auto"))
    print(f"{file.path}, {asked.device}; {cpu_name()}")
    for text in report(engine, batches, asked.rounds):
        print(text)


if __name__ == "__main__":
    main()
