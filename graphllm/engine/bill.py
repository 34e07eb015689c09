"""Bill of one request: its wall time by cause, and the cost of its ops (`Bill`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OpCost:
    """Nanoseconds, bytes and FLOPs of an op."""

    ns: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, ns: float, nbytes: float, flops: float) -> None:
        """Add a cost."""
        self.ns += ns
        self.bytes += nbytes
        self.flops += flops


@dataclass
class Bill:
    """What one request cost, all of its samples and beams together.

    The times add up to the wall time, from the call that submits the request to its last token.

    Attributes:
        ops: the request's share of the ops of its steps, by op and format of its weights.
        gaps_ns: its share of the time in which its steps were in progress, but none of their ops.
        host_ns: its share of the time between steps: scheduling, feeds, delivery of tokens.
        draft_ns: its share of the time in which its draft tokens were predicted.
        others_ns: the shares of the other requests that its steps computed, too.
        prompt_ns: check and tokenization of its prompt.
        queue_ns: time in which it waited and steps did not compute it.
        preemption_ns: waiting after it had to give up its KV cache.
        http_ns: on a server, parsing, chat template, and the making of the answer.
        tokens: tokens that were computed for it; those found in the cache do not count.
        recomputed_tokens: of these, tokens that were computed again after a preemption.
        steps: steps that computed it.
    """

    ops: dict[str, OpCost] = field(default_factory=dict)
    gaps_ns: float = 0.0
    host_ns: float = 0.0
    draft_ns: float = 0.0
    others_ns: float = 0.0
    prompt_ns: float = 0.0
    queue_ns: float = 0.0
    preemption_ns: float = 0.0
    http_ns: float = 0.0
    tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0

    @property
    def times(self) -> dict[str, float]:
        """Nanoseconds of what is not an op, by name."""
        return {
            "gaps": self.gaps_ns,
            "host": self.host_ns,
            "drafts": self.draft_ns,
            "other requests": self.others_ns,
            "prompt": self.prompt_ns,
            "queue": self.queue_ns,
            "preemption": self.preemption_ns,
            "http": self.http_ns,
        }

    @property
    def wall_ns(self) -> float:
        """Sum of all rows."""
        return sum(op.ns for op in self.ops.values()) + sum(self.times.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows: ops, the longest first, with bytes and FLOPs; then the other times."""
        for name, op in sorted(self.ops.items(), key=lambda item: -item[1].ns):
            yield {"name": name, "ns": round(op.ns), "bytes": op.bytes, "flops": op.flops}
        for name, ns in self.times.items():
            yield {"name": name, "ns": round(ns)}

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "wall_ns": round(self.wall_ns),
            "steps": self.steps,
            "tokens": self.tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "rows": list(self.rows()),
        }

    def table(self) -> str:
        """Return the rows as a text table."""
        wall = max(self.wall_ns, 1)
        width = max(14, *(len(row["name"]) for row in self.rows()))
        again = f", {self.recomputed_tokens} of them again" if self.recomputed_tokens else ""
        lines = [
            f"bill: {self.tokens} tokens{again}, {self.steps} steps, {wall / 1e6:.2f} ms",
            f"{'op':<{width}} {'ms':>10} {'share':>6} {'MB':>10} {'GB/s':>7} {'GFLOP/s':>9}",
        ]
        for row in self.rows():
            ns = row["ns"]
            line = f"{row['name']:<{width}} {ns / 1e6:>10.3f} {ns / wall:>6.1%}"
            if "bytes" in row:
                rates = [row[name] / max(ns, 1) for name in ("bytes", "flops")]
                line += f" {row['bytes'] / 1e6:>10.2f} {rates[0]:>7.1f} {rates[1]:>9.1f}"
            lines.append(line)
        return "\n".join([*lines, f"{'wall':<{width}} {wall / 1e6:>10.3f} 100.0%"])
