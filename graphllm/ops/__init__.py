"""Ops, one module per family; see `graphllm.graph.op` for how an op is declared.

`ops.NAME(...)` returns a node of the op, also for ops declared outside this package.
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
    """Return the op ``name``, also if it is declared outside this package."""
    if name not in registry():
        raise AttributeError(f"no op {name!r}")
    return registry()[name]


for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
# A module may have the name of one of its ops; as an attribute the op takes precedence.
globals().update(registry())
