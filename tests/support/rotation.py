"""The part of the largest tests that a run takes: another part every day, so that all have run
after a few days.

`GRAPHLLM_TEST_PART` chooses it: a number, by default that of the day, or "all". The tests' header
prints it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TypeVar

Item = TypeVar("Item")

ALL = "all"
# Set here, so that all processes of a run that goes on past midnight take the same part.
PART = os.environ.setdefault(
    "GRAPHLLM_TEST_PART", str(datetime.now(timezone.utc).date().toordinal())
)


def is_taken(number: int, parts: int, shift: int = 0) -> bool:
    """Whether item ``number`` of a sequence is in today's part; ``shift``: days to look ahead."""
    return PART == ALL or number % parts == (int(PART) + shift) % parts


def rotated(items: Sequence[Item], parts: int, shift: int = 0) -> list[Item]:
    """Return today's part of ``items``; ``shift``: days to look ahead."""
    return [item for number, item in enumerate(items) if is_taken(number, parts, shift)]
