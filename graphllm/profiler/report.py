"""A profiled run, and its plain table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..generation.request import Timings
from .rows import KEYS, Row, totals


@dataclass
class Profile:
    """Rows of the prefill and of the decoding of one run."""

    prefill: list[Row]
    decode: list[Row]
    timings: Timings
    placement: Mapping[str, Mapping[str, int]]

    def table(self, by: str = "op") -> str:
        """Both phases as text, rows summed by op, scope, layer, backend or format."""
        if by not in KEYS:
            raise ValueError(f"by = {by!r} must be one of {', '.join(KEYS)}")
        t = self.timings
        parts = [
            _phase("prefill", self.prefill, by, t.prefill_s, t.prefill_tokens),
            _phase("decode", self.decode, by, t.decode_s, t.decode_tokens),
        ]
        reasons = sorted({f"{r.op} ran on {r.backend}: {r.why}" for r in self.decode if r.why})
        return "\n\n".join(parts + (["\n".join(reasons)] if reasons else []))


def _phase(name: str, rows: list[Row], by: str, seconds: float, tokens: int) -> str:
    """One phase's table: time per token, share of the wall time, bandwidth and arithmetic."""
    if not rows or not tokens:
        return f"{name}: nothing ran"
    wall_ms = seconds * 1e3 / tokens
    width = max(len(by), *(len(key) for key in totals(rows, by)))
    lines = [
        f"{name}: {tokens} tokens, {tokens / seconds:.1f} tok/s, {wall_ms:.3f} ms a token",
        f"{by:<{width}} {'calls':>7} {'ms/token':>9} {'share':>6} {'GB/s':>7} {'GFLOP/s':>8}",
    ]
    inside = 0.0
    for key, total in totals(rows, by).items():
        ms = total.ns / 1e6 / tokens
        inside += ms
        lines.append(
            f"{key:<{width}} {total.calls:>7} {ms:>9.3f} {ms / wall_ms:>6.1%}"
            f" {total.gb_s:>7.1f} {total.gflop_s:>8.1f}"
        )
    rest = wall_ms - inside
    lines.append(f"{'between steps':<{width}} {'':>7} {rest:>9.3f} {rest / wall_ms:>6.1%}")
    return "\n".join(lines)
