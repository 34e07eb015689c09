"""What a model should compute, from somebody else: transformers, or a function in Python.

A function `oracle(config, weights, ids)` is given the configuration (a dict, as config.json has
it), the weights (float32 arrays by the names that the model file asks for) and token ids (a list).
It returns logits, float [T, vocab]; or a mapping in which ``logits`` are these, beside other values
[T, ...] by the scope that they are of, as ``model.layers.0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ModelFileError
from ..family import run_file
from ..quant import Blocks
from ..weights import Weights

Wanted = Callable[[str], bool]
Function = Callable[[dict[str, Any], dict[str, np.ndarray], list[int]], Any]


@dataclass
class Attended:
    """What an attention read and gave: [H, T, D], [Hkv, T, D], [T, H, D]; and how it was asked."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    result: np.ndarray
    options: Mapping[str, Any]


@dataclass
class Record:
    """One run over all of the ids: ``logits`` [T, vocab]; by path what modules returned and read,
    [T, ...] or, by heads, [H, T, D]; attentions by the path of their module; and which modules
    there are, with what they are called."""

    logits: np.ndarray
    returned: dict[str, np.ndarray] = field(default_factory=dict)
    read: dict[str, np.ndarray] = field(default_factory=dict)
    attended: dict[str, Attended] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # attributes of modules


class Oracle(Protocol):
    """Who knows what a model should compute. ``name``: for people; ``lines``: what loading told of
    weights that are missing or were not used; ``traced``: whether records have more than logits."""

    @property
    def name(self) -> str: ...
    @property
    def lines(self) -> Sequence[str]: ...
    @property
    def traced(self) -> bool: ...
    def run(self, ids: Sequence[int], wanted: Wanted = lambda path: False) -> Record:
        """One run; of modules whose path is ``wanted`` it keeps what they read and return."""


class FunctionOracle:
    """A function of a user's file."""

    lines: Sequence[str] = ()

    def __init__(self, function: Function, config: Mapping[str, Any], weights: Weights) -> None:
        self.name = f"{function.__name__}() of {Path(function.__code__.co_filename).name}"
        self._function, self._config = function, dict(config)
        self._weights = {name: numbers(weights, name) for name in weights.names()}
        self.traced = False

    def run(self, ids: Sequence[int], wanted: Wanted = lambda path: False) -> Record:
        """ModelFileError for a result that is not what a function has to return."""
        found = self._function(dict(self._config), dict(self._weights), list(ids))
        values = dict(found) if isinstance(found, Mapping) else {"logits": found}
        if "logits" not in values:
            raise ModelFileError(f"{self.name} returned no 'logits' beside {', '.join(values)}")
        arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
        logits = arrays.pop("logits")
        if logits.ndim != 2 or len(logits) != len(ids):
            raise ModelFileError(
                f"{self.name} returned logits {list(logits.shape)}, not [{len(ids)}, vocabulary]"
            )
        self.traced = bool(arrays)
        return Record(logits, arrays)


def numbers(weights: Weights, name: str) -> np.ndarray:
    """A weight as float32, in its own shape."""
    meta = weights.meta(name)
    assert meta is not None
    width = meta.shape[-1] if meta.shape else 1
    assert isinstance(width, int)
    values = Blocks(weights.raw(name), meta.dtype, width).dequantise()
    return np.asarray(values, np.float32).reshape(meta.shape)


def function_of(path: Path) -> Function:
    """``oracle`` of a user's file. ModelFileError."""
    found = getattr(run_file(path), "oracle", None)
    if not callable(found):
        raise ModelFileError(f"{path}: has no function oracle(config, weights, ids)")
    return found
