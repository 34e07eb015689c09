"""What the CUDA backend does on this machine's GPU, as tables: is it right, and how fast.

    python benchmarks/gpu.py                       # all parts
    python benchmarks/gpu.py ceilings ops          # some

The output is printed and kept in benchmarks/results/, named after the GPU and the date. Times are
the GPU's own (CUDA events), the median of 20 runs after two, which are not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import numpy as np

from graphllm import backends, ops
from graphllm.backends import Backend, Options
from graphllm.decoder import Limits
from graphllm.errors import RequestError
from graphllm.executor import Executor
from graphllm.llm import LLM, decoder_for
from graphllm.ops.parts import results
from graphllm.profiler import bench
from graphllm.tensor import Tensor, Var, feed, state, weight
from graphllm.weights import Arrays
from graphllm.weights.random import RandomFile

ROOT = Path(__file__).parents[1]
ROUNDS, CHAIN, WIDTH = 20, 64, 4096  # runs that count; ops of one kind in a plan; their columns


def correctness() -> Iterator[str]:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--tb=line"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    yield from done.stdout.splitlines()[-12:]


def ceilings() -> Iterator[str]:
    """What memory gives: reads, and copies with both directions counted."""
    measure = cuda().measure
    assert measure is not None
    for kind, rates in measure(4 << 30, lambda *_: None).items():
        each = ", ".join(f"{n}: {rate / 1e9:.0f}" for n, rate in rates.items())
        yield f"{kind:<6} {max(rates.values()) / 1e9:7.0f} GB/s   by blocks a processor: {each}"


def upload() -> Iterator[str]:
    """Weights from the page cache to the GPU."""
    device = cuda().open_device(Options())
    raw = np.random.default_rng(0).integers(0, 256, (1024, 2 << 20), np.uint8)
    for _ in range(2):
        start = time.perf_counter()
        buffer = device.prepare(None, raw, weight("w", raw.shape, "i8").meta)
        buffer[-1:]  # waits
        rate = raw.nbytes / (time.perf_counter() - start)
        yield f"{raw.nbytes / 1e9:.1f} GB at {rate / 1e9:.1f} GB/s"


def per_op() -> Iterator[str]:
    """Microseconds of one op among many: one token (a replayed graph), and 512 (launches)."""
    yield f"{'op':<14} {'1 token, us':>12} {'512 tokens, us':>16}"
    for name, make in CHAINS.items():
        times = [chain_time(make, rows) for rows in (1, 512)]
        yield f"{name:<14} {times[0]:12.2f} {times[1]:16.2f}"
    for width in (32_000, 128_256, 262_144):
        for label, k in (("top-k 40", 40), ("no top-k", 0)):
            yield f"sample, {width} tokens, {label}, top-p 0.95: {sample_time(width, k):.1f} us"


def chain_time(make: Callable[[Tensor, int], tuple[Tensor, ...]], rows: int) -> float:
    """Microseconds an op of many that read what one fed value gives, one after the other."""
    x = feed("x", (Var("T", rows, rows), WIDTH), "f32")
    outputs = {f"y{i}.{k}": y for i in range(CHAIN) for k, y in enumerate(make(x, i))}
    names = {f"w{i}": np.ones(WIDTH, np.float32) for i in range(CHAIN)}
    feeds = {"x": np.ones((rows, WIDTH), np.float32), "pos": np.arange(rows, dtype=np.int32)}
    return run_time(outputs, feeds | {"slot": feeds["pos"]}, names) / CHAIN


def _norm(x: Tensor, i: int) -> Tensor:
    return ops.rms_norm(x, weight(f"w{i}", (WIDTH,), "f32"), eps=1e-5)


def _quantised_norm(x: Tensor, i: int) -> tuple[Tensor, ...]:
    return (ops.quantise_act(_norm(x, i), dtype="a8_32"),)


def _sandwich(x: Tensor, i: int) -> tuple[Tensor, ...]:
    total = ops.add(x, _norm(x, i))
    return total, *_quantised_norm(total, (i + 1) % CHAIN)


def _turned(x: Tensor, i: int) -> tuple[Tensor, ...]:
    """32 heads of queries, 8 of keys and of values, to a pool of float16."""
    pos, slot = (feed(name, x.shape[:1], "i32") for name in ("pos", "slot"))
    q, k = x.heads(32), x.slice(1, 0, WIDTH // 4).heads(8)
    pools = [state(f"{n}{i}", (512, 8, WIDTH // 32), "f16") for n in "kv"]
    turn = {"eps": 0.0, "base": 1e4, "dims": 0, "style": "half", "scale": 1.0}
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


def sample_time(width: int, top_k: int) -> float:
    """Microseconds of drawing one id."""
    n = Var("N", 1, 1)
    settings = {
        "temperature": np.float32(0.8), "top_k": np.int32(top_k), "top_p": np.float32(0.95),
        "min_p": np.float32(0), "seed": np.int64(1), "count": np.int32(3),
    }  # fmt: skip
    feeds = {name: np.array([value]) for name, value in settings.items()}
    kinds = {np.float32: "f32", np.int32: "i32", np.int64: "i64"}
    leaves = [feed(name, (n,), kinds[type(value)]) for name, value in settings.items()]
    y = ops.sample(feed("logits", (n, width), "f32"), *leaves)
    feeds["logits"] = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32) * 3
    return run_time({"y": y}, feeds, {})


def host() -> Iterator[str]:
    """What a plan of 300 small steps costs the host, and the GPU."""
    x = feed("x", (Var("T", 1, 1), WIDTH), "f32")
    y = x
    for _ in range(300):
        y = ops.silu(y)
    executor = Executor(backends=("cuda", "reference"))
    plan = executor.compile({"y": y})
    for _ in range(3):
        executor.run(plan, {"x": np.ones((1, WIDTH), np.float32)})
    ((segment, _),) = executor._programs[id(plan)].segments
    gpu = executor.devices["cuda"].gpu
    each = median(gpu.seconds(lambda: segment.run(None), ROUNDS)) / 300
    yield f"GPU, a step: {1e6 * each:.2f} us"
    yield f"host, to launch the graph: {host_time(lambda: segment.run(None)):.1f} us"
    gpu.stream.synchronize()
    whole = host_time(lambda: executor.run(plan, {}, {"T": 1}))
    done = host_time(lambda: (segment.run(None), gpu.stream.synchronize()))
    yield f"Executor.run: {whole:.1f} us; its segment alone, until it is done: {done:.1f} us"


def host_time(work: Callable[[], object], rounds: int = 50) -> float:
    """Microseconds of wall time, the median."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(1e6 * (time.perf_counter() - start))
    return median(found)


