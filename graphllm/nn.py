"""The building blocks of a model file: scoped modules whose weights are found by path."""

from __future__ import annotations

from . import ops
from .dtype import F32
from .errors import ModelFileError
from .tensor import Tensor, current_scope, scope, weight
from .weights import Weights

_FLOATS = ("f32", "f16", "bf16")


class Module:
    """Makes weight leaves under the current scope, and checks them against the weight source.

    A weight called ``w`` inside ``scope("model.layers.3.self_attn")`` is the weight
    ``model.layers.3.self_attn.w`` of the source; its dtype is whatever the source holds.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.used: set[str] = set()

    def weight(self, name: str, *shape: int, root: bool = False) -> Tensor:
        """The weight ``name`` of the current scope, or with ``root`` of none.

        ModelFileError if it is missing or misshapen.
        """
        path = name if root else f"{current_scope()}.{name}".lstrip(".")
        meta = self.weights.meta(path)
        if meta is None:
            raise ModelFileError(f"missing tensor {path!r}")
        if meta.shape != shape:
            raise ModelFileError(f"tensor {path!r} is {meta.shape}, the model wants {shape}")
        self.used.add(path)
        return weight(path, shape, meta.dtype)

    def vector(self, name: str, width: int) -> Tensor:
        """The weight ``name`` [width] of the current scope as float32; ModelFileError."""
        w = self.weight(name, width)
        if w.dtype.name not in _FLOATS:
            raise ModelFileError(f"tensor {w.name!r} is {w.dtype}, not {' or '.join(_FLOATS)}")
        return w if w.dtype == F32 else ops.cast(w, dtype=F32.name)

    def linear(self, x: Tensor, name: str, out: int, bias: bool = False) -> Tensor:
        """x [T, K] times the transposed ``name.weight`` [out, K], plus ``name.bias``: [T, out]."""
        with scope(name):
            w = self.weight("weight", out, x.shape[-1])  # type: ignore[arg-type]
            return ops.linear(x, w, self.vector("bias", out) if bias else None)

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMS norm over the last axis of x [..., D] with ``name.weight`` [D]."""
        with scope(name):
            return ops.rms_norm(x, self.vector("weight", x.shape[-1]), eps=eps)  # type: ignore[arg-type]

    def embedding(self, ids: Tensor, name: str, count: int, width: int) -> Tensor:
        """Rows ``ids`` [T] of ``name.weight`` [count, width]: [T, width]."""
        with scope(name):
            return ops.embedding(ids, self.weight("weight", count, width))
