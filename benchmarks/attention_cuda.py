"""Time attention and sampling of many sequences on a GPU.

    python benchmarks/attention_cuda.py                 # attention, then sampling
    python benchmarks/attention_cuda.py attention -n 64 -c 512 --kv-type q8_0
    python benchmarks/attention_cuda.py sampling

A plan has attention of 16 layers, or one sampling op, and no other ops. Times are GPU times of a
replayed plan, the median of 10 runs. The limit is the time to read the cache, or the logits, once
at the measured read bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import numpy as np
from gpu_shared import Lines, measure_ceilings

from graphllm import ops
from graphllm.graph.dtype import CACHED, dtype
from graphllm.graph.tensor import Tensor, Var, feed, state
from graphllm.runtime.executor import Executor

LAYERS, ROUNDS, BLOCK = 16, 10, 64
HEADS, KV_HEADS, DEPTH = 32, 8, 128  # of Mistral 7B
Feeds = dict[str, np.ndarray]


def run_time(outputs: dict[str, Tensor], feeds: Feeds, env: dict[str, int]) -> float:
    """Return the microseconds of a plan of these outputs; states have random float16 values."""
    executor = Executor(backends=("cuda", "reference"))
    plan = executor.compile(outputs)
    executor.bind(plan)
    rng = np.random.default_rng(0)
    for name, leaf in plan.leaves.items():
        if leaf.op == "state" and leaf.dtype.name == "f16":
            some = rng.standard_normal((BLOCK, *leaf.meta.inner)).astype(np.float16)
            rows = leaf.meta.bound().shape[0]
            executor.set_state(name, np.tile(some, (rows // BLOCK, 1, 1)))
    used = {name: data for name, data in feeds.items() if name in plan.leaves}
    for _ in range(2):
        executor.run(plan, used, env, fetch=())
    ((segment, _),) = executor.segments(plan)
    gpu = executor.devices["cuda"].gpu
    return 1e6 * median(gpu.time_runs(lambda: segment.run(None), ROUNDS))


def attention_time(lengths: Sequence[int], queries: Sequence[int], kind: str, tokens: int) -> float:
    """Return the microseconds of a layer, in a plan of at most ``tokens`` tokens."""
    blocks = [-(-length // BLOCK) for length in lengths]
    table = np.zeros((len(lengths), max(blocks)), np.int32)
    free = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    for s, count in enumerate(blocks):
        table[s, :count], free = free[:count], free[count:]
    count = len(lengths)
    t, s, q = Var("T", 1, tokens), Var("S", 1, count), Var("Q", 2, count + 1)
    x, shape = feed("q", (t, HEADS, DEPTH), "f32"), (sum(blocks) * BLOCK, KV_HEADS, DEPTH)
    rest = (
        feed("q_start", (q,), "i32"),
        feed("kv_len", (s,), "i32"),
        feed("table", (s, table.shape[1]), "i32"),
    )
    outputs = {
        f"y{i}": ops.attention(
            x, *(state(f"{name}{i}", shape, kind) for name in "kv"), *rest, None, None, None,
            scale=DEPTH**-0.5, block=BLOCK,
        )
        for i in range(LAYERS)
    }  # fmt: skip
    total = sum(queries)
    feeds = {
        "q": np.random.default_rng(1).standard_normal((total, HEADS, DEPTH)).astype(np.float32),
        "q_start": np.cumsum([0, *queries]).astype(np.int32),
        "kv_len": np.array(lengths, np.int32),
        "table": table,
    }
    return run_time(outputs, feeds, {"T": total, "S": count, "Q": count + 1}) / LAYERS


def attention(sequences: int, cached: int, kind: str) -> Lines:
    """Yield the time of attention of one layer, and its share of the limit."""
    cases: list[tuple[str, list[int], list[int], int]] = [
        (f"{n} x {cached}", [cached] * n, [1] * n, n)
        for n in ([sequences] if sequences else (1, 4, 16, 64, 128, 256))
    ]
    if not sequences:
        uneven = [100] * 30 + [8000] + [100] * 33
        chunk = [1] * 63 + [449]
        cases += [
            ("8000 and 63 x 100", uneven, [1] * 64, 64),
            ("63 and a chunk of 449", [512] * 64, chunk, 512),
            ("512 of a prompt", [512], [512], 512),
            ("the last 512 of 8192", [8192], [512], 512),
        ]
    read = max(measure_ceilings().memory["read"].values())
    row = 2 * KV_HEADS * dtype(kind).row_nbytes(DEPTH)
    yield f"{'attention, ' + kind:<24} {'us/layer':>9} {'limit us':>9} {'share':>6}"
    for name, lengths, queries, tokens in cases:
        us, limit = attention_time(lengths, queries, kind, tokens), 1e6 * sum(lengths) * row / read
        yield f"{name:<24} {us:9.2f} {limit:9.2f} {limit / us:6.1%}"


# ---------------------------------------------------------------------------------------- sampling


def settings(rows: int, **values: float) -> Feeds:
    """Return feeds of `ops.sample` with the same settings in each row."""
    kinds = {"top_k": np.int32, "count": np.int32, "sample_index": np.int32, "seed": np.int64}
    defaults = {
        "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "count": 3,
        "sample_index": 0,
    }  # fmt: skip
    return {
        name: np.full(rows, value, kinds.get(name, np.float32))
        for name, value in (defaults | values).items()
    }


def sampling_times(rows: int, width: int) -> dict[str, float]:
    """Return the microseconds of sampling ops by name."""
    n, env = Var("N", 1, rows), {"N": rows}
    logits = feed("logits", (n, width), "f32")
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "count", "sample_index")
    kinds = {"seed": "i64", "top_k": "i32", "count": "i32", "sample_index": "i32", "length": "i32"}
    leaf = {name: feed(name, (n,), kinds.get(name, "f32")) for name in (*names, "length")}
    sampled = ops.sample(logits, *(leaf[name] for name in names))
    filtered = ops.filter_logits(
        logits, feed("filters", (n, 6), "f32"), leaf["top_k"], leaf["seed"], leaf["count"],
        leaf["sample_index"],
    )  # fmt: skip
    penalised = ops.penalise(
        logits, feed("history", (n, 1024), "i32"), leaf["length"], feed("breakers", (n, 8), "i32"),
        feed("factors", (n, 5), "f32"), feed("windows", (n, 3), "i32"),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    off = np.array([0, 1, 1, 0, 0, 0.1], np.float32)
    shared = {
        "logits": (3 * rng.standard_normal((rows, width))).astype(np.float32),
        "filters": np.tile(off, (rows, 1)),
        "history": rng.integers(0, width, (rows, 1024)).astype(np.int32),
        "length": np.full(rows, 500, np.int32),
        "breakers": np.full((rows, 8), -1, np.int32),
        "windows": np.tile(np.array([64, 2, 64], np.int32), (rows, 1)),
    }

    def timed(y: Tensor, repeat: float = 1.0, **values: float) -> float:
        factors = np.tile(np.array([repeat, 0, 0, 0, 1.75], np.float32), (rows, 1))
        return run_time({"y": y}, {**shared, **settings(rows, **values), "factors": factors}, env)

    return {
        "greedy": timed(sampled, temperature=0.0),
        "top-k 40": timed(sampled, top_k=40, top_p=0.95),
        "top-p": timed(sampled, top_p=0.95),
        "no filter": timed(sampled),
        "filters off": timed(filtered),
        "penalties off": timed(penalised),
        "penalties": timed(penalised, repeat=1.1),
    }


def sampling() -> Lines:
    """Yield the times of sampling ops by rows and vocabulary."""
    read = max(measure_ceilings().memory["read"].values())
    shapes = [(n, 32_000) for n in (1, 16, 64, 128, 256)] + [(256, 128_256), (128, 262_144)]
    for index, (rows, width) in enumerate(shapes):
        times = sampling_times(rows, width)
        if not index:
            yield f"{'us of rows x logits':<20} {'limit':>7} " + " ".join(f"{n:>13}" for n in times)
        limit = 4e6 * rows * width / read
        name = f"{rows} x {width}"
        yield f"{name:<20} {limit:7.2f} " + " ".join(f"{us:13.1f}" for us in times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("attention", "sampling"))
    parser.add_argument("-n", "--sequences", type=int, default=0, help="Instead of 1 to 256.")
    parser.add_argument("-c", "--cached", type=int, default=512, help="Tokens in each cache.")
    parser.add_argument("--kv-type", default="f16", choices=CACHED[1:])
    asked = parser.parse_args()
    if asked.part != "sampling":
        for line in attention(asked.sequences, asked.cached, asked.kv_type):
            print(line, flush=True)
    if asked.part != "attention":
        for line in sampling():
            print(line, flush=True)


if __name__ == "__main__":
    main()
