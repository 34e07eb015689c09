"""What GRAPHLLM_DEBUG shows of runs: the memory that is held, a line for every step of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..backends import TimestampLog
from ..compiler.plan import Plan, Step
from ..debug import debug
from ..env import debug_level
from ..graph.op import get
from .recorder import BoundSegments

LEVEL = 2


class StepPrinter:
    """A `Recorder` that prints a line for each step of a run. It waits for the end of every run."""

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        for segment, steps in segments:
            log = TimestampLog()
            segment.run(log)
            log.collect()
            ends, _ = log.runs[0]
            for step, ns in zip(steps, np.diff(ends)):
                debug(LEVEL, _line(step, int(ns), env))


def step_printer() -> StepPrinter | None:
    """The recorder of runs without another one at GRAPHLLM_DEBUG=2; None below."""
    return StepPrinter() if debug_level() >= LEVEL else None


def _line(step: Step, ns: int, env: Mapping[str, int]) -> str:
    """One step of one run: backend, time, rates, op and weight formats, shape, scope."""
    node, cost = step.node, get(step.node.op).node_cost(step.node, env)
    rates = f"{cost.bytes / max(ns, 1):>7.1f} GB/s {cost.flops / max(ns, 1):>8.1f} GFLOP/s"
    what = f"{node.op} {step.weight_formats}".strip()
    tokens = f"T={env['T']}" if "T" in env else ""
    shape = " ".join(str(meta.at(env)) for meta in step.results)
    return (
        f"{step.backend.name:<9} {ns / 1e3:>10.1f} us {rates}  {what:<24} {tokens:<6} {shape}"
        f"  {node.scope}"
    ).rstrip()


def memory_lines(buffers: Iterable[tuple[str, str, int]], arenas: Mapping[str, Any]) -> str:
    """A line for each memory that an executor holds something in. ``buffers``: memory, kind and
    bytes of each; ``arenas``: by memory."""
    sums: dict[str, Counter[str]] = {}
    spaces = ((memory, "intermediates", arena.nbytes) for memory, arena in arenas.items())
    for memory, kind, nbytes in (*buffers, *spaces):
        sums.setdefault(memory, Counter())[kind] += nbytes
    return "\n".join(
        f"memory {memory}: {sum(own.values()) / 1e6:.1f} MB: "
        + ", ".join(f"{kind} {nbytes / 1e6:.1f}" for kind, nbytes in own.items())
        for memory, own in sums.items()
    )
