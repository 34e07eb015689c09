"""Compare the CPU's multiply-add peaks with its clock and with the fastest kernels.

    python benchmarks/roofline_cpu.py --rounds 20
    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= python benchmarks/roofline_cpu.py

For one thread: the clock, measured by dependent multiplications; each peak in operations and in
products of two vectors per cycle; the rate of a linear of each weight format as a share of its
peak. No share may be above 100 %. The measurements are interleaved, and the best of all rounds
counts, so that other work on the machine affects all of them alike. Exits with 1 if a share is
above 102 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from graphllm.backends import TimestampLog
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.runtime import probe_kernels
from graphllm.backends.cpu.runtime.argument_block import argument_reader
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.backends.cpu.runtime.jit import i64s, kernel
from graphllm.backends.cpu.runtime.roofline_probes import probe_program
from graphllm.graph.dtype import dtype
from graphllm.profiler import kernel_probes

ITERATIONS, CYCLES = 50_000, 16  # of the clock loop: iterations, and cycles of each
MAX_SHARE = 1.02  # of a peak, with noise


class SquaresArgs(NamedTuple):
    """Argument block of `squares`."""

    iterations: int
    sink: int = 0


read_squares = argument_reader(SquaresArgs)


@kernel
def squares(p, thread, threads):
    """Square repeatedly, each time depending on the result before.

    A step is a multiplication (3 cycles on x86 since 2008) and an or (1 cycle).
    """
    a = read_squares(p)
    x = a.iterations
    for _ in range(a.iterations):
        x = x * x | 1
        x = x * x | 3
        x = x * x | 5
        x = x * x | 7
    i64s(a.sink)[thread] = x


def ran(run: Callable[[TimestampLog | None], None]) -> float:
    """Return the seconds of the fastest of 20 runs."""
    log = TimestampLog()
    for _ in range(20):
        run(log)
    return min(int(ends[-1] - ends[0]) for ends, _ in log.runs) / 1e9


def linear(name: str, tokens: int) -> float:
    """Return the operations/s of a linear of ``tokens`` tokens."""
    step = kernel_probes.time_linear("cpu", 1, dtype(name), kernel_probes.WIDTH, tokens)
    assert step is not None, name
    return step.flops / min(step.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024, help="Rows and columns of the linears.")
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    kernel_probes.WIDTH, kernel_probes.MIN_SECONDS = asked.width, 0.0
    area = allocate(probe_kernels.FACTOR_VECTORS * 64)
    area.view(np.float32)[:] = 1.0
    chains = probe_kernels.multiply_add_loops()
    tries: dict[str, Callable[[], float]] = {}
    if isa().x86:
        run = probe_program(squares, 1, area, SquaresArgs(ITERATIONS))
        tries["clock"] = lambda: CYCLES * ITERATIONS / ran(run)
    for kind in chains:
        code, work = probe_kernels.multiply_add(kind)
        iterations = chains[kind].iterations
        block = probe_kernels.MultiplyArgs(area.ctypes.data, iterations)
        each = probe_program(code, 1, area, block)
        tries[f"peak {kind}"] = lambda each=each, work=work * iterations: work / ran(each)
    for name in FORMATS:
        tries[name] = partial(linear, name, asked.tokens)
    best = dict.fromkeys(tries, 0.0)
    for _ in range(asked.rounds):
        for name, measure in tries.items():
            best[name] = max(best[name], measure())
    clock = best.get("clock", 0.0)
    print(f"{isa()}; clock {clock / 1e9:.2f} GHz")
    for kind, chain in chains.items():
        cycle = best[f"peak {kind}"] / clock if clock else 0.0
        vectors = cycle / chain.operations * 64 / isa().width
        print(f"{kind:<8} {best[f'peak {kind}'] / 1e9:8.1f} GFLOP/s {cycle:7.1f} per cycle, "
              f"{vectors:.2f} products of {isa().width} bytes per cycle: {chain.how}")  # fmt: skip
    worst = 0.0
    for name, form in FORMATS.items():
        peak = "peak f32" if form.block == 1 else "peak int8"
        share = best[name] / best[peak]
        worst = max(worst, share)
        print(f"{name:<8} {best[name] / 1e9:8.1f} GFLOP/s {share:7.1%} of {peak}")
    return int(worst > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
