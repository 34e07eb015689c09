"""The recorder protocol: all that the runtime knows of profilers and other observers of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..backends import Segment
from ..compiler.plan import Plan, Step

BoundSegments = Sequence[tuple[Segment, Sequence[Step]]]  # the segments of a plan, in order


class Recorder(Protocol):
    """Runs the segments of plans and records timestamps of their steps."""

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` of ``plan`` once. ``env``: live values of the Vars."""
