"""Correctness and speed of the CUDA backend on this machine's GPU, as tables.

    python benchmarks/gpu.py                                    # all parts
    python benchmarks/gpu.py ceilings ops                       # some
    python benchmarks/gpu.py models profile --only mistral-7b:q4_0

The output is printed and written to benchmarks/results/, in a file named after the GPU and the
date. Times are GPU times (CUDA events) unless marked as wall times: the median of 20 runs after two
warm-up runs. If a part fails, its line begins with "error:", the other parts run, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import gpu_goals
import gpu_models
import numpy as np
from gpu_shared import Lines, Model, ModelPart, Part, cuda, measure_ceilings, share

from graphllm import ops
from graphllm.backends import Options
from graphllm.checkpoints.model_shapes import SHAPES, TYPES
from graphllm.debug import debug
from graphllm.errors import GraphllmError
from graphllm.graph.fused_op import results
from graphllm.graph.tensor import Tensor, Var, feed, state, weight
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

ROOT = Path(__file__).parents[1]
ROUNDS, CHAIN, WIDTH = 20, 64, 4096  # timed runs; ops of one kind per plan; columns


def correctness() -> Lines:
    """Tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--tb=line"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    yield from done.stdout.splitlines()[-12:]
    if done.returncode:
        raise GraphllmError(f"the tests ended with exit code {done.returncode}")


def ceilings() -> Lines:
    """Ceilings of memory, cache and arithmetic; copies count both directions."""
    measured = measure_ceilings()
    for kind, found in {**measured.memory, **measured.caches, **measured.peaks}.items():
        each = ", ".join(f"{n}: {rate / 1e9:.0f}" for n, rate in found.items())
        best = max(found.values())
        shown = f"{best / 1e9:7.0f} GFLOP/s     " if kind in measured.peaks else share(best)
        yield f"{kind:<10} {shown}   by blocks per multiprocessor: {each}"


def upload() -> Lines:
    """Upload of weights from the page cache to the GPU."""
    device = cuda().open_device(Options())
    raw = np.random.default_rng(0).integers(0, 256, (1024, 2 << 20), np.uint8)
    for _ in range(2):
        start = time.perf_counter()
        buffer = device.prepare(None, raw, weight("w", raw.shape, "i8").meta)
        buffer[-1:]  # waits for the copy
        rate = raw.nbytes / (time.perf_counter() - start)
        yield f"{raw.nbytes / 1e9:.1f} GB at {rate / 1e9:.1f} GB/s"


def per_op() -> Lines:
    """Microseconds per op: at 1 token (a replayed CUDA graph) and at 512 (launches)."""
    yield f"{'op':<14} {'1 token, us':>12} {'512 tokens, us':>16}"
    for name, make in CHAINS.items():
        (few, _), (many, nbytes) = (chain_time(make, rows) for rows in (1, 512))
        yield f"{name:<14} {few:12.2f} {many:16.2f} {share(1e6 * nbytes / many)}"
    for width in (32_000, 128_256, 262_144):
        for label, k in (("top-k 40", 40), ("no top-k", 0)):
            us, nbytes = sample_time(width, k)
            rate = share(1e6 * nbytes / us)
            yield f"sample, {width} tokens, {label}, top-p 0.95: {us:.1f} us {rate}"


def chain_time(make: Callable[[Tensor, int], tuple[Tensor, ...]], rows: int) -> tuple[float, float]:
    """Return microseconds and declared bytes per op, for a plan of many ops on one fed value."""
    x = feed("x", (Var("T", rows, rows), WIDTH), "f32")
    outputs = {f"y{i}.{k}": y for i in range(CHAIN) for k, y in enumerate(make(x, i))}
    names = {f"w{i}": np.ones(WIDTH, np.float32) for i in range(CHAIN)}
    feeds = {"x": np.ones((rows, WIDTH), np.float32), "pos": np.arange(rows, dtype=np.int32)}
    us, nbytes = run_time(outputs, feeds | {"slot": feeds["pos"]}, names, {"T": rows})
    return us / CHAIN, nbytes / CHAIN


