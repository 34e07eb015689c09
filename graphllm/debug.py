"""The GRAPHLLM_DEBUG ladder: each rung says what those below it say, and more.

1: backends, plans, kernels, memory; errors with a traceback. 2: a line for every step of every run,
which is timed. 3: the graph before and after each pass. 4: the source of kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .terminal import escape_control_lines


def debug_level() -> int:
    """The level asked for in the environment, 0 when there is none."""
    value = os.environ.get("GRAPHLLM_DEBUG", "")
    return int(value) if value.isdigit() else 0


def debug(level: int, text: str | Callable[[], str]) -> None:
    """Print ``text``, or what it gives, on standard error at this level or above."""
    if debug_level() >= level:
        print(escape_control_lines(text if isinstance(text, str) else text()), file=sys.stderr)
