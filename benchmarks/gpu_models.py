"""Parts of gpu.py that run whole models with random weights, including sampling."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gpu_shared as shared
import numpy as np
from gpu_shared import Lines, Model, StepEvents

import graphllm
from graphllm.api import LLM
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.engine import Engine
from graphllm.engine.request import Sampling
from graphllm.engine.sampler import sampling_outputs
from graphllm.errors import GraphllmError
from graphllm.graph.dtype import CACHED
from graphllm.loading.load import build_decoder
from graphllm.model.batch import Batch as StepBatch
from graphllm.model.batch import Limits
from graphllm.profiler import bench
from graphllm.runtime.decode_loop import DecodeLoop
from graphllm.runtime.executor import Executor

DECODE, PROMPT = bench.Test(0, 128, 512), bench.Test(512, 0)
LONG = (bench.Test(0, 128, 4096), bench.Test(8192, 0))
TESTS: dict[Model, tuple[bench.Test, ...]] = {
    ("mistral-7b", "f16"): (DECODE, PROMPT, *LONG),
    ("mistral-7b", "q8_0"): (DECODE, PROMPT),
    ("mistral-7b", "q4_0"): (DECODE, PROMPT),
    ("mistral-7b", "q4_k_m"): (DECODE, PROMPT),
    ("llama-1b", "f16"): (DECODE,),
    ("mixtral-8x7b", "q4_k_m"): (DECODE, PROMPT),
    ("qwen3-30b-a3b", "q4_k_m"): (DECODE, PROMPT),
    ("gpt-oss-20b", "mxfp4"): (DECODE, PROMPT),
}
ROUNDS = 3  # of each test, after one warm-up
SEQUENCES, DEPTH, STEPS = (1, 4, 16, 32, 64, 128), 512, 64  # of the part `batch`
GREEDY = Sampling(temperature=0.0, seed=0)


# ------------------------------------------------------------------------------------------ models


def models(only: list[Model]) -> Lines:
    """Tokens per second, with GB/s of weights and cache and share of bandwidth, or TFLOP/s."""
    yield f"{'shape':<12} {'format':<8} {'test':<14} {'tok/s':>9}"
    for model in shared.select_models(only, tuple(TESTS)):
        tests = TESTS.get(model, (DECODE, PROMPT))
        llm = shared.load_random(model, max(test.context for test in tests) + 64)
        for test in tests:
            result = bench.run(llm, test, ROUNDS, lambda done: None)
            rate = median(result.rates)
            if test.gen:
                more = shared.share(result.nbytes * rate)
            else:
                more = f"{prompt_flops(llm.engine, test) * rate / test.prompt / 1e12:7.1f} TFLOP/s"
            yield f"{model[0]:<12} {model[1]:<8} {test.name:<14} {rate:9.1f} {more}"
        del llm


def prompt_flops(engine: Engine, test: bench.Test) -> float:
    """Return the operations of the prefill, by declared costs."""
    size = engine.limits.tokens
    plan, _ = engine.generation_plans()
    ends = range(test.depth, test.depth + test.prompt, size)
    last = test.depth + test.prompt
    return sum(bench.step_flops(plan, at, min(size, last - at)) for at in ends)


# ---------------------------------------------------------------------------------- types of cache


def kv(only: list[Model]) -> Lines:
    """Decode by type of the KV cache, with 512 and 4,096 tokens in it."""
    tests = (DECODE, LONG[0])
    yield f"{'shape':<12} {'format':<8} {'cache':<6} " + " ".join(f"{t.name:>14}" for t in tests)
    for model in shared.select_models(only, (("mistral-7b", "q4_0"),)):
        for kind in CACHED[1:]:  # all but float32
            llm = shared.load_random(model, LONG[0].context + 64, kind)
            rates = [median(bench.run(llm, t, ROUNDS, lambda done: None).rates) for t in tests]
            each = " ".join(f"{rate:8.1f} tok/s" for rate in rates)
            yield f"{model[0]:<12} {model[1]:<8} {kind:<6} {each}"
            del llm


# -------------------------------------------------------------------------------------------- idle


def idle(only: list[Model]) -> Lines:
    """GPU idle time between decode steps, and busy time of the host."""
    default = (("mistral-7b", "f16"), ("mistral-7b", "q4_0"), ("llama-1b", "f16"))
    yield (
        f"{'shape':<12} {'format':<8} {'wall us':>8} {'GPU us':>8} {'idle':>6} {'between us':>11} "
        f"{'host us':>8}   while busy"
    )
    for model in shared.select_models(only, default):
        llm = shared.load_random(model, DECODE.context + 64)
        plain = bench.run(llm, DECODE, ROUNDS, lambda done: None)
        wall, nbytes = 1e6 / median(plain.rates), plain.nbytes
        steps, between = step_times(llm)
        own, gap = 1e6 * median(steps), 1e6 * median(between)
        yield (
            f"{model[0]:<12} {model[1]:<8} {wall:8.1f} {own:8.1f} {1 - own / wall:6.1%} "
            f"{gap:11.1f} {host_busy(llm):8.1f} {shared.share(1e6 * nbytes / own)}"
        )
        del llm


def decode(llm: LLM, wrap: Any) -> float:
    """Return the microseconds per token of `DECODE`, whose `DecodeLoop` is passed to ``wrap``."""
    engine = llm.engine
    engine.clear_cache()  # and forget the loops of earlier runs
    make_loop = engine.executor.decode_loop
    tokens = bench.filler_tokens(DECODE.depth, llm.decoder.cfg.vocab)

    def wrapped(*call: Any, **more: Any) -> DecodeLoop:
        steps = make_loop(*call, **more)
        wrap(steps)
        return steps

    engine.executor.decode_loop = wrapped
    try:
        ids = engine.generate(tokens, GREEDY, ())
        next(ids)
        start = time.perf_counter()
        for _ in range(DECODE.gen):
            next(ids)
        return 1e6 * (time.perf_counter() - start) / DECODE.gen
    finally:
        engine.executor.decode_loop = make_loop


def step_times(llm: LLM) -> tuple[list[float], list[float]]:
    """Return the GPU seconds of each step, and of the gaps between steps."""
    device, made = llm.executor.devices["cuda"], []
    decode(llm, lambda steps: made.append(StepEvents(steps, device)))
    return made[0].seconds()


def host_busy(llm: LLM) -> float:
    """Return the microseconds per token in which the host does not wait for the GPU."""
    waited = []

    def timed(steps: DecodeLoop) -> None:
        take = steps.take

        def waiting() -> np.ndarray:
            start = time.perf_counter()
            found = take()
            waited.append(time.perf_counter() - start)
            return found

        steps.take = waiting

    wall = decode(llm, timed)
    return wall - 1e6 * sum(waited[-DECODE.gen :]) / DECODE.gen


# ------------------------------------------------------------------------------------------- batch


def batch(only: list[Model]) -> Lines:
    """Decode steps of 1 to 128 sequences with 512 cached tokens each, through the Executor."""
    yield (
        f"{'shape':<12} {'format':<8} {'sequences':>9} {'tok/s, GPU':>11} {'tok/s, wall':>12} "
        f"{'step us':>8}"
    )
    for model in shared.select_models(only, (("mistral-7b", "f16"),)):
        many = Batch(model, max(SEQUENCES), DEPTH + STEPS + 8)
        for s in range(max(SEQUENCES)):
            many.prefill(s, DEPTH)
        for count in SEQUENCES:
            many.use(count)
            many.decode(DEPTH, STEPS)
            many.check()
            wall = median(many.decode(DEPTH, STEPS) for _ in range(ROUNDS))
            own = median(many.step_times(DEPTH, STEPS).seconds()[0])
            nbytes = bench.step_bytes(many.plan, DEPTH + STEPS // 2, count)
            yield (
                f"{model[0]:<12} {model[1]:<8} {count:>9} {count / own:11.1f} {count / wall:12.1f} "
                f"{1e6 * own:8.1f} {shared.share(nbytes / own)}"
            )
        del many


class Batch:
    """Batched decode of several sequences, fed as an engine of many requests would.

    Raises GraphllmError for a model with sliding-window layers.
    """

    def __init__(self, model: Model, sequences: int, context: int) -> None:
        file = RandomCheckpoint(*model)
        decoder = build_decoder(file)
        self.limits = Limits(tokens=512, sequences=sequences, context=context)
        self.vocab, self.names = decoder.cfg.vocab, [c.name for c in decoder.caches]
        if any(c.window for c in decoder.caches):
            raise GraphllmError(f"batch: {model[0]} has sliding-window layers")
        batch = StepBatch(decoder.caches, self.limits)
        self.outputs = decoder.build(batch)
        self.outputs |= sampling_outputs(self.outputs["logits"], batch)
        self.executor = Executor(decoder.weights, shared.ORDER)
        self.use(sequences)
        # Blocks of each sequence, one after another.
        blocks = np.arange(sequences * self.limits.blocks, dtype=np.int32)
        self.tables = blocks.reshape(sequences, -1)
        self.sampled: list[np.ndarray] = []

    def use(self, sequences: int) -> None:
        """Decode the first ``sequences`` sequences from now on, with a plan for that number."""
        most = self.sequences = sequences
        bounds = {"T": (1, most), "S": (1, most), "Q": (2, most + 1), "N": (1, most)}
        self.plan = self.executor.compile({"ids": self.outputs["ids"]}, bounds)

    def tokens(self, sequence: int, count: int) -> list[int]:
        """Return token ids of a sequence; those of even numbers have the same ids."""
        own = sequence if sequence % 2 else 0
        return bench.filler_tokens(count + 31 * own, self.vocab)[31 * own :]

    def slots(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Return the pool rows of tokens ``start`` to ``stop - 1`` of a sequence."""
        return np.arange(start, stop) + self.tables[sequence, 0] * self.limits.block

    def prefill(self, sequence: int, count: int) -> None:
        """Prefill ``count`` tokens of a sequence."""
        pools = {n: node for n, node in self.outputs.items() if n.startswith("kv.")}
        most = {"T": (1, self.limits.tokens), "S": (1, 1), "Q": (2, 2), "N": (1, 1)}
        plan, tokens = self.executor.compile(pools, most), self.tokens(sequence, count)
        table = self.tables[sequence]
        for at in range(0, count, self.limits.tokens):
            chunk = tokens[at : at + self.limits.tokens]
            stop = at + len(chunk)
            feeds = {
                "ids": np.array(chunk), "pos": np.arange(at, stop),
                "q_start": np.array([0, len(chunk)]), "kv_len": np.array([stop]),
            }  # fmt: skip
            for name in self.names:
                feeds[f"slot.{name}"] = self.slots(sequence, at, stop)
                feeds[f"table.{name}"] = table[None]
            whole = {name: data.astype(np.int32) for name, data in feeds.items()}
            self.executor.run(plan, whole, fetch=())

    def feeds(self, depth: int) -> dict[str, np.ndarray]:
        """Return the feeds of the first step after ``depth`` tokens of each sequence."""
        s = self.sequences
        ints = {
            "ids": [self.tokens(i, depth + 1)[-1] for i in range(s)], "pos": [depth] * s,
            "q_start": range(s + 1), "kv_len": [depth + 1] * s, "rows": range(s),
            "top_k": [40] * s, "count": [0] * s, "done": [0] * s, "sample_index": [0] * s,
            "stop": [-1] * self.limits.stops, "history": [[-1] * self.limits.history] * s,
        }  # fmt: skip
        for name in self.names:
            ints[f"slot.{name}"] = [int(self.slots(i, depth, depth + 1)[0]) for i in range(s)]
            ints[f"table.{name}"] = self.tables[:s]
        floats = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
        return {
            **{name: np.array(values, np.int32) for name, values in ints.items()},
            **{name: np.full(s, value, np.float32) for name, value in floats.items()},
            "seed": np.full(s, 5, np.int64),
        }

    def decode(self, depth: int, count: int, wrap: Any = lambda steps: None) -> float:
        """Decode ``count`` tokens of each sequence; return the wall time per step in seconds."""
        s = self.sequences
        env = {"T": s, "S": s, "Q": s + 1, "N": s}
        steps = self.executor.decode_loop(self.plan, self.feeds(depth), env, "ids")
        wrap(steps)
        self.sampled, begun = [], 0
        start = time.perf_counter()
        while len(self.sampled) < count:
            while steps.waiting <= steps.lookahead and begun < count:
                steps.launch()
                begun += 1
            self.sampled.append(steps.take())
        return (time.perf_counter() - start) / count

    def step_times(self, depth: int, count: int) -> StepEvents:
        """Decode with CUDA events around each step."""
        made: list[StepEvents] = []
        device = self.executor.devices["cuda"]
        self.decode(depth, count, lambda steps: made.append(StepEvents(steps, device)))
        return made[0]

    def check(self) -> None:
        """Raise GraphllmError unless all ids are valid and equal sequences sampled the same ids."""
        ids = np.array(self.sampled)
        if (
            ids.shape != (len(self.sampled), self.sequences)
            or not ((ids >= 0) & (ids < self.vocab)).all()
        ):
            raise GraphllmError(f"batch: ids {ids.shape} from {ids.min()} to {ids.max()}")
        if (ids[:, ::2] != ids[:, :1]).any():
            raise GraphllmError("batch: equal sequences sampled different tokens")


