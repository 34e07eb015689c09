"""Does a profile add up, what does taking it cost, and do the GPU's own records agree with it?

    python benchmarks/profile_accounting.py demo -t 2
    python benchmarks/profile_accounting.py --random mistral-7b --type f16 --cupti

Of each phase: the share of the wall time that has a name, what is left, what noting times costs.
With --cupti (package cupti-python), the time of each kind of op in timed replays beside that of
CUPTI's kernel records of the same runs, taken alike: from the end of the step before to its own.
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

TOKENS = 32  # that CUPTI looks at


def accounting(phase: Phase) -> str:
    """What is attributed, and what timing costs."""
    own = phase.accounting
    parts = ", ".join(f"{name} {ns / own.wall:.2%}" for name, ns in own.as_dict().items())
    return f"{phase.name}: attributed {own.attributed:.2%}, overhead {phase.overhead:+.2%}; {parts}"


# ------------------------------------------------------------------------------------------- CUPTI


def kernels(work: Callable[[], None]) -> list[tuple[int, int, str]]:
    """(start, end, name) of all kernels of ``work`` in order of their ends, by CUPTI's records."""
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
    """CUPTI's records of the kernels of some tokens, and what was noted of their runs."""
    recorders = Recorder(), Recorder()
    drawn = llm.engine.generate(ids, Sampling(seed=0), (), profile=recorders)
    for _ in range(4):
        next(drawn)  # the graph is made
    begun = len(recorders[1]._pending)

    def tokens() -> None:
        for _ in range(TOKENS):
            next(drawn)
        llm.executor.get_state("ids")  # all that was begun is over

    llm.executor.get_state("ids")
    return kernels(tokens), recorders[1].runs[begun:]


def agreement(llm: LLM, ids: list[int]) -> Iterator[str]:
    """Each kind of op in timed runs of a plan that is one CUDA graph, by CUPTI and as noted."""
    found, runs = recorded(llm, ids)
    plan = llm.engine.decode_plan()
    ((segment, _),) = llm.executor.segments(plan)
    owners = [i for i, part in enumerate(segment._work) for w in part if 0 not in w.grid]
    count = len(owners) + 2  # a kernel before them, and one after them, are the profiler's
    if len(found) != count * len(runs):
        raise GraphllmError(f"CUPTI saw {len(found)} kernels of {len(runs)} runs of {count}")
    ends = np.array([end for _, end, _ in found]).reshape(len(runs), count)
    took = np.diff(ends, axis=1)
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    rows = rows_of(runs)
    for column, step in enumerate(owners):
        theirs[GROUP_KEYS["op"](rows[step])] += float(np.median(took[:, column]))
    for row in rows:
        ours[GROUP_KEYS["op"](row)] += float(np.median(row.times))
    yield f"{'op':<28} {'CUPTI us':>9} {'ours us':>9} {'':>7}"
    for name, ns in sorted(theirs.items(), key=lambda item: -item[1]):
        yield f"{name:<28} {ns / 1e3:9.1f} {ours[name] / 1e3:9.1f} {ours[name] / ns - 1:+7.1%}"
    total, own = sum(theirs.values()), sum(ours.values())
    yield f"{'all':<28} {total / 1e3:9.1f} {own / 1e3:9.1f} {own / total - 1:+7.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a .gguf file, or demo")
    parser.add_argument("--random", metavar="SHAPE", help="random weights of a real model's shape")
    parser.add_argument("--type", default="q4_k_m", help="their format")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-n", type=int, default=64, help="tokens after the prompt")
    parser.add_argument("-r", type=int, default=5, help="passes")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--cupti", action="store_true", help="compare with CUPTI's records")
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
