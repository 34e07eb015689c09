"""Building blocks of model files: modules whose weights are found by scope and name."""

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
    """Creates weight leaves in the current scope and checks them against the weight source.

    The weight ``w`` inside ``scope("model.layers.3.self_attn")`` is the source's weight
    ``model.layers.3.self_attn.w``. Its dtype is that of the source.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = ModelWeights(weights)
        self.used: set[str] = set()
        self._input: Tensor | None = None  # of the last linears that `reordered` was called for
        self._orders: dict[bytes, Tensor] = {}  # the input in other orders of columns

    # -- weights
    def weight(self, name: str, *shape: int, root: bool = False) -> Tensor:
        """Return the weight ``name`` of the current scope, or with ``root`` of no scope.

        ModelFileError if it is missing or has another shape.
        """
        path = _path(name, root)
        meta = self.weights.meta(path)
        if meta is None:
            raise ModelFileError(f"missing tensor {path!r}{_requested_at()}")
        if meta.shape != shape:
            text = f"tensor {path!r} is {meta.shape}, the model expects {shape}"
            raise ModelFileError(f"{text}{_requested_at()}")
        self.used.add(path)
        return weight(path, shape, meta.dtype)

    def has(self, name: str) -> bool:
        """Return whether the source has the weight ``name`` of the current scope."""
        return self.weights.meta(_path(name)) is not None

    def vector(self, name: str, *shape: int, root: bool = False) -> Tensor:
        """Return the weight ``name`` of the current scope (``root``: of no scope) as float32.

        It is upcast on load, which raises ModelFileError for NaN or infinity. ModelFileError if it
        has a block format.
        """
        path = self.weight(name, *shape, root=root).name
        if not self.weights.add_vector(path):
            text = f"tensor {path!r} is {self.weights.meta(path)}, not an array of floats"
            raise ModelFileError(f"{text}{_requested_at()}")
        return weight(path, shape, F32)

    def constant(self, name: str, values: Sequence[float] | np.ndarray) -> Tensor:
        """Return a float32 weight whose values come from the model, not from a file.

        Layers with equal values share one weight if they give it the same name.
        """
        array = np.asarray(values, np.float32)
        self.weights.add(name, array)
        return weight(name, array.shape, F32)

    # -- modules
    def linear(self, x: Tensor, name: str, out: int, bias: bool | None = False) -> Tensor:
        """Linear layer: x [T, K] @ ``name.weight`` [out, K] transposed + ``name.bias``: [T, out].

        A ``bias`` of None adds the bias if the file has one.
        """
        with scope(name):
            w = self.weight("weight", out, x.shape[-1])  # type: ignore[arg-type]
            biased = self.has("bias") if bias is None else bias
            x = self.reordered(x)
            if self.weights.is_rotated(w.name):
                x = ops.hadamard(x)
            return ops.linear(x, w, self.vector("bias", out) if biased else None)

    def reordered(self, x: Tensor) -> Tensor:
        """x [T, K] with its columns in the order of the weight of the current scope.

        That is ``columns`` [K], if the source has it. Linears of one input and order share the
        result.
        """
        if not self.has("columns"):
            return x
        columns = self.weight("columns", x.shape[-1])  # type: ignore[arg-type]
        if self._input is not x:
            self._input, self._orders = x, {}
        order = self.weights.raw(columns.name).tobytes()
        if order not in self._orders:
            self._orders[order] = ops.gather_columns(x, columns)
        return self._orders[order]

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMS norm over the last axis of x [..., D], scaled by ``name.weight`` [D]."""
        with scope(name):
            return ops.rms_norm(x, self.vector("weight", x.shape[-1]), eps=eps)  # type: ignore[arg-type]

    def layer_norm(self, x: Tensor, name: str, eps: float, bias: bool = True) -> Tensor:
        """Layer norm over the last axis of x [..., D], with ``name.weight`` and ``.bias`` [D]."""
        with scope(name):
            width: int = x.shape[-1]  # type: ignore[assignment]
            b = self.vector("bias", width) if bias else None
            return ops.layer_norm(x, self.vector("weight", width), b, eps=eps)

    def embedding(self, ids: Tensor, name: str, count: int, width: int) -> Tensor:
        """Rows ``ids`` [T] of ``name.weight`` [count, width]: [T, width]."""
        with scope(name):
            return ops.embedding(ids, self.weight("weight", count, width))

    def head_linear(self, x: Tensor, name: str, out: int) -> Tensor:
        """Multiply each head of x [T, H, K] by its own matrix of ``name.weight`` [H, out, K].

        Returns [T, H, out].
        """
        with scope(name):
            w = self.weight("weight", x.shape[1], out, x.shape[2])  # type: ignore[arg-type]
            return ops.head_linear(x, w)

    def expert_linear(
        self, x: Tensor, name: str, ids: Tensor, shape: tuple[int, int], bias: bool
    ) -> Tensor:
        """Apply the linears of the selected experts.

        Args:
            x: Input of all experts of a token [T, K], or of each [T, k, K].
            name: Module with ``weight`` [E, out, K] and ``bias`` [E, out].
            ids: Selected experts [T, k].
            shape: Number of experts E and output columns out.
            bias: Whether the experts have biases.

        Returns:
            [T, k, out].
        """
        with scope(name):
            w = self.weight("weight", *shape, x.shape[-1])  # type: ignore[arg-type]
            return ops.expert_linear(x, w, ids, self.vector("bias", *shape) if bias else None)


def activation(x: Tensor, name: str) -> Tensor:
    """Apply the activation ``name`` of `config.ACTIVATIONS` to each element."""
    op, attrs = ACTIVATIONS[name]
    return ops.get(op)(x, **attrs)


def _path(name: str, root: bool = False) -> str:
    return name if root else f"{current_scope()}.{name}".lstrip(".")


def _requested_at() -> str:
    """Return the line of the model file that requested a tensor, for the end of an error."""
    return f" ({current_origin()})"
