"""The ops, one module per family; `graphllm.graph.op` says how an op is declared.

`ops.NAME(...)` makes a node of the op, for ops declared outside this package too.
"""

from __future__ import annotations

import importlib
import pkgutil

from ..graph.op import (
    Arg,
    Cost,
    Fusion,
    OpDef,
    Proposal,
    Sample,
    Users,
    expect,
    get,
    grid,
    op,
    out,
    register,
    registry,
    require,
    role,
    same,
)  # fmt: skip
from ..graph.tensor import Build

__all__ = [
    "Arg", "Cost", "Fusion", "OpDef", "Proposal", "Sample", "Users", "expect", "get", "grid", "op",
    "out", "register", "registry", "require", "role", "same",
]  # fmt: skip


def __getattr__(name: str) -> Build:
    """``ops.NAME`` for every op, those declared outside this package included."""
    if name not in registry():
        raise AttributeError(f"no op {name!r}")
    return registry()[name]


for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
# A family may be called as one of its ops is; the op is what callers mean by the name.
globals().update(registry())
