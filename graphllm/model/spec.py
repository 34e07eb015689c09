"""What a model file says of its family."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError
from ..weights.weight_rules import WeightRule
from .config import DecoderConfig
from .gguf_config import gguf_names

if TYPE_CHECKING:
    from .config_keys import Keys
    from .decoder import Decoder

Rules = Sequence[WeightRule] | Callable[["DecoderConfig"], Sequence[WeightRule]]


def _checked(config: Callable[[Keys], Any], path: str) -> Callable[[Keys], DecoderConfig]:
    """``config`` of a model file, which may have forgotten to return what it made."""

    @wraps(config)
    def read(keys: Keys) -> DecoderConfig:
        found = config(keys)
        if not isinstance(found, DecoderConfig):
            kind = type(found).__name__
            raise ModelFileError(f"{path}: config(keys) returned {kind}, no DecoderConfig")
        return found

    return read


_run: set[str] = set()  # the files of users that were run


def run_file(path: str | Path) -> ModuleType:
    """A user's Python file as a module, run anew. ModelFileError where there is none; what it
    raises itself is passed on."""
    found = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(found.stem, found)
    if spec is None or spec.loader is None or not found.is_file():
        raise ModelFileError(f"{path}: is not a Python file")
    _run.add(str(found))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user_line(error: BaseException) -> str | None:
    """``file:line`` of the user's file that an exception comes from, None if from none."""
    if isinstance(error, SyntaxError) and error.filename in _run:
        return f"{error.filename}:{error.lineno}"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{f.filename}:{f.lineno}" for f in frames if f.filename in _run), None)


@dataclass(frozen=True)
class Family:
    """What a model file says, by the names that it says it under, in capitals:

    HF: rules for tensors of Hugging Face files whose names or rows are not the model's own; other
    tensors keep their names. TYPES: other ``model_type`` values than the file's name. GGUF: the
    architectures of GGUF files; GGUF_KEYS: their keys, by Hugging Face's names, beside the common
    ones; RULES: GGUF's names of weights, beside those that follow from `config.Names`. HF and RULES
    may be functions of the configuration. TINY: configurations of small models, as config.json
    states them, from which tests are made; the first is complete, others change some of its keys.
    And one that is a function: ``oracle(config, weights, ids)``, by which `graphllm validate` knows
    what the model should compute, see `graphllm.validation.oracle`.
    """

    name: str
    model: type[Decoder]
    config: Callable[[Keys], DecoderConfig]
    types: tuple[str, ...] = ()
    hf: Rules = ()
    gguf: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = ()
    tiny: Sequence[Mapping[str, Any]] = ()
    oracle: Callable[..., Any] | None = None

    @classmethod
    def of(cls, module: ModuleType, path: str) -> Family:
        """ModelFileError names what the module lacks."""
        missing = [name for name in ("Model", "config") if not hasattr(module, name)]
        if missing:
            raise ModelFileError(f"{path}: a model file needs {' and '.join(missing)}")
        name = Path(path).stem
        optional = ("hf", "types", "gguf", "gguf_keys", "rules", "tiny")
        stated = {n: getattr(module, n.upper()) for n in optional if hasattr(module, n.upper())}
        stated["types"] = (name, *stated.get("types", ()))
        tiny = stated.get("tiny", ())
        if not isinstance(tiny, Sequence) or not all(isinstance(e, Mapping) for e in tiny):
            raise ModelFileError(f"{path}: TINY is no tuple of dicts (one alone needs a comma)")
        own = getattr(module, "oracle", None)
        return cls(name, module.Model, _checked(module.config, path), oracle=own, **stated)

    def hf_rules(self, config: DecoderConfig) -> Sequence[WeightRule]:
        """Those of Hugging Face files."""
        rules, n = self.hf(config) if callable(self.hf) else self.hf, config.names
        further = range(len(config.layers), len(config.layers) + config.further)
        unread = (WeightRule("", f"{n.model}.{n.layers}.{i}.{{*}}") for i in further)
        return *unread, *rules

    def gguf_rules(self, config: DecoderConfig) -> Sequence[WeightRule]:
        """Those of GGUF files."""
        own = self.rules(config) if callable(self.rules) else self.rules
        return [*own, *gguf_names(config)]
