"""Debug output on standard error, controlled by GRAPHLLM_DEBUG. Each level includes the lower ones.

1: backends, plans, kernels, memory; errors with a traceback. 2: one timed line for every step of
every run. 3: the graph before and after each pass. 4: the source of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .env import debug_level
from .terminal import escape_control_lines


def debug(level: int, text: str | Callable[[], str]) -> None:
    """Print ``text`` (or the result of calling it) on standard error at this level or above."""
    if debug_level() >= level:
        shown = text if isinstance(text, str) else text()
        print(escape_control_lines(shown), file=sys.stderr)


def listing(nodes: Sequence[Any], outputs: Mapping[str, Any]) -> str:
    """Format a graph as text, one line per node.

    Args:
        nodes: all nodes (`graphllm.graph.tensor.Tensor`), sources before users.
        outputs: its outputs by name.
    """
    label = {n: f"%{i}" for i, n in enumerate(nodes)}
    lines = []
    for node in nodes:
        src = ", ".join("-" if s is None else label[s] for s in node.src)
        attrs = "".join(f" {k}={v}" for k, v in node.attrs.items())
        lines.append(f"{label[node]} = {node.op}({src}){attrs} : {node.meta}  # {node.scope}")
    lines += [f"{name} -> {label[node]}" for name, node in outputs.items()]
    return "\n".join(lines)