# -------------------------------------------------------------------------------------------- load


def load(only: list[Model]) -> Lines:
    """Loading of a file in the page cache to the GPU, and memory in use afterwards."""
    from make_random_gguf import write  # only this part needs the package gguf

    for model in shared.select_models(only, (("mistral-7b", "f16"),)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            start = time.perf_counter()
            write(RandomCheckpoint(*model), path)
            size, took = path.stat().st_size, time.perf_counter() - start
            yield f"{model[0]} {model[1]}: {size / 1e9:.2f} GB, written at {rate(size, took)}"
            yield f"read into the page cache at {rate(size, read(path))}"
            yield from load_file(path)


def rate(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def read(path: Path) -> float:
    """Return the seconds of reading the file."""
    piece, start = bytearray(64 << 20), time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass
    return time.perf_counter() - start


class LoadTimes:
    """Progress callback that records when each phase of loading began and ended."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        self._begun.setdefault(what, time.perf_counter())
        if done >= total:
            self._ended.setdefault(what, time.perf_counter())

    def seconds(self, what: str) -> float:
        return self._ended[what] - self._begun[what]


def load_file(path: Path) -> Lines:
    """Load the file twice; the first time may include compilation of kernels."""
    for turn in ("first", "second"):
        gc.collect()
        before, load_times = shared.memory_in_use(), LoadTimes()
        llm = graphllm.load(path, device="cuda", context=4096, progress=load_times)
        weights = sum(t.nbytes for t in llm.file.tensors.values())
        cache = sum(node.meta.bound().nbytes for node in llm.decoder.pools.values())
        after, upload = shared.memory_in_use(), load_times.seconds("preparing weights")
        yield f"{turn}: load_s {llm.load_s:.2f}, {rate(weights, llm.load_s)} in total"
        yield f"  upload of weights: {upload:.2f} s, {rate(weights, upload)}"
        yield (
            f"  GPU memory in use: {after / 1e9:.2f} GB ({before / 1e9:.2f} before); weights "
            f"{weights / 1e9:.2f} + cache {cache / 1e9:.2f} + 1 GiB = "
            f"{(weights + cache + (1 << 30)) / 1e9:.2f} GB"
        )
        del llm


# ----------------------------------------------------------------------------------------- profile


def profile(only: list[Model]) -> Lines:
    """Output of `graphllm profile` for 512 prompt tokens and 64 decoded tokens."""
    for model in shared.select_models(only, (("mistral-7b", "q4_0"), ("mistral-7b", "f16"))):
        llm = shared.load_random(model, DECODE.context + 64)
        yield f"{model[0]} {model[1]}"
        found = llm.profile(bench.filler_tokens(DECODE.depth, llm.decoder.cfg.vocab), 64, ROUNDS)
        yield from found.table().splitlines()
        del llm
