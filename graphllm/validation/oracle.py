"""What a model should compute, from an independent source: transformers, or a Python file.

A function `oracle(config, weights, ids)` is given the configuration (a dict, as config.json has
it), the weights (float32 arrays by the names that the model file asks for) and token ids (a list).
It returns logits, float [T, vocab]; or a mapping in which ``logits`` are these, beside other values
[T, ...] by the scope that they are of, as ``model.layers.0``. It may also return a torch.nn.Module,
or ``oracle`` may be one: then the module gets the ids [1, T] and returns logits [1, T, vocab], and
what its submodules read and return is compared, by their paths. While the file is run, and while
its code is called, its folder is on `sys.path`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError
from ..formats.quantization import Blocks
from ..model.spec import import_file
from ..weights import Weights
from .oracle_record import OracleRecord, PathFilter
from .torch_module import ModuleOracle, is_module

OracleFunction = Callable[[dict[str, Any], dict[str, np.ndarray], list[int]], Any]


class FunctionOracle:
    """A function of a user's file; or a torch module, which it returns or which stands for it."""

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
        """ModelFileError for a result that is not what a function has to return."""
        with import_path(self._folder):
            if self._module is not None:
                return self._module.run(ids, wanted)
            found = self._function(dict(self._config), dict(self._weights), list(ids))
            if is_module(found):
                self._module = ModuleOracle(found, self.name)
                return self._module.run(ids, wanted)
        values = dict(found) if isinstance(found, Mapping) else {"logits": found}
        if "logits" not in values:
            raise ModelFileError(f"{self.name} returned no 'logits' beside {', '.join(values)}")
        arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
        logits = arrays.pop("logits")
        if logits.ndim != 2 or len(logits) != len(ids):
            raise ModelFileError(
                f"{self.name} returned logits {list(logits.shape)}, not [{len(ids)}, vocabulary]"
            )
        return OracleRecord(logits, arrays)


def as_float32(weights: Weights, name: str) -> np.ndarray:
    """A weight as float32, in its own shape."""
    meta = weights.meta(name)
    assert meta is not None
    width = meta.shape[-1] if meta.shape else 1
    assert isinstance(width, int)
    values = Blocks(weights.raw(name), meta.dtype, width).dequantise()
    return np.asarray(values, np.float32).reshape(meta.shape)


def load_oracle(path: Path) -> OracleFunction:
    """``oracle`` of a user's file. ModelFileError."""
    with import_path(path.resolve().parent):
        found = getattr(import_file(path), "oracle", None)
    if not callable(found):
        raise ModelFileError(
            f"{path}: has no function oracle(config, weights, ids), and no torch module oracle"
        )
    return found


@contextmanager
def import_path(folder: Path) -> Iterator[None]:
    """Look for imports in ``folder`` first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))