def _norm(x: Tensor, i: int) -> Tensor:
    return ops.rms_norm(x, weight(f"w{i}", (WIDTH,), "f32"), eps=1e-5)


def _quantised_norm(x: Tensor, i: int) -> tuple[Tensor, ...]:
    return (ops.quantise_act(_norm(x, i), dtype="a8_32"),)


def _sandwich(x: Tensor, i: int) -> tuple[Tensor, ...]:
    total = ops.add(x, _norm(x, i))
    return total, *_quantised_norm(total, (i + 1) % CHAIN)


def _turned(x: Tensor, i: int) -> tuple[Tensor, ...]:
    """Rotate 32 query heads and 8 key heads; write keys and values to a float16 pool."""
    pos, slot = (feed(name, x.shape[:1], "i32") for name in ("pos", "slot"))
    q, k = x.heads(32), x.slice(1, 0, WIDTH // 4).heads(8)
    pools = [state(f"{n}{i}", (512, 8, WIDTH // 32), "f16") for n in "kv"]
    turn = {
        "eps": 0.0,
        "base": 1e4,
        "dims": 0,
        "style": "half",
        "scale": 1.0,
        "attention_factor": 1.0,
    }
    return results(ops.get("rope_write").node(q, k, k, pos, *pools, slot, **turn))


def _glu(x: Tensor, i: int) -> tuple[Tensor, ...]:
    gate = ops.add(x, weight(f"w{i}", (WIDTH,), "f32"))
    return (ops.quantise_act(ops.mul(ops.silu(gate), x), dtype="a8_32"),)


CHAINS: dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
    "add": lambda x, i: (ops.add(x, weight(f"w{i}", (WIDTH,), "f32")),),
    "add + glu": _glu,
    "rms_norm": lambda x, i: (_norm(x, i),),
    "norm_quantise": _quantised_norm,
    "norm_add_norm": _sandwich,
    "rope_write": _turned,
}


def sample_time(width: int, top_k: int) -> tuple[float, float]:
    """Return the microseconds of sampling one id, and its declared bytes."""
    n = Var("N", 1, 1)
    settings = {
        "temperature": np.float32(0.8), "top_k": np.int32(top_k), "top_p": np.float32(0.95),
        "min_p": np.float32(0), "seed": np.int64(1), "count": np.int32(3),
        "sample_index": np.int32(0),
    }  # fmt: skip
    feeds = {name: np.array([value]) for name, value in settings.items()}
    kinds = {np.float32: "f32", np.int32: "i32", np.int64: "i64"}
    leaves = [feed(name, (n,), kinds[type(value)]) for name, value in settings.items()]
    y = ops.sample(feed("logits", (n, width), "f32"), *leaves)
    feeds["logits"] = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32) * 3
    return run_time({"y": y}, feeds, {}, {"N": 1})


def host() -> Lines:
    """Overhead of a plan of 300 small steps on host and GPU."""
    x = feed("x", (Var("T", 1, 1), WIDTH), "f32")
    y = x
    for _ in range(300):
        y = ops.silu(y)
    executor = Executor(backends=("cuda", "reference"))
    plan = executor.compile({"y": y})
    feeds = {"x": np.ones((1, WIDTH), np.float32)}
    for _ in range(3):
        executor.run(plan, feeds)
    ((segment, _),) = executor.segments(plan)
    gpu = executor.devices["cuda"].gpu
    each = median(gpu.time_runs(lambda: segment.run(None), ROUNDS)) / 300
    yield f"GPU, per step: {1e6 * each:.2f} us"
    yield f"host, launch of the CUDA graph: {host_time(lambda: segment.run(None)):.1f} us"
    gpu.stream.synchronize()
    whole = host_time(lambda: executor.run(plan, feeds))
    done = host_time(lambda: (segment.run(None), gpu.stream.synchronize()))
    yield f"Executor.run: {whole:.1f} us; its segment alone, with synchronization: {done:.1f} us"


def host_time(work: Callable[[], object], rounds: int = 50) -> float:
    """Return the median wall time in microseconds."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(1e6 * (time.perf_counter() - start))
    return median(found)


def run_time(outputs: dict, feeds: dict, weights: dict, env: dict) -> tuple[float, float]:
    """Return the microseconds of a plan on the GPU, and the declared bytes of its ops."""
    executor = Executor(Arrays(weights), ("cuda", "reference"))
    plan = executor.compile(outputs)
    used = {name: data for name, data in feeds.items() if name in plan.leaves}
    for _ in range(2):
        executor.run(plan, used, fetch=())
    ((segment, _),) = executor.segments(plan)
    gpu = executor.devices["cuda"].gpu
    nbytes = sum(ops.get(step.node.op).node_cost(step.node, env).bytes for step in plan.steps)
    return 1e6 * median(gpu.time_runs(lambda: segment.run(None), ROUNDS)), nbytes


PARTS: dict[str, Part] = {
    "correctness": correctness,
    "ceilings": ceilings,
    "upload": upload,
    "host": host,
    "ops": per_op,
}
MODEL_PARTS: dict[str, ModelPart] = {
    "models": gpu_models.models,
    "goals": gpu_goals.goals,
    "kv": gpu_models.kv,
    "idle": gpu_models.idle,
    "batch": gpu_models.batch,
    "profile": gpu_models.profile,
    "load": gpu_models.load,
}
NAMES = (*MODEL_PARTS, *PARTS)


def commit() -> str:
    """Return the commit of this checkout, or "unknown"."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def model_named(text: str) -> Model:
    """Parse SHAPE:FORMAT; ArgumentTypeError lists the known ones."""
    shape, _, kind = text.partition(":")
    if shape not in SHAPES:
        raise argparse.ArgumentTypeError(f"no shape {shape!r}; known: {', '.join(SHAPES)}")
    if kind not in TYPES:
        raise argparse.ArgumentTypeError(f"no format {kind!r}; known: {', '.join(TYPES)}")
    return shape, kind


class Report:
    """Prints lines and appends each to a file at once, so that a crash loses nothing."""

    def __init__(self, what: str) -> None:
        now = datetime.now(timezone.utc)
        folder = ROOT / "benchmarks" / "results"
        folder.mkdir(exist_ok=True)
        name = what.split(",")[0].lower().replace(" ", "-")
        self.path = folder / f"{name}-{now:%Y-%m-%d-%H%M%S}.txt"
        self.path.write_text("", "utf-8")
        self.line(f"# {what}")
        self.line(f"# {now:%Y-%m-%d %H:%M} UTC, commit {commit()}")

    def line(self, text: str) -> None:
        print(text, flush=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def part(self, name: str, only: list[Model]) -> bool:
        """Run one part; return whether it succeeded. An exception becomes one line."""
        run = MODEL_PARTS.get(name) or PARTS[name]
        self.line(f"\n## {name}: {(run.__doc__ or '').splitlines()[0]}")
        try:
            for line in MODEL_PARTS[name](only) if name in MODEL_PARTS else PARTS[name]():
                self.line(line)
        except Exception as error:  # the other parts still run
            self.line(f"error: {name}: {type(error).__name__}: {error}".replace("\n", " "))
            debug(1, traceback.format_exc())
            return False
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"Parts to run: {', '.join(NAMES)}."
    )
    parser.add_argument(
        "--only", action="append", default=[], type=model_named, metavar="SHAPE:FORMAT",
        help="Model to run instead of the defaults of each part; may be repeated.",
    )  # fmt: skip
    asked = parser.parse_args()
    unknown = sorted(set(asked.parts) - set(NAMES))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; known: {', '.join(NAMES)}")
    try:
        report = Report(cuda().available()[1])
    except GraphllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    done = [report.part(name, asked.only) for name in asked.parts or NAMES]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
