"""False alarms of `graphllm compare` on this machine, and detection of a slowed kernel.

    python benchmarks/compare_error_rates.py demo --comparisons 20 -r 5 --with "-n 64 -t 2"
    python benchmarks/compare_error_rates.py demo --comparisons 5 -r 5 --with "-t 2" --slow gated

Every run is a process that profiles the model. A comparison has ``-r`` interleaved pairs of runs,
as in `graphllm compare --against`; each pair is also compared alone, one file per side. Both sides
are identical, so every row called slower or faster is a false alarm. With ``--slow OP`` every
thread of side B waits at the end of its part of such a step for ``--share`` of the time the part
took. ``--keep FOLDER`` keeps the profiles and resumes from existing ones.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from graphllm.backends import find
from graphllm.backends.cpu.runtime.atomics import clock_ns, pause
from graphllm.backends.cpu.runtime.device import KernelContext, Launch
from graphllm.backends.cpu.runtime.jit import args, i64s, kernel
from graphllm.cli import main as graphllm
from graphllm.profiler.compare.comparison import WALL, Comparison, compare

LINE = 8  # 8-byte words per cache line


@kernel
def begin(p, thread, threads):
    """Record when each thread begins."""
    (notes,) = args(p, 1)
    i64s(notes)[LINE * thread] = clock_ns()


@kernel
def linger(p, thread, threads):
    """Wait for a share of the time since `begin`, given in thousandths."""
    notes, thousandths = args(p, 2)
    now = clock_ns()
    end = now + (now - i64s(notes)[LINE * thread]) * i64s(thousandths)[0] // 1000
    while clock_ns() < end:
        pause()


def slow_down(op: str, share: float) -> None:
    """Make the CPU kernels for ``op`` take ``share`` longer."""

    def slowed(build):
        def slower(ctx: KernelContext) -> list[Launch]:
            made = build(ctx)
            first, *rest = [made] if isinstance(made, Launch) else made
            notes = ctx.keep(np.zeros(LINE * ctx.threads, np.int64))
            thousandths = ctx.keep(np.array([round(1000 * share)], np.int64))
            last = Launch(linger, [notes, thousandths], overlaps_previous=True)
            return [Launch(begin, [notes]), replace(first, overlaps_previous=True), *rest, last]

        return slower

    kernels = find("cpu").kernels
    kernels[op] = [replace(k, name=f"slowed_{k.name}", build=slowed(k.build)) for k in kernels[op]]


def profile(words: Sequence[str], path: Path, slow: Sequence[str] = ()) -> None:
    """Profile in a separate process. ``slow``: arguments of `slow_down`."""
    if not path.exists():
        own = [sys.executable, __file__, "--run", *slow, "--", *words, "-o", str(path)]
        subprocess.run(own, check=True, stdout=subprocess.DEVNULL)


def run(words: list[str]) -> None:
    """Run in that process; ``words``: ``[op share] -- arguments of profile``."""
    at = words.index("--")
    if at:
        slow_down(words[0], float(words[1]))
    sys.argv[1:] = ["profile", *words[at + 1 :]]
    graphllm()


class Score:
    """Counts of verdicts over comparisons of one kind."""

    def __init__(self, kind: str, slow: str | None) -> None:
        self.kind, self.slow = kind, slow
        self.count = self.alarms = self.silent = 0
        self.hits: list[float] = []
        self.said: Counter[str] = Counter()

    def add(self, found: Comparison) -> None:
        (decode,) = (phase for phase in found.phases if phase.name == "decode")
        alarms = [(name, row) for name, row in found.changed if not self._expected(row.label)]
        self.count += 1
        self.alarms += bool(alarms)
        self.silent += bool(decode.hidden)
        self.said.update(f"{name} {row.label} {row.change:+.0%}" for name, row in alarms)
        hit = [row.change for row in decode.rows if row.changed and self._slowed(row.label)]
        self.hits += hit[:1]

    def _slowed(self, label: str) -> bool:
        return label.split()[0] == self.slow

    def _expected(self, label: str) -> bool:
        """Whether a verdict is expected: the slowed op, and the wall time."""
        return self.slow is not None and (label == WALL or self._slowed(label))

    def __str__(self) -> str:
        text = f"{self.kind}: false alarms in {self.alarms} of {self.count}"
        if self.slow:
            by = f" by {np.mean(self.hits):+.0%}" if self.hits else ""
            text += f"; decode {self.slow} slower{by} in {len(self.hits)}"
        if self.silent:
            text += f"; no verdicts on decode in {self.silent}, the machine was busy"
        return text + (f"; {dict(self.said)}" if self.said else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--with", dest="flags", default="", help="Flags of profile.")
    parser.add_argument("--slow", metavar="OP", help="Slow down side B's kernels of this op.")
    parser.add_argument("--share", type=float, default=0.2, help="Slowdown, as a share.")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="Folder to keep and reuse profiles."
    )
    asked = parser.parse_args()
    words = [asked.model, *shlex.split(asked.flags)]
    slow = [asked.slow, str(asked.share)] if asked.slow else []
    turns, files = Score("interleaved", asked.slow), Score("one file per side", asked.slow)
    with TemporaryDirectory() as folder:
        kept = asked.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        for comparison in range(asked.comparisons):
            pairs = []
            for turn in range(asked.repetitions):
                pair = [kept / f"{comparison}-{turn}-{side}.json" for side in "AB"]
                for side in (0, 1) if turn % 2 else (1, 0):
                    profile(words, pair[side], slow if side else ())
                files.add(compare(*pair))
                pairs.append(pair)
            turns.add(compare(*([pair[side] for pair in pairs] for side in (0, 1))))
            print(f"{comparison + 1} of {asked.comparisons}\n  {turns}\n  {files}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2:])
    else:
        main()
