"""What a model file says of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import ModelFileError
from .weights.gguf_model import LLAMA_RULES
from .weights.rules import WeightRule

if TYPE_CHECKING:
    from .config import DecoderConfig
    from .decoder import Decoder
    from .weights.keys import Keys

Rules = Sequence[WeightRule] | Callable[["DecoderConfig"], Sequence[WeightRule]]


@dataclass(frozen=True)
class Family:
    """What a model file says, by the names that it says it under, in capitals:

    HF: rules for tensors of Hugging Face files whose names or rows are not the model's own; other
    tensors keep their names. TYPES: other ``model_type`` values than the file's name. GGUF: the
    architectures of GGUF files; GGUF_KEYS: their keys, by Hugging Face's names, beside the common
    ones; RULES: what GGUF calls the weights (llama's by default). HF and RULES may be functions of
    the configuration. TINY: configurations of small models, as config.json states them, from which
    tests are made; the first is complete, others change some of its keys.
    """

    name: str
    model: type[Decoder]
    config: Callable[[Keys], DecoderConfig]
    types: tuple[str, ...] = ()
    hf: Rules = ()
    gguf: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = LLAMA_RULES
    tiny: Sequence[Mapping[str, Any]] = ()

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
        return cls(name, module.Model, module.config, **stated)

    def hf_rules(self, config: DecoderConfig) -> Sequence[WeightRule]:
        """Those of Hugging Face files."""
        rules, n = self.hf(config) if callable(self.hf) else self.hf, config.names
        further = range(len(config.layers), len(config.layers) + config.further)
        unread = (WeightRule("", f"{n.model}.{n.layers}.{i}.{{*}}") for i in further)
        return *unread, *rules

    def gguf_rules(self, config: DecoderConfig) -> Sequence[WeightRule]:
        """Those of GGUF files."""
        return self.rules(config) if callable(self.rules) else self.rules
