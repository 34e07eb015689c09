"""Prediction of the times of steps, from the measured ceilings of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import backends as registry
from ..compiler.plan import HOST, Plan, Step
from ..graph.op import ATTENTION, MATMUL
from ..graph.tensor import WEIGHT
from ..ops import get
from . import roofline
from .bench import leaf_bytes
from .kernel_probes import FEW_TOKENS, FLOAT, Operations, operations
from .roofline import Ceilings

_OVERLAP = 1.5  # exponent; 1: nothing overlaps; infinity: all does


@dataclass(frozen=True)
class TimePredictor:
    """Predicts step times from the cached ceilings of backends at a number of CPU threads."""

    known: Mapping[str, Ceilings]
    threads: int

    @classmethod
    def of(cls, plans: Sequence[Plan], threads: int) -> TimePredictor:
        """Return a predictor with the cached ceilings of the backends of ``plans``."""
        names = {step.backend.name for plan in plans for step in plan.steps}
        found = {name: roofline.load_cached(name) for name in sorted(names)}
        return cls({name: c for name, c in found.items() if c is not None}, threads)

    def seconds(self, plan: Plan, env: Mapping[str, int]) -> float | None:
        """Predict the seconds of one run of ``plan``; None if a ceiling is missing.

        A step takes the time of its bytes and its operations, which overlap (`_overlapped`), plus
        the fixed overhead. Intermediates count only in prefill steps, since those of decode steps,
        of one token for each sequence, stay in the L1 and L2 caches.
        """
        total = 0.0
        for step in plan.steps:
            own = self._step_seconds(step, env)
            if own is None:
                return None
            total += own
        return total

    def _step_seconds(self, step: Step, env: Mapping[str, int]) -> float | None:
        ceiling = self.known.get(step.backend.name)
        if ceiling is None:
            return None
        threads, many = self.threads, env["T"] > 1
        parts = list(operations(step.node, env))
        best, computes = ceiling.bytes_s(threads), compute_seconds(parts, ceiling, threads)
        if not best or (computes is None and many):
            return None
        if env["T"] > env["S"]:
            moved = get(step.node.op).node_cost(step.node, env).bytes
        else:
            moved = leaf_bytes(step.node, env) * _format_slowdown(step, ceiling)
        both = _overlapped(step, moved / best, computes or 0.0)
        return both + ceiling.step_overhead(threads, _slow_kinds(parts, env))

    def lacking(self, plans: Sequence[Plan]) -> list[str]:
        """Return a line for each backend with a missing measurement."""
        lines = []
        how = "run graphllm doctor --measure on that machine"
        for name in sorted({step.backend.name for plan in plans for step in plan.steps}):
            if registry.find(name).measure is None:
                lines.append(f"no prediction: {name} has no speed measurement")
            elif name not in self.known:
                lines.append(f"no prediction: {name} was not measured ({how})")
            elif not self.known[name].flops:
                lines.append(f"no prediction of prefill: the arithmetic of {name} was not measured "
                             f"({how})")  # fmt: skip
        return lines

    def basis(self) -> list[str]:
        """Return bandwidth and provenance of each ceiling."""
        return [
            f"{name}: {c.bytes_s(self.threads) / 1e9:.1f} GB/s, {c.provenance()}"
            for name, c in self.known.items()
        ]


def _slow_kinds(parts: Sequence[Operations], env: Mapping[str, int]) -> set[str]:
    """Return the kinds of `Ceilings.kernel_overheads` that a step of these parts has."""
    found = set[str]()
    for kind, form, tokens, _ in parts:
        if form and 1 < tokens <= FEW_TOKENS:
            found.add(MATMUL)
        elif kind == ATTENTION and env["T"] == env["S"]:
            found.add(ATTENTION)
    return found


def _overlapped(step: Step, moving: float, computing: float) -> float:
    """Return the seconds of a step whose bytes and operations take these times alone.

    The longer of both on a device, whose threads hide each other's loads. A CPU core hides a part:
    the exponent was fitted to decode steps of 1 to 16 sequences, see docs/design/profiling.md.
    """
    if step.memory != HOST:
        return max(moving, computing)
    return (moving**_OVERLAP + computing**_OVERLAP) ** (1 / _OVERLAP)


def compute_seconds(parts: Sequence[Operations], ceiling: Ceilings, threads: int) -> float | None:
    """Return the seconds of a step's operations, by kind; None if a rate is unknown."""
    seconds = 0.0
    for kind, form, tokens, flops in parts:
        # A backend may lack an op that the probe needs; then the rate of float linears is used.
        rate = ceiling.flop_s(kind, threads) or ceiling.flop_s(FLOAT, threads)
        if not rate:
            return None
        seconds += flops / rate / ceiling.linear_share(form, tokens)
    return seconds


def _format_slowdown(step: Step, ceiling: Ceilings) -> float:
    """Return the slowdown of reading the step's weights against memory bandwidth, by format."""
    sizes = [
        (s.meta.bound().nbytes, ceiling.shares.get(s.dtype.name, 1.0))
        for s in step.node.sources
        if s.base.op == WEIGHT
    ]
    total = sum(nbytes for nbytes, _ in sizes)
    return sum(nbytes / share for nbytes, share in sizes) / total if total else 1.0


def step_env(tokens: int, cached: int, source: int = 0) -> dict[str, int]:
    """Return the Vars of a step of one sequence that computes the last token's logits.

    Args:
        tokens: tokens of the step.
        cached: tokens of the sequence before it, those of a source excepted.
        source: tokens of the source of an encoder-decoder.
    """
    kv_sum = tokens * (source + cached) + tokens * (tokens + 1) // 2
    env = {"T": tokens, "S": 1, "Q": 2, "N": 1, "kv_sum": kv_sum}
    return env | {"prefix_sum": tokens * source}
