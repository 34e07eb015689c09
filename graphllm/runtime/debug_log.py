"""Debug output of runs: memory in use, and a line for every step."""

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
    """A `Recorder` that waits for the end of each run and prints a line for each of its steps."""

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        for segment, steps in segments:
            log = TimestampLog()
            segment.run(log)
            log.collect()
            ends, _ = log.runs[0]
            for step, ns in zip(steps, np.diff(ends)):
                debug(LEVEL, _line(step, int(ns), env))


def step_printer() -> StepPrinter | None:
    """Return the recorder for runs without one at GRAPHLLM_DEBUG=2; None below that level."""
    return StepPrinter() if debug_level() >= LEVEL else None


def _line(step: Step, ns: int, env: Mapping[str, int]) -> str:
    """Format one step of a run: backend, time, rates, op and weight formats, shape, scope."""
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
    """Format a line for each memory in which an executor holds buffers.

    Args:
        buffers: memory, kind and bytes of each buffer.
        arenas: arena of each memory.
    """
    sums: dict[str, Counter[str]] = {}
    intermediates = ((memory, "intermediates", arena.nbytes) for memory, arena in arenas.items())
    for memory, kind, nbytes in (*buffers, *intermediates):
        sums.setdefault(memory, Counter())[kind] += nbytes
    return "\n".join(
        f"memory {memory}: {sum(own.values()) / 1e6:.1f} MB: "
        + ", ".join(f"{kind} {nbytes / 1e6:.1f}" for kind, nbytes in own.items())
        for memory, own in sums.items()
    )
