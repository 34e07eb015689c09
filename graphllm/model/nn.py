"""The building blocks of a model file: scoped modules whose weights are found by path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..errors import ModelFileError
from ..graph.dtype import F32
from ..graph.scopes import current_origin
from ..graph.tensor import Tensor, current_scope, scope, weight
from ..weights import ModelWeights, Weights
from .config import ACTIVATIONS


class Module:
    """Makes weight leaves under the current scope, and checks them against the weight source.

    A weight called ``w`` inside ``scope("model.layers.3.self_attn")`` is the weight
    ``model.layers.3.self_attn.w`` of the source; its dtype is whatever the source holds.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = ModelWeights(weights)
        self.used: set[str] = set()

    # -- weights
    def weight(self, name: str, *shape: int, root: bool = False) -> Tensor:
        """The weight ``name`` of the current scope, or with ``root`` of none.

        ModelFileError if it is missing or misshapen.
        """
        path = _path(name, root)
        meta = self.weights.meta(path)
        if meta is None:
            raise ModelFileError(f"missing tensor {path!r}{_wanted()}")
        if meta.shape != shape:
            text = f"tensor {path!r} is {meta.shape}, the model wants {shape}"
            raise ModelFileError(f"{text}{_wanted()}")
        self.used.add(path)
        return weight(path, shape, meta.dtype)

    def has(self, name: str) -> bool:
        """Whether the source has the weight ``name`` of the current scope."""
        return self.weights.meta(_path(name)) is not None

    def vector(self, name: str, *shape: int, root: bool = False) -> Tensor:
        """The weight ``name`` of the current scope, or with ``root`` of none, as float32.

        It is converted while it is loaded, which raises ModelFileError if it holds NaN or infinity.
        ModelFileError if it is in blocks.
        """
        path = self.weight(name, *shape, root=root).name
        if not self.weights.add_vector(path):
            text = f"tensor {path!r} is {self.weights.meta(path)}, no array of floats"
            raise ModelFileError(f"{text}{_wanted()}")
        return weight(path, shape, F32)

    def constant(self, name: str, values: Sequence[float] | np.ndarray) -> Tensor:
        """Numbers that the model computes with and no file holds, as a float32 weight ``name``.

        Equal ones of several layers are one: give the same name.
        """
        array = np.asarray(values, np.float32)
        self.weights.add(name, array)
        return weight(name, array.shape, F32)

    # -- modules
    def linear(self, x: Tensor, name: str, out: int, bias: bool | None = False) -> Tensor:
        """x [T, K] times the transposed ``name.weight`` [out, K], plus ``name.bias``: [T, out].

        ``bias`` None: if the file has one.
        """
        with scope(name):
            w = self.weight("weight", out, x.shape[-1])  # type: ignore[arg-type]
            biased = self.has("bias") if bias is None else bias
            return ops.linear(x, w, self.vector("bias", out) if biased else None)

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMS norm over the last axis of x [..., D] with ``name.weight`` [D]."""
        with scope(name):
            return ops.rms_norm(x, self.vector("weight", x.shape[-1]), eps=eps)  # type: ignore[arg-type]

    def layer_norm(self, x: Tensor, name: str, eps: float, bias: bool = True) -> Tensor:
        """Layer norm over the last axis of x [..., D] with ``name.weight`` and ``.bias`` [D]."""
        with scope(name):
            width: int = x.shape[-1]  # type: ignore[assignment]
            b = self.vector("bias", width) if bias else None
            return ops.layer_norm(x, self.vector("weight", width), b, eps=eps)

    def embedding(self, ids: Tensor, name: str, count: int, width: int) -> Tensor:
        """Rows ``ids`` [T] of ``name.weight`` [count, width]: [T, width]."""
        with scope(name):
            return ops.embedding(ids, self.weight("weight", count, width))

    def head_linear(self, x: Tensor, name: str, out: int) -> Tensor:
        """Heads x [T, H, K], each by its own matrix of ``name.weight`` [H, out, K]: [T, H, out]."""
        with scope(name):
            w = self.weight("weight", x.shape[1], out, x.shape[2])  # type: ignore[arg-type]
            return ops.head_linear(x, w)

    def experts(self, x: Tensor, name: str, ids: Tensor, of: tuple[int, int], bias: bool) -> Tensor:
        """x [T, K] or [T, k, K] through the experts ``ids`` [T, k]: [T, k, out].

        Of ``name.weight`` [E, out, K] and ``name.bias`` [E, out]; ``of``: E and out.
        """
        with scope(name):
            w = self.weight("weight", *of, x.shape[-1])  # type: ignore[arg-type]
            return ops.expert_linear(x, w, ids, self.vector("bias", *of) if bias else None)


def activation(x: Tensor, name: str) -> Tensor:
    """``name`` of `config.ACTIVATIONS` on each element."""
    op, attrs = ACTIVATIONS[name]
    return ops.get(op)(x, **attrs)


def _path(name: str, root: bool = False) -> str:
    return name if root else f"{current_scope()}.{name}".lstrip(".")


def _wanted() -> str:
    """The line of the model file that wants a tensor, to end a message with."""
    return f" ({current_origin()})"
