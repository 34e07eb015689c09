"""Writes docs/ops.md: which backend runs which op, on which dtypes.

    python docs/make_ops_table.py

Nothing is listed by hand: the ops' own samples are offered to each backend, as the tests do.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from cases import Group, groups  # noqa: E402

from graphllm import backends, ops  # noqa: E402
from graphllm.backends import Backend, Kernel, Options  # noqa: E402
from graphllm.backends.order import ORDER  # noqa: E402
from graphllm.ops import OpDef  # noqa: E402

HEAD = """# Ops and backends

Made by `python docs/make_ops_table.py` from the ops' declarations and the backends' registrations.
The dtypes are those of the operands in the order of the call, as far as the samples of the
declaration go; a backend takes all of them where it says *all*, and where it refuses some of them
the next backend runs the op. The reference is a NumPy formula for each op.
"""


def dtypes(op: OpDef, samples: list[Group]) -> str:
    """The dtypes that each operand has in the samples."""
    seen: dict[str, set[str]] = {}
    for group in samples:
        for index, arg in enumerate(group.args):
            if arg is not None:
                seen.setdefault(op.operand(index), set()).add(arg.dtype.name)
    return "; ".join(f"{name}: {', '.join(sorted(kinds))}" for name, kinds in seen.items())


def support(backend: Backend, samples: list[Group]) -> str:
    """What the backend takes of the contiguous samples, in words."""
    answers = [backend.select(g.node, Options()) for g in samples if g.contiguous]
    refused = [a for a in answers if not isinstance(a, Kernel)]
    if not refused:
        return "all"
    return "no" if len(refused) == len(answers) else "not where " + "; ".join(sorted({*refused}))


def table() -> str:
    """The page."""
    found = [backends.find(name) for name in ORDER]
    columns = ["op", "what it is", "dtypes", *ORDER]
    lines = [HEAD, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, op in sorted(ops.registry().items()):
        samples = groups(op)
        told = op.fusion.build if op.fusion else op.reference
        text = " ".join((told.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
        cells = [f"`{name}`", text, dtypes(op, samples), *(support(b, samples) for b in found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "ops.md").write_text(table(), "utf-8")
