"""Time a function and its peers in pairs: ours, peer, ours, next peer, ..., in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

_PAUSE_S = 0.2  # before each run, so that the threads of the run before it sleep


@dataclass
class Paired:
    """Seconds of a function and of a peer, a pair for each round."""

    own: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """How much faster the function is, in each round."""
        return [b / a for a, b in zip(self.own, self.peer)]


def seconds_of(run: Callable[[], Any]) -> float:
    """Run once, after a pause, and return the seconds that it takes."""
    time.sleep(_PAUSE_S)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    own: Callable[[], Any], peers: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, Paired]:
    """Return the seconds of each pair; a first round warms up and is left out."""
    found = {name: Paired([], []) for name in peers}
    for _ in range(rounds + 1):
        for name, run in peers.items():
            found[name].own.append(seconds_of(own))
            found[name].peer.append(seconds_of(run))
    return {name: Paired(each.own[1:], each.peer[1:]) for name, each in found.items()}


def report(name: str, pairs: Paired, work: float, unit: str, comment: str = "") -> None:
    """Print the median rates of a pair, and the median, smallest and largest of its ratios."""
    own, peer, ratios = work / median(pairs.own), work / median(pairs.peer), pairs.ratios
    print(
        f"{name:<24} {own:9.1f} against {peer:9.1f} {unit}   "
        f"{median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})   {comment}",
        flush=True,
    )
