"""What GRAPHLLM_DEBUG shows of runs: the memory that is held, a line for every step of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..debug import debug, debug_level
from .record import Pieces, Recorder, Row

if TYPE_CHECKING:
    from ..compiler.plan import Plan

LEVEL = 2


class Printer(Recorder):
    """A Recorder that shows what each run notes, and keeps nothing. It waits for every run."""

    def run(self, plan: Plan, pieces: Pieces, env: Mapping[str, int]) -> None:
        own = Recorder()
        own.run(plan, pieces, env)
        tokens = f"T={env['T']}" if "T" in env else ""
        for row in own.rows:
            debug(LEVEL, line(row, tokens))


def printer() -> Printer | None:
    """Who shows runs that nobody else records; None below the rung."""
    return Printer() if debug_level() >= LEVEL else None


def line(row: Row, tokens: str) -> str:
    """A step of one run: its time, what it moves and computes a second, what and where it is."""
    ns = max(row.ns, 1)
    rates = f"{row.bytes / ns:>7.1f} GB/s {row.flops / ns:>8.1f} GFLOP/s"
    what = f"{row.op} {row.weight}".strip()
    return (
        f"{row.backend:<9} {row.ns / 1e3:>10.1f} us {rates}  {what:<24} {tokens:<6} {row.shape}"
        f"  {row.scope}"
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
