"""What the runtime knows of profiling: a protocol for objects that run plans and record times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..backends import Segment
from ..compiler.plan import Plan, Step

BoundSegments = Sequence[tuple[Segment, Sequence[Step]]]  # of a plan, in order


class Recorder(Protocol):
    """Runs the segments of a plan, and records when each of their steps ends."""

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` of ``plan`` once, with timestamps; ``env``: values of the Vars."""
