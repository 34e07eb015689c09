"""Backends by name. `graphllm.backends.contract` defines what a backend is.

A backend is a directory or module of this package, or a third party's under the entry-point group
``graphllm.backends``, that exposes ``BACKEND``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache

from ..debug import debug
from ..errors import PlacementError
from .contract import (
    ANY,
    CONTIGUOUS,
    ROWS,
    Backend,
    Bound,
    Device,
    Header,
    Kernel,
    Operand,
    Options,
    Pack,
    Progress,
    Ring,
    Segment,
    TimestampLog,
    packed_nbytes,
)
from .order import ORDER
from .third_party import declared_backends, load_backend

__all__ = [
    "ANY",
    "CONTIGUOUS",
    "ROWS",
    "Backend",
    "Bound",
    "Device",
    "Header",
    "Kernel",
    "Operand",
    "Options",
    "Pack",
    "Progress",
    "Ring",
    "Segment",
    "TimestampLog",
    "fallbacks",
    "find",
    "names",
    "packed_nbytes",
    "select_usable",
]


@cache
def find(name: str) -> Backend:
    """Return the backend called ``name``, of this package or a third party. PlacementError."""
    if name in ORDER:
        return importlib.import_module(f"{__name__}.{name}").BACKEND
    if name in declared_backends():
        return load_backend(declared_backends()[name])
    known = ", ".join([*ORDER, *declared_backends()])
    raise PlacementError(f"unknown backend {name!r}; known: {known}")


def fallbacks(name: str) -> list[str]:
    """Return the backend ``name`` followed by the backends that run what it cannot, in order.

    After a backend of this package these are all later ones of the order; after a third party's,
    only the last.
    """
    return list(ORDER[ORDER.index(name) :]) if name in ORDER else [name, ORDER[-1]]


def select_usable(names: Sequence[str]) -> tuple[list[Backend], dict[str, str]]:
    """Return the usable backends among ``names``, and why the others are not usable, by name.

    Raises PlacementError if none is usable.
    """
    found, skipped = [], {}
    for name in names:
        backend = find(name)
        ok, reason = backend.available()
        debug(1, f"backend {name}: {'' if ok else 'not usable, '}{reason}")
        if ok:
            found.append(backend)
        else:
            skipped[name] = reason
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise PlacementError(f"no usable backend ({reasons})")
    return found, skipped


def names() -> list[str]:
    """Return all backends in order, third parties' first: who installs one wants it used."""
    return [*declared_backends(), *ORDER]
