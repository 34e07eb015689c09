"""Kernels with a planted fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphllm.backends import find
from graphllm.graph.tensor import Meta


def inject_fault(monkeypatch, op: str, scope: str, operand: str, backend: str = "cpu",
                 factor: float = 1.01) -> None:  # fmt: skip
    """Scale weight ``operand`` of a backend's kernel for ``op`` by ``factor`` in scopes that begin
    with ``scope``."""
    kernels = find(backend).kernels[op]
    honest = next(k for k in reversed(kernels) if "f32" in k.dtypes.get(operand, ("f32",)))
    pack = honest.pack.get(operand)

    def larger(raw: np.ndarray, meta: Meta) -> np.ndarray:
        wrong = (raw.view("<f4") * np.float32(factor)).view(np.uint8)
        return pack(wrong, meta) if pack else wrong

    def when(node, options):
        if not any(s.startswith(scope) for s in node.scopes):
            return "elsewhere"
        return honest.when(node, options) if honest.when else None

    wrong = replace(honest, name="faulty", pack={**honest.pack, operand: larger}, when=when)
    monkeypatch.setitem(find(backend).kernels, op, [wrong, *kernels])
