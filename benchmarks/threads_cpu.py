"""Time of each kind of op on the CPU by number of threads, and how it scales.

    python benchmarks/threads_cpu.py --random qwen2-1.5b --type q4_k_m -t 1,16
    python benchmarks/threads_cpu.py model.gguf -t 1,2,4,8,16 --prompt-tokens 512

Prefill and decode are profiled with each number of threads. An op's time is the sum of the fastest
runs of its steps, per token, so that work beside it on the machine matters little. The last column
is the time with the first number of threads over that with the last.
"""

from __future__ import annotations

import argparse

import graphllm
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.profiler.bench import filler_tokens
from graphllm.profiler.phase import Phase
from graphllm.profiler.record import totals

Times = dict[str, float]  # microseconds per token, by kind of op


def op_times(phase: Phase, runs_per_pass: int) -> Times:
    """Times of the ops of a phase, the longest first."""
    sums = totals(row.fastest for row in phase.rows)
    return {name: total.ns * runs_per_pass / phase.tokens / 1e3 for name, total in sums.items()}


def profiled(model: str | RandomCheckpoint, threads: int, tokens: tuple[int, int], passes: int):
    """Times of prefill and of decode, and their tokens per second."""
    prompt, new = tokens
    llm = graphllm.load(model, device="cpu", threads=threads, context=prompt + new + 64)
    found = llm.profile(filler_tokens(prompt, llm.decoder.cfg.vocab), new, passes)
    rates = {phase.name: phase.tok_s for phase in found.phases}
    times = {
        phase.name: op_times(phase, len(phase.runs) // passes // len(phase.plans))
        for phase in found.phases
    }
    return times, rates


def table(counts: list[int], times: list[Times], rates: list[float]) -> list[str]:
    """Lines of a phase: one for each kind of op, their sum, and the rate of the whole phase."""
    names = list(times[0])
    width = max(map(len, [*names, "tokens per second"]))
    heads = "".join(f" {f't={count}':>10}" for count in counts)
    lines = [f"{'us/token':<{width}}{heads} {'scaling':>8}"]
    for name in [*names, "all ops"]:
        each = [sum(own.values()) if name == "all ops" else own.get(name, 0.0) for own in times]
        cells = "".join(f" {value:10.2f}" for value in each)
        lines.append(f"{name:<{width}}{cells} {each[0] / max(each[-1], 1e-9):8.1f}")
    cells = "".join(f" {rate:10.1f}" for rate in rates)
    return [*lines, f"{'tokens per second':<{width}}{cells} {rates[-1] / rates[0]:8.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo", help="A .gguf file, or demo.")
    parser.add_argument("--random", metavar="SHAPE", help="Random weights with this shape.")
    parser.add_argument("--type", default="q4_k_m", help="Format of random weights.")
    parser.add_argument("-t", "--threads", default="1,2", help="Numbers, comma-separated.")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("-n", type=int, default=16, help="Tokens to decode.")
    parser.add_argument("-r", type=int, default=3, help="Number of passes.")
    opts = parser.parse_args()
    model = RandomCheckpoint(opts.random, opts.type) if opts.random else opts.model
    counts = [int(count) for count in opts.threads.split(",")]
    found = [profiled(model, count, (opts.prompt_tokens, opts.n), opts.r) for count in counts]
    for phase in found[0][0]:
        print(f"{phase}:")
        lines = table(
            counts, [each[0][phase] for each in found], [each[1][phase] for each in found]
        )
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
