"""Time the engine: batches of sequences, prompts of many lengths, shared prefixes.

    python benchmarks/engine.py                                  # gemma3-270m, random weights, CPU
    python benchmarks/engine.py decode prefill --model demo -t 1
    python benchmarks/engine.py --random mistral-7b --type q4_0 --device cuda
    python benchmarks/engine.py decode --sequences 1,16,128 --cached 512 --deterministic ...

Parts (all by default), each paired within one run and repeated; medians of the rounds:

decode   Decode steps of 8, 16 and 64 sequences with 128 cached tokens each (or --sequences and
         --cached), sampled at temperature 0.8. ``hand``: a `DecodeLoop` over the engine's own plan,
         whose tables were filled in advance, so that the host does nothing between steps.
         ``kernels``: sum of the times of all steps of the plan, from a profiled run of that loop.
         Both start from the same cache as the engine's own steps.
host     The engine's own time for such a step: the same, but no kernel is run (CPU only).
prefill  32 prompts of 1 to 512 tokens through the engine, and one prompt of the same total length.
         A long prompt has more (query, key) pairs, so the times of the kernels stand beside the
         wall times; ``overhead`` is what the wall time exceeds them by.
requests 64 and 256 requests at once, each with a prompt of 128 tokens and 128 sampled ones, and
         the sampled tokens per second from the first submission to the last token.
prefix   16 prompts that share their first 1,000 tokens: the number of tokens that are computed.
         Then 16 prompts that share nothing: the time spent in everything that the block manager
         does (allocation of blocks included) as a share of the wall time, in prefill and decode. It
         is an upper bound of what prefix caching costs.

Nothing is tokenized, and no request ends early. Times of the CPU depend on what else runs: pin the
process to idle cores (``taskset -c 1``), or use as many threads as there are.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import graphllm
from graphllm.api import LLM
from graphllm.backends import Options
from graphllm.backends.cpu.runtime.cores import thread_count
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.checkpoints.checkpoint import Checkpoint, open_checkpoint
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.block_manager import BlockManager
from graphllm.engine.engine import Engine
from graphllm.engine.forward_feeds import kv_pairs
from graphllm.engine.generation import Generation
from graphllm.engine.kv_memory import block_bytes
from graphllm.engine.request import Sampling
from graphllm.errors import GraphllmError
from graphllm.loading.load import build_decoder, graph_limits
from graphllm.model.batch import Limits
from graphllm.profiler.bench import filler_tokens
from graphllm.profiler.record import Recorder, Run
from graphllm.profiler.roofline import cpu_name
from graphllm.runtime.decode_loop import DecodeLoop

DECODE_BATCHES, DEPTH, STEPS = [8, 16, 64], 128, 64
REQUESTS, PROMPT, ANSWER = (64, 256), 128, 128
PROMPTS, LONGEST = 32, 512
SHARERS, SHARED, OWN = 16, 1000, 32
MANAGER = ("begin", "awaited", "is_computing", "reserve", "commit", "release", "can_hold")
SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=0, max_tokens=1 << 30)
Lines = Iterator[str]


# ---------------------------------------------------------------------------------------- requests


def prompts(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random token ids of these lengths, without a common first block."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def submit(
    engine: Engine, texts: Sequence[list[int]], max_tokens: int = SAMPLING.max_tokens
) -> list[Generation]:
    """Begin a request for each prompt; none ends before it has ``max_tokens``."""
    settings = [replace(SAMPLING, seed=i, max_tokens=max_tokens) for i in range(len(texts))]
    return [engine.submit(ids, own, ()) for ids, own in zip(texts, settings)]


def prefill(
    engine: Engine, generations: Sequence[Generation], recorder: Recorder | None = None
) -> float:
    """Run steps until each request has a token; return the seconds."""
    recorders = (recorder, Recorder()) if recorder is not None else None
    start = time.perf_counter()
    while not all(each.count or each.done for each in generations):
        engine.step(recorders)
    return time.perf_counter() - start


def kv_bytes(file: Checkpoint, limits: Limits, tokens: int) -> int:
    """Return the bytes of a KV cache for ``tokens`` tokens of all sequences together."""
    decoder = build_decoder(file)
    limits = decoder.limits(limits)
    limits = replace(limits, kv_blocks=-(-tokens // limits.block))
    groups = decoder.caches
    return sum(limits.pool_blocks(group.window) * block_bytes(group, limits) for group in groups)


def cancel(engine: Engine, generations: Sequence[Generation]) -> None:
    """End the requests, and forget the cached prefixes."""
    for each in generations:
        engine.cancel(each)
    engine.clear_cache()


def kernel_seconds(runs: Sequence[Run]) -> float:
    """Return the time of all steps of all runs, copies included."""
    return sum(int(run.times.sum()) for run in runs) / 1e9


# ------------------------------------------------------------------------------------------ decode


def decode(
    load: Callable[..., LLM],
    rounds: int,
    counts: Sequence[int] = DECODE_BATCHES,
    cached: int = DEPTH,
) -> Lines:
    """Yield the decode times of the engine, of a loop driven by hand, and of the kernels."""
    yield (
        f"{'sequences':>9} {'engine tok/s':>12} {'engine us':>10} {'hand us':>9} "
        f"{'kernels us':>10} {'kernels/engine':>14} {'hand/engine':>11}   (us per step)"
    )
    context = cached + (rounds + 2) * (STEPS + 2) + 64
    llm = load(context=context, max_sequences=max(counts))
    engine = llm.engine
    for count in counts:
        times: list[tuple[float, float, float]] = []
        with engine.lock.hold("a benchmark"):
            texts = prompts(engine.vocab, [cached] * count)
            prefill(engine, submit(engine, texts, 1))  # then all sequences begin in one step
            generations = submit(engine, texts)
            prefill(engine, generations)
            for _ in range(rounds + 1):
                kernels = Recorder()
                hand = drive(engine)
                drive(engine, kernels)
                by_kernel = kernel_seconds(kernels.runs[4:]) / (STEPS - 4)
                times.append((engine_steps(engine), hand, by_kernel))
            cancel(engine, generations)
        own, hand, kernel = map(median, zip(*times[1:]))
        shares = [median(t[i] / t[0] for t in times[1:]) for i in (2, 1)]
        yield (
            f"{count:>9} {count / own:12.1f} {1e6 * own:10.1f} {1e6 * hand:9.1f} "
            f"{1e6 * kernel:10.1f} {shares[0]:14.3f} {shares[1]:11.3f}"
        )
    llm.close()


def engine_steps(engine: Engine) -> float:
    """Run decode steps of all requests; return the seconds per step."""
    before = engine.batcher.steps
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    engine.settle()  # takes the steps that were launched ahead
    return (time.perf_counter() - start) / (engine.batcher.steps - before)


def drive(engine: Engine, recorder: Recorder | None = None) -> float:
    """Run the same steps in a `DecodeLoop`, without the engine; return the seconds per step.

    The requests do not advance: what the loop writes to their blocks is computed again later.
    """
    engine.settle()
    engine.batcher.reset()
    runner, chunks = engine.batcher.runner, engine.scheduler.schedule()
    by_sequence = {each.sequence: each for each in engine.batcher.generations}
    rows = [by_sequence[chunk.sequence] for chunk in chunks]
    for row, chunk in zip(rows, chunks):
        if not engine.manager.reserve(row.blocks, chunk.start, chunk.start + STEPS + 1):
            raise MemoryError("the KV cache is too small for the benchmark")
    size, count = runner.bucket(len(rows)), len(rows)
    plan = runner.plan(["ids"], size, size, size)
    env = {"T": count, "S": count, "Q": count + 1, "N": count}
    feeds, _ = runner.feeds(plan, chunks, rows)
    pairs = sum(kv_pairs(chunk.start, 1) for chunk in chunks)
    loop = engine.executor.decode_loop(plan, feeds, env, "ids", recorder, lambda: {"kv_sum": pairs})
    taken = launched = 0
    start = time.perf_counter()
    while taken < STEPS:
        while launched < STEPS and loop.waiting <= loop.lookahead:
            loop.launch()
            launched += 1
        loop.take()
        taken += 1
    return (time.perf_counter() - start) / STEPS


def host(load: Callable[..., LLM], rounds: int) -> Lines:
    """Yield the time of a decode step without its kernels."""
    yield f"{'sequences':>9} {'median us':>10} {'least us':>9}   (of {rounds * STEPS} steps)"
    context = DEPTH + rounds * STEPS + 8
    for count in DECODE_BATCHES:
        llm = load(context=context, max_sequences=count)
        engine, times = llm.engine, []
        with engine.lock.hold("a benchmark"):
            generations = submit(engine, prompts(engine.vocab, [DEPTH] * count))
            prefill(engine, generations)
            engine.executor.decode_loop = without_kernels(engine.executor.decode_loop)
            for _ in range(rounds * STEPS):
                start = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - start)
        yield f"{count:>9} {1e6 * median(times):10.1f} {1e6 * min(times):9.1f}"
        llm.close()


def without_kernels(make_loop: Callable[..., DecodeLoop]) -> Callable[..., DecodeLoop]:
    """Return a `decode_loop` whose loops return what is in the output, and run nothing."""

    def empty_loop(*given: Any, **named: Any) -> DecodeLoop:
        steps = make_loop(*given, **named)
        if steps.lookahead:
            raise GraphllmError("host: the device runs ahead, so its time hides the host's")
        steps.launchers = []
        return steps

    return empty_loop


# ----------------------------------------------------------------------------------------- prefill


@dataclass
class Prefill:
    """Times of one prefill: wall and kernels in seconds, and the number of steps."""

    wall: float
    kernels: float
    steps: int


def many_prompts(load: Callable[..., LLM], rounds: int) -> Lines:
    """Yield the prefill times of many prompts, and of one as long as all of them."""
    rng = random.Random(7)
    lengths = [1, LONGEST, *(rng.randint(1, LONGEST) for _ in range(PROMPTS - 2))]
    total = sum(lengths)
    llm = load(context=total + 1, max_sequences=PROMPTS, kv_tokens=2 * total)
    engine = llm.engine
    found: dict[str, list[Prefill]] = {"many": [], "one": []}
    with engine.lock.hold("a benchmark"):
        for number in range(rounds + 1):
            for name, each in (("many", lengths), ("one", [total])):
                texts = prompts(engine.vocab, each, number)
                found[name].append(time_prefill(engine, texts))
    llm.close()
    yield (
        f"{'prompts':>8} {'tokens':>7} {'steps':>5} {'wall ms':>9} {'kernels ms':>10} "
        f"{'overhead':>8}"
    )
    for name, count in (("many", PROMPTS), ("one", 1)):
        own = found[name][1:]
        wall, kernels = median(p.wall for p in own), median(p.kernels for p in own)
        over = median(p.wall / p.kernels for p in own) - 1
        yield (
            f"{count:>8} {total:>7} {own[-1].steps:>5} {1e3 * wall:9.1f} {1e3 * kernels:10.1f} "
            f"{over:8.1%}"
        )
    pairs = list(zip(found["many"][1:], found["one"][1:]))
    yield f"wall, {PROMPTS} prompts / one: {median(m.wall / o.wall for m, o in pairs):.3f}"
    yield (
        "the same of wall / kernels: "
        f"{median((m.wall / m.kernels) / (o.wall / o.kernels) for m, o in pairs):.3f}"
    )


def time_prefill(engine: Engine, texts: Sequence[list[int]]) -> Prefill:
    """Prefill twice, without and with profiling; each request ends with its first token."""
    generations = submit(engine, texts, 1)
    before = engine.batcher.steps
    wall, steps = prefill(engine, generations), engine.batcher.steps - before
    cancel(engine, generations)
    recorder, generations = Recorder(), submit(engine, texts, 1)
    prefill(engine, generations, recorder)
    cancel(engine, generations)
    return Prefill(wall, kernel_seconds(recorder.runs), steps)


# ---------------------------------------------------------------------------------------- requests


def requests(load: Callable[..., LLM], rounds: int) -> Lines:
    """Yield the throughput of requests that arrive together."""
    yield f"{'requests':>8} {'tok/s':>9} {'seconds':>8}   (prompts of {PROMPT}, {ANSWER} sampled)"
    llm = load(context=PROMPT + ANSWER + 1, max_sequences=max(REQUESTS))
    engine = llm.engine
    for count in REQUESTS:
        times = []
        with engine.lock.hold("a benchmark"):
            for number in range(rounds + 1):
                texts = prompts(engine.vocab, [PROMPT] * count, number)
                start = time.perf_counter()
                generations = submit(engine, texts, ANSWER)
                while not all(each.done for each in generations):
                    engine.step()
                times.append(time.perf_counter() - start)
                cancel(engine, generations)
        took = median(times[1:])
        yield f"{count:>8} {count * ANSWER / took:9.1f} {took:8.3f}"
    llm.close()


# ------------------------------------------------------------------------------------------ prefix


def prefix(load: Callable[..., LLM], rounds: int) -> Lines:
    """Yield the tokens computed for a shared prefix, and the time of the block manager."""
    llm = load(context=SHARED + OWN + STEPS + 2, max_sequences=SHARERS)
    engine = llm.engine
    with engine.lock.hold("a benchmark"):
        common = filler_tokens(SHARED, engine.vocab)
        own = prompts(engine.vocab, [OWN] * SHARERS)
        shared = submit(engine, [common + ids for ids in own], 1)
        took = prefill(engine, shared)
        computed = sum(each.prefill_tokens for each in shared)
        cancel(engine, shared)
        alone = prompts(engine.vocab, [SHARED + OWN] * SHARERS)
        apart = prefill(engine, nothing := submit(engine, alone, 1))
        cancel(engine, nothing)
        size, every = engine.limits.block, SHARERS * (SHARED + OWN)
        rest = SHARED % size
        yield (
            f"{SHARERS} prompts of {SHARED} common and {OWN} own tokens: {computed} of {every} "
            f"tokens computed; {SHARED} + {SHARERS} * {OWN} + {SHARERS - 1} * {rest} (partial "
            f"block) = {SHARED + SHARERS * OWN + (SHARERS - 1) * rest}"
        )
        yield f"prefill: {1e3 * took:.1f} ms; nothing shared: {1e3 * apart:.1f} ms"
        shares = [manager_shares(engine, number) for number in range(rounds + 1)][1:]
    llm.close()
    for name, share in zip(("prefill", "decode"), zip(*shares)):
        yield f"block manager, nothing shared, {name}: {median(share):.2%} of the wall time"


def manager_shares(engine: Engine, number: int) -> tuple[float, float]:
    """Return the block manager's share of the time of prefill and decode of many sequences."""
    texts, shares = prompts(engine.vocab, [SHARED + OWN] * SHARERS, number), []
    generations: list[Generation] = []

    def first() -> None:
        generations.extend(submit(engine, texts))
        prefill(engine, generations)

    for work in (first, lambda: engine_steps(engine)):
        with manager_time(engine.manager) as spent:
            start = time.perf_counter()
            work()
            shares.append(spent[0] / (time.perf_counter() - start))
    cancel(engine, generations)
    return shares[0], shares[1]