def run_time(outputs: dict, feeds: dict, weights: dict) -> float:
    """Microseconds of a plan on the GPU."""
    executor = Executor(Arrays(weights), ("cuda", "reference"))
    plan = executor.compile(outputs)
    used = {name: data for name, data in feeds.items() if name in plan.leaves}
    for _ in range(2):
        executor.run(plan, used, fetch=())
    ((segment, _),) = executor._programs[id(plan)].segments
    gpu = executor.devices["cuda"].gpu
    return 1e6 * median(gpu.seconds(lambda: segment.run(None), ROUNDS))


def models() -> Iterator[str]:
    """Tokens a second of whole models with random weights, sampling included."""
    yield f"{'shape':<12} {'format':<8} {'test':<14} {'tok/s':>9} {'GB/s':>7}"
    for shape, kind, tests in MODELS:
        for test, result in model_results(shape, kind, tests):
            rate = f"{result.gb_s:7.0f}" if result.gb_s else ""
            yield f"{shape:<12} {kind:<8} {test.name:<14} {median(result.rates):9.1f} {rate}"


def model_results(
    shape: str, kind: str, tests: tuple[bench.Test, ...]
) -> Iterator[tuple[bench.Test, bench.Result]]:
    """Each test on one model."""
    file = RandomFile(shape, kind)
    limits = Limits(context=max(test.context for test in tests) + 64)
    llm = LLM(file, decoder_for(file), {"backends": ("cuda", "reference")}, limits)
    for test in tests:
        yield test, bench.run(llm, test, 3, lambda done: None)


_DECODE, _PROMPT = bench.Test(0, 128, 512), bench.Test(512, 0)
MODELS: tuple[tuple[str, str, tuple[bench.Test, ...]], ...] = (
    ("mistral-7b", "f16", (_DECODE, bench.Test(0, 128, 4096), _PROMPT, bench.Test(8192, 0))),
    ("mistral-7b", "q8_0", (_DECODE, _PROMPT)),
    ("mistral-7b", "q4_0", (_DECODE, _PROMPT)),
    ("mistral-7b", "q4_k_m", (_DECODE, _PROMPT)),
    ("llama-1b", "f16", (_DECODE,)),
)


PARTS = {
    "models": models,
    "correctness": correctness,
    "ceilings": ceilings,
    "upload": upload,
    "host": host,
    "ops": per_op,
}


def cuda() -> Backend:
    """The backend. RequestError where it cannot be used."""
    backend = backends.find("cuda")
    ok, reason = backend.available()
    if not ok:
        raise RequestError(f"no GPU to measure: {reason}")
    return backend


def commit() -> str:
    """The commit that this checkout is at, if that can be told."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    chosen = parser.parse_args().parts or list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    what, now = cuda().available()[1], datetime.now(timezone.utc)
    lines = [f"# {what}", f"# {now:%Y-%m-%d %H:%M} UTC, commit {commit()}"]
    print(*lines, sep="\n")
    for part in chosen:
        lines += ["", f"## {part}: {(PARTS[part].__doc__ or '').splitlines()[0]}"]
        print(*lines[-2:], sep="\n")
        for line in PARTS[part]():
            print(line, flush=True)
            lines.append(line)
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    name = what.split(",")[0].lower().replace(" ", "-")
    (folder / f"{name}-{now:%Y-%m-%d-%H%M}.txt").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
