"""Check that profiles account for the wall time, their overhead, and agreement with CUPTI.

    python benchmarks/profile_accounting.py demo -t 2
    python benchmarks/profile_accounting.py --random mistral-7b --type f16 --cupti

For each phase: the attributed share of the wall time, the rest, and the profiling overhead. With
--cupti (package cupti-python): the time of each kind of op in profiled replays, next to that of
CUPTI's kernel records of the same runs, both from the end of the step before to its own end.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

import graphllm
from graphllm import LLM
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine.request import Sampling
from graphllm.errors import GraphllmError
from graphllm.profiler.bench import filler_tokens
from graphllm.profiler.profile import Phase
from graphllm.profiler.record import GROUP_KEYS, Recorder, Run, rows_of

TOKENS = 32  # recorded with CUPTI


def accounting(phase: Phase) -> str:
    """Format the attributed share and the profiling overhead of a phase."""
    own = phase.accounting
    parts = ", ".join(f"{name} {ns / own.wall:.2%}" for name, ns in own.as_dict().items())
    return f"{phase.name}: attributed {own.attributed:.2%}, overhead {phase.overhead:+.2%}; {parts}"


# ------------------------------------------------------------------------------------------- CUPTI


def kernels(work: Callable[[], None]) -> list[tuple[int, int, str]]:
    """Return (start, end, name) of all kernels of ``work``, recorded by CUPTI, by end time."""
    from cupti import cupti

    found: list[tuple[int, int, str]] = []

    def completed(activities: list) -> None:
        found.extend((a.start, a.end, a.name) for a in activities)

    cupti.activity_register_callbacks(lambda: (8 << 20, 0), completed)
    cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
    work()
    cupti.activity_flush_all(1)
    cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL)
    return sorted(found, key=lambda each: each[1])


def recorded(llm: LLM, ids: list[int]) -> tuple[list[tuple[int, int, str]], list[Run]]:
    """Return CUPTI's kernel records of some decode steps, and the profiled runs of the same."""
    recorders = Recorder(), Recorder()
    sampled = llm.engine.generate(ids, Sampling(seed=0), (), profile=recorders)
    for _ in range(4):
        next(sampled)  # the CUDA graph is captured
    begun = len(recorders[1].runs)

    def tokens() -> None:
        for _ in range(TOKENS):
            next(sampled)
        llm.executor.get_state("ids")  # waits for launched steps

    llm.executor.get_state("ids")
    return kernels(tokens), recorders[1].runs[begun:]


def agreement(llm: LLM, ids: list[int]) -> Iterator[str]:
    """Compare the times of each kind of op with CUPTI, for a plan that is one CUDA graph."""
    found, runs = recorded(llm, ids)
    plan = llm.engine.decode_plan()
    ((segment, _),) = llm.executor.segments(plan)
    owners = [i for i, part in enumerate(segment._work) for w in part if 0 not in w.grid]
    count = len(owners) + 2  # the profiler adds a kernel before and after
    if len(found) != count * len(runs):
        raise GraphllmError(
            f"CUPTI recorded {len(found)} kernels, expected {len(runs)} runs of {count}"
        )
    ends = np.array([end for _, end, _ in found]).reshape(len(runs), count)
    took = np.diff(ends, axis=1)
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    rows = rows_of(runs)
    for column, step in enumerate(owners):
        theirs[GROUP_KEYS["op"](rows[step])] += float(np.median(took[:, column]))
    for row in rows:
        ours[GROUP_KEYS["op"](row)] += float(np.median(row.times))
    yield f"{'op':<28} {'CUPTI us':>9} {'own us':>9} {'':>7}"
    for name, ns in sorted(theirs.items(), key=lambda item: -item[1]):
        yield f"{name:<28} {ns / 1e3:9.1f} {ours[name] / 1e3:9.1f} {ours[name] / ns - 1:+7.1%}"
    total, own = sum(theirs.values()), sum(ours.values())
    yield f"{'all':<28} {total / 1e3:9.1f} {own / 1e3:9.1f} {own / total - 1:+7.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="A .gguf file, or demo.")
    parser.add_argument("--random", metavar="SHAPE", help="Random weights with this shape.")
    parser.add_argument("--type", default="q4_k_m", help="Format of random weights.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-n", type=int, default=64, help="Tokens to decode.")
    parser.add_argument("-r", type=int, default=5, help="Number of passes.")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--cupti", action="store_true", help="Compare with CUPTI.")
    asked = parser.parse_args()
    model = RandomCheckpoint(asked.random, asked.type) if asked.random else asked.model or "demo"
    context = asked.prompt_tokens + asked.n + 64
    llm = graphllm.load(model, device=asked.device, threads=asked.threads, context=context)
    ids = filler_tokens(asked.prompt_tokens, llm.decoder.cfg.vocab)
    found = llm.profile(ids, asked.n, asked.r)
    print(f"{found.about['model']['type']}, {llm.device}, {asked.prompt_tokens} + {asked.n} tokens")
    for phase in found.phases:
        print(f"  {accounting(phase)}")
    if asked.cupti:
        for line in agreement(llm, ids):
            print(f"  {line}")
    return 0 if all(phase.accounting.attributed >= 0.97 for phase in found.phases) else 1


if __name__ == "__main__":
    sys.exit(main())