@contextmanager
def manager_time(manager: BlockManager) -> Iterator[list[float]]:
    """Add the seconds spent in the methods of the block manager to the first item of a list."""
    spent, clock = [0.0], time.perf_counter

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            start = clock()
            try:
                return call(*given, **named)
            finally:
                spent[0] += clock() - start

        return wrapped

    for name in MANAGER:
        setattr(manager, name, timed(getattr(manager, name)))
    try:
        yield spent
    finally:
        for name in MANAGER:
            delattr(manager, name)


# -------------------------------------------------------------------------------------------- main


PARTS: dict[str, Callable[..., Lines]] = {
    "decode": decode,
    "host": host,
    "prefill": many_prompts,
    "requests": requests,
    "prefix": prefix,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all.")
    parser.add_argument("--model", help="A model file or demo, instead of random weights.")
    parser.add_argument("--random", default="gemma3-270m", metavar="SHAPE")
    parser.add_argument("--type", default="q4_k_m", help="Format of random weights.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true", help="As in graphllm.load.")
    parser.add_argument("--sequences", default=",".join(map(str, DECODE_BATCHES)), help="decode")
    parser.add_argument("--cached", type=int, default=DEPTH, help="Tokens in each cache (decode).")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - PARTS.keys():
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    file = (
        open_checkpoint(asked.model) if asked.model else RandomCheckpoint(asked.random, asked.type)
    )

    def load(context: int, max_sequences: int, kv_tokens: int = 0) -> LLM:
        own: dict[str, Any] = {"context": context, "max_sequences": max_sequences}
        if kv_tokens:
            own["kv_memory"] = kv_bytes(
                file, graph_limits(device=asked.device, kv_type=None, **own), kv_tokens
            )
        own |= {"threads": asked.threads, "deterministic": asked.deterministic}
        return graphllm.load(file, device=asked.device, **own)

    threads = thread_count(Options(threads=asked.threads))
    print(f"{file.path}, {asked.device}, graphllm {graphllm.__version__}")
    print(f"{cpu_name()}, {isa()}, {threads} threads")
    for name in asked.parts or PARTS:
        print(f"\n{name}")
        more = (
            (list(map(int, asked.sequences.split(","))), asked.cached) if name == "decode" else ()
        )
        for line in PARTS[name](load, asked.rounds, *more):
            print(line, flush=True)


if __name__ == "__main__":
    main()
