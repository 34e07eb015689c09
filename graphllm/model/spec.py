"""Model spec: what a model file declares, and the import of user files."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError, RequestError
from ..weights.weight_rules import WeightRule
from .config import EncoderConfig, ModelConfig
from .gguf_config import gguf_weight_rules

if TYPE_CHECKING:
    from .config_keys import Keys
    from .decoder import Decoder
    from .encoder import Encoder

Rules = Sequence[WeightRule] | Callable[[Any], Sequence[WeightRule]]


def _checked(config: Callable[[Keys], Any], path: str) -> Callable[[Keys], ModelConfig]:
    """Wrap ``config`` of a model file to check its result: the type, and the rotation of encoders.

    Encoders have no LongRoPE: transformers chooses between its factors by the length of each batch,
    so that the embedding of a text would depend on the other texts.
    """

    @wraps(config)
    def read(keys: Keys) -> ModelConfig:
        found = config(keys)
        if not isinstance(found, ModelConfig):
            kind = type(found).__name__
            wanted = "a DecoderConfig or an EncoderConfig"
            raise ModelFileError(f"{path}: config(keys) returned {kind}, not {wanted}")
        ropes = [layer.rope for layer in found.layers if layer.rope is not None]
        if isinstance(found, EncoderConfig) and any(rope.long_context for rope in ropes):
            raise keys.error("rope_scaling", "rope_type 'longrope' is not supported for encoders")
        return found

    return read


_imported: set[str] = set()  # paths of user files


class _SourceLoader(SourceFileLoader):
    """Compiles the file each time.

    Python's own cache of code takes a file of the same size and second for unchanged, and would run
    the old code of a file that was just edited.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def import_file(path: str | Path) -> ModuleType:
    """Import a user's Python file as a new module.

    ModelFileError if the file does not exist; exceptions of the file itself propagate.
    """
    found = Path(path).resolve()
    loader = _SourceLoader(found.stem, str(found))
    spec = importlib.util.spec_from_file_location(found.stem, found, loader=loader)
    if spec is None or spec.loader is None or found.suffix != ".py" or not found.is_file():
        raise ModelFileError(f"{path}: not a Python file")
    _imported.add(str(found))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def user_line(error: BaseException) -> str | None:
    """Return ``file:line`` in the user's file that raised an exception, None if none did."""
    if isinstance(error, SyntaxError) and error.filename in _imported:
        return f"{error.filename}:{error.lineno}"
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{f.filename}:{f.lineno}" for f in frames if f.filename in _imported), None)


@dataclass(frozen=True)
class ModelSpec:
    """What a model file declares. Each field comes from a module variable in capitals.

    Attributes:
        name: Stem of the file name; the model's first ``model_type``.
        model: ``Model``, the class of the decoder, encoder or encoder-decoder.
        config: ``config(keys)``, which returns the `DecoderConfig` or `EncoderConfig`.
        types: ``TYPES``, further values of ``model_type`` in config.json.
        hf: ``HF``, rules for tensors of Hugging Face files whose names or layout differ from the
            model's; all other tensors keep their names. May be a function of the configuration.
        gguf: ``GGUF``, values of ``general.architecture`` in GGUF files.
        gguf_keys: ``GGUF_KEYS``, GGUF's names of configuration keys, by Hugging Face's names, in
            addition to `gguf_config.GGUF_KEYS`.
        rules: ``RULES``, rules for tensors of GGUF files in addition to those that follow from
            `config.ModuleNames`. May be a function of the configuration.
        tiny: ``TINY``, configurations of small models for tests, in the form of config.json. The
            first is complete; each other one changes some of its keys.
        oracle: ``oracle(config, weights, ids)``, a reference for `graphllm validate`; see
            `graphllm.validation.oracle`.
    """

    name: str
    model: type[Decoder] | type[Encoder]
    config: Callable[[Keys], ModelConfig]
    types: tuple[str, ...] = ()
    hf: Rules = ()
    gguf: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = ()
    tiny: Sequence[Mapping[str, Any]] = ()
    oracle: Callable[..., Any] | None = None

    @classmethod
    def from_module(cls, module: ModuleType, path: str) -> ModelSpec:
        """Read a model file's module. ModelFileError names missing or malformed variables."""
        missing = [name for name in ("Model", "config") if not hasattr(module, name)]
        if missing:
            raise ModelFileError(f"{path}: a model file needs {' and '.join(missing)}")
        name = Path(path).stem
        optional = ("hf", "types", "gguf", "gguf_keys", "rules", "tiny")
        stated = {n: getattr(module, n.upper()) for n in optional if hasattr(module, n.upper())}
        stated["types"] = (name, *stated.get("types", ()))
        tiny = stated.get("tiny", ())
        if not isinstance(tiny, Sequence) or not all(isinstance(e, Mapping) for e in tiny):
            raise ModelFileError(
                f"{path}: TINY is not a tuple of dicts (a single dict needs a comma)"
            )
        own = getattr(module, "oracle", None)
        return cls(name, module.Model, _checked(module.config, path), oracle=own, **stated)

    @property
    def is_encoder(self) -> bool:
        """Whether the model is a bidirectional encoder, not a decoder."""
        return self.model.kind == "encoder"

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder for sources and a decoder."""
        return self.model.kind == "encoder-decoder"

    @property
    def is_decoder(self) -> bool:
        """Whether the model is a decoder only."""
        return self.model.kind == "decoder"

    def check_decoder(self, where: object) -> None:
        """Raise RequestError, which begins with ``where``, if the model is an encoder only."""
        if self.is_encoder:
            raise RequestError(
                f"{where}: {self.name} is an encoder, but this needs a decoder; encoders run with "
                "graphllm embed, rerank and classify, or graphllm.load(...)"
            )

    def hf_rules(self, config: ModelConfig) -> Sequence[WeightRule]:
        """Return the weight rules for Hugging Face files."""
        rules, n = self.hf(config) if callable(self.hf) else self.hf, config.names
        mtp = range(len(config.layers), len(config.layers) + config.mtp_layers)
        unread = (WeightRule("", f"{n.model}.{n.layers}.{i}.{{*}}") for i in mtp)
        return *unread, *rules

    def gguf_rules(self, config: ModelConfig) -> Sequence[WeightRule]:
        """Return the weight rules for GGUF files."""
        own = self.rules(config) if callable(self.rules) else self.rules
        return [*own, *gguf_weight_rules(config)]
