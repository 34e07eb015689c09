"""Dense modules of sentence-transformers directories: linear layers over pooled vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError, ModelFileError, quote
from ..formats.quantization import dequantise
from ..weights.safetensors import Safetensors
from .json_values import JsonValues

_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
}


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out]; zeros if it has none.
        activation: elementwise function.
    """

    weight: np.ndarray
    bias: np.ndarray
    activation: Callable[[np.ndarray], np.ndarray]

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """Apply the layer to one vector [in], so that a result does not depend on a batch."""
        return self.activation(self.weight @ vector + self.bias)


def read_dense(folder: Path) -> Dense:
    """Read config.json and model.safetensors of a Dense module.

    Raises:
        ModelFileError: a file is missing or malformed, or a tensor does not fit the configuration.
        ConfigError: a setting is not supported.
    """
    values = JsonValues(folder / "config.json")
    columns, rows = values.get("in_features", int), values.get("out_features", int)
    biased = values.get("bias", bool)
    name = (values.get("activation_function", str) or "torch.nn.Tanh").rpartition(".")[2]
    values.finish()
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{values.path}: activation_function {quote(name)} is not one of {known}")
    shapes: dict[str, tuple[int | None, ...]] = {"linear.weight": (rows, columns)}
    if biased is not False:
        shapes["linear.bias"] = (rows,)
    with Safetensors(folder / "model.safetensors") as file:
        if unknown := sorted(file.tensors.keys() - shapes.keys()):
            raise ModelFileError(f"{file.path}: unexpected tensor {quote(unknown[0])}")
        arrays = {tensor: _read(file, tensor, shape) for tensor, shape in shapes.items()}
    bias = arrays.get("linear.bias", np.zeros(len(arrays["linear.weight"]), np.float32))
    return Dense(arrays["linear.weight"], bias, _ACTIVATIONS[name])


def _read(file: Safetensors, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """Return a tensor as float32. ModelFileError: it is missing or has another shape."""
    if name not in file.tensors:
        raise ModelFileError(f"{file.path}: missing tensor {quote(name)}")
    info = file.readable(name)
    if tuple(info.shape) != shape:
        raise ModelFileError(
            f"{file.path}: {name} is {tuple(info.shape)}, config.json says {shape}"
        )
    return dequantise(file.raw(name), info.dtype).reshape(info.shape)
