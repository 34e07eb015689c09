"""Oracle from a Python file: a function, or a torch module.

A function `oracle(config, weights, ids)` gets the configuration (dict, as in config.json), the
weights (float32 arrays, by the names that the model file uses) and token ids (list). It returns
logits, float [T, vocab] (an encoder's hidden states [T, dim]); or a mapping with the key ``logits``
and values [T, ...] of scopes by name, as ``model.layers.0``. It may also return a torch.nn.Module,
or ``oracle`` may be one: then the module gets ids [1, T] and returns logits [1, T, vocab], and
inputs and outputs of its submodules are compared with the scopes of the same path. The folder of
the file is on `sys.path` while its code runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, RequestError
from ..formats.quantization import Blocks
from ..model.spec import ModelSpec, import_file
from ..weights import Weights
from .oracle_record import OracleRecord, PathFilter
from .torch_module import ModuleOracle, is_module

OracleFunction = Callable[[dict[str, Any], dict[str, np.ndarray], list[int]], Any]


class FunctionOracle:
    """Oracle from a user's function, or from the torch module it returns or is."""

    lines: Sequence[str] = ()

    def __init__(
        self, function: OracleFunction, config: Mapping[str, Any], weights: Weights
    ) -> None:
        self._function, self._config = function, dict(config)
        self._weights = {name: as_float32(weights, name) for name in weights.names()}
        self._module: ModuleOracle | None = None
        if is_module(function):
            file = sys.modules.get(type(function).__module__)
            self._folder = Path(getattr(file, "__file__", None) or ".").parent
            self.name = f"the module {type(function).__name__}"
            self._module = ModuleOracle(function, self.name)
            return
        path = Path(inspect.getfile(function))
        self._folder, self.name = path.parent, f"{function.__name__}() of {path.name}"

    def run(self, ids: Sequence[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        """Run the oracle; ModelFileError if the result is invalid."""
        with import_path(self._folder):
            if self._module is not None:
                return self._module.run(ids, wanted)
            found = self._function(dict(self._config), dict(self._weights), list(ids))
            if is_module(found):
                self._module = ModuleOracle(found, self.name)
                return self._module.run(ids, wanted)
        values = dict(found) if isinstance(found, Mapping) else {"logits": found}
        if "logits" not in values:
            raise ModelFileError(f"{self.name} returned no 'logits', only {', '.join(values)}")
        arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
        logits = arrays.pop("logits")
        if logits.ndim != 2 or len(logits) != len(ids):
            raise ModelFileError(
                f"{self.name} returned logits {list(logits.shape)}, "
                f"expected [{len(ids)}, vocabulary]"
            )
        return OracleRecord(logits, arrays)


def check_function(spec: ModelSpec) -> None:
    """Raise RequestError if the model takes two sequences, of which a function has one."""
    if spec.is_encoder_decoder:
        raise RequestError(
            f"oracle: {spec.name} is an encoder-decoder, which is compared with transformers only"
        )


def as_float32(weights: Weights, name: str) -> np.ndarray:
    """Return a weight as float32, in its own shape."""
    meta = weights.meta(name)
    assert meta is not None
    width = meta.shape[-1] if meta.shape else 1
    assert isinstance(width, int)
    values = Blocks(weights.raw(name), meta.dtype, width).dequantise()
    return np.asarray(values, np.float32).reshape(meta.shape)


def load_oracle(path: Path) -> OracleFunction:
    """Load ``oracle`` from a user's file; ModelFileError if there is none."""
    with import_path(path.resolve().parent):
        found = getattr(import_file(path), "oracle", None)
    if not callable(found):
        raise ModelFileError(
            f"{path}: defines neither oracle(config, weights, ids) nor a torch module oracle"
        )
    return found


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on `sys.path`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))
