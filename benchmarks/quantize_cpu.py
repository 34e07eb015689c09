"""Speed of quantization on load (`--type`): million weights per second, by format and threads.

    python benchmarks/quantize_cpu.py [--types q8_0,q4_0] [-t 1,2,4] [--search] [--against CHECKOUT]

With ``--search``, the speed of the verb `quantize`, which searches for scales; without the file.

The input is a matrix of random bf16 numbers in memory, 2,048 columns wide. Each measurement is a
separate process on the given number of cores: one conversion as warm-up, then ``--repeats`` more.
Figures are medians over ``--rounds`` processes. ``--against`` runs another checkout of graphllm
interleaved: here, there, there, here.

GB/s counts the bf16 bytes read and the blocks written. As a ceiling, NumPy copies the same amount
of memory on the same number of threads, which also reads and writes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import graphllm.formats  # noqa: F401  # declares the block formats
from graphllm.graph.dtype import BF16, DTYPES

HERE = Path(__file__).parents[1]
COLUMNS = 2048

# Script of the separate process: prints the seconds of each conversion.
_CONVERT = """
import os, sys, time
kind, threads, rows, repeats, search = sys.argv[1], *map(int, sys.argv[2:])
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:threads])
import ml_dtypes, numpy as np
from concurrent.futures import ThreadPoolExecutor
x = np.random.default_rng(0).standard_normal((rows, 2048), np.float32).astype(ml_dtypes.bfloat16)
if kind == "copy":
    y, parts = np.empty_like(x), np.array_split(np.arange(rows), threads)
    pool = ThreadPoolExecutor(threads)
    def copy(part):
        np.copyto(y[part[0] : part[-1] + 1], x[part[0] : part[-1] + 1])
    work = lambda: list(pool.map(copy, parts))
elif search:
    from graphllm.formats.quantization import Blocks
    from graphllm.graph.dtype import BF16, DTYPES
    from graphllm.quantize.encode import Encoder
    encoder, source = Encoder(threads), Blocks(x.view(np.uint8), BF16, 2048)
    work = lambda: list(encoder.encode("x", source, DTYPES[kind], None))
else:
    from graphllm.weights import Arrays
    from graphllm.checkpoints.quantize_on_load import QuantizedWeights
    source = QuantizedWeights(Arrays({"x": x}), kind)
    work = lambda: source.raw("x")
for _ in range(repeats + 1):
    start = time.perf_counter()
    done = work()
    print(time.perf_counter() - start)
    del done
"""


def seconds(
    checkout: Path, kind: str, threads: int, rows: int, repeats: int, search: bool
) -> float:
    """Return the median time of the conversions in one process."""
    # The working directory decides which graphllm is imported.
    words = [sys.executable, "-c", _CONVERT, kind, *map(str, (threads, rows, repeats, int(search)))]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True)
    return statistics.median([float(line) for line in done.stdout.split()][1:])


def shown(kind: str, threads: int, weights: int, found: list[list[float]]) -> str:
    """Format a row: M weights/s and GB/s of each side, and their ratio."""
    written = 2.0 if kind == "copy" else DTYPES[kind].nbytes / DTYPES[kind].block
    words = []
    for each in found:
        rate = weights / statistics.median(each)
        words.append(f"{rate / 1e6:8.0f} M/s {rate * (BF16.nbytes + written) / 1e9:6.1f} GB/s")
    if len(found) == 2:
        ratios = sorted(there / here for here, there in zip(*found))
        middle = statistics.median(ratios)
        words.append(f"{middle:6.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return f"{kind:<7} {threads:>2} threads  " + "   ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default="copy," + ",".join(k for k in DTYPES if k[0] in "qim"))
    parser.add_argument("-t", "--threads", default="1,2,4")
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--against", type=Path)
    a = parser.parse_args()
    sides = [HERE] if a.against is None else [HERE, a.against]
    kinds = [kind for kind in a.types.split(",") if kind == "copy" or DTYPES[kind].block > 1]
    for kind in kinds:
        for threads in map(int, a.threads.split(",")):
            found: list[list[float]] = [[] for _ in sides]
            for number in range(a.rounds):
                for i in range(len(sides))[:: -1 if number % 2 else 1]:
                    found[i].append(seconds(sides[i], kind, threads, a.rows, a.repeats, a.search))
            print(shown(kind, threads, a.rows * COLUMNS, found), flush=True)


if __name__ == "__main__":
    main()
