"""Hugging Face directories as checkpoints: config.json, safetensors, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, ModelFileError, quote
from ..model.config_keys import Keys
from ..weights import NamedWeights, Weights
from ..weights.mapped_file import TensorInfo
from ..weights.safetensors import Safetensors
from ..weights.strict_json import json_object
from ..weights.weight_rules import UNUSED_BUFFERS, optional_prefix
from . import published

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer

_MAX_BYTES = 16 << 20  # of a JSON file; also of a comparison of weights
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "ice_text.model", "spiece.model",
    "sentencepiece.bpe.model", "source.spm",
)  # fmt: skip
_QUANT_METHODS = ("mxfp4", *published.METHODS)  # supported values of quant_method


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object. ModelFileError if it is missing or malformed."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFileError(f"{path}: more than {_MAX_BYTES >> 20} MB of JSON")
        return json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None


class HfCheckpoint:
    """An open Hugging Face directory as a `Checkpoint`.

    Args:
        path: The directory.
        data: Whether tensors will be read. If not, only headers must exist.
        file: The ``.safetensors`` file to read in place of the usual names.

    Raises:
        ModelFileError: A file is missing or malformed.
        ConfigError: The weights are quantised by an unsupported method.
    """

    kind = "Hugging Face directory"

    def __init__(self, path: Path, data: bool = True, file: Path | None = None) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path}: is a directory without a config.json")
        self.metadata = read_json(path / "config.json")
        pack = self._packing()
        stored = Safetensors(file or path, data)
        self.file = pack(stored) if pack else stored
        self._data = data

    def _packing(self) -> Callable[[Safetensors], published.PackedTensors] | None:
        """Read quantization_config; return what repacks the tensors, None if nothing needs to."""
        quantised = self.metadata.get("quantization_config")
        if quantised is None:
            return None
        config = self.path / "config.json"
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if method not in _QUANT_METHODS:
            text = f"weights quantised by {quote(method)} are not supported"
            raise ConfigError(f"{config}: {text}, only by {', '.join(_QUANT_METHODS)}")
        if method not in published.METHODS:
            return None
        return published.scheme(method, f"{config}: quantization_config", quantised)

    @property
    def architecture(self) -> str:
        """``model_type`` of config.json. ModelFileError if it is missing."""
        name = self.metadata.get("model_type")
        if not isinstance(name, str) or not name:
            raise ModelFileError(
                f"{self.path / 'config.json'}: model_type is missing or not a string"
            )
        return name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.file.tensors

    @property
    def has_vocabulary(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    def spec(self) -> ModelSpec:
        from .. import models

        return models.spec_of_model_type(self.architecture, self.path / "config.json")

    def keys(self, spec: ModelSpec) -> Keys:
        return Keys(str(self.path / "config.json"), self.metadata, self.tensors, {})

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        """See `Checkpoint.weights`. ModelFileError if a tied weight is not the embedding."""
        rules, n = (*UNUSED_BUFFERS, *spec.hf_rules(config)), config.names
        weights = NamedWeights(self.file, rules, strict=False)
        unprefixed = spec.is_decoder and n.model and f"{n.embed}.weight" in self.tensors
        if unprefixed and f"{n.model}.{n.embed}.weight" not in weights.names():
            if spec.hf:
                raise ModelFileError(
                    f"{self.path}: tensor names of {spec.name} without the prefix {quote(n.model)} "
                    "are not supported"
                )
            rules = (*rules, *optional_prefix(n.model, n.head))
            weights = NamedWeights(self.file, rules, strict=False)
        embedding = f"{n.model}.{n.embed}.weight".lstrip(".")
        reasons = dict.fromkeys(getattr(config, "embed_copies", ()), "the model shares it")
        if config.tied:
            reasons[f"{n.head}.weight"] = "tie_word_embeddings is true"
        for name in sorted(reasons.keys() & {*weights.names()}):
            if self._data and not self._equal(weights, name, embedding):
                raise ModelFileError(
                    f"{self.path}: {quote(name)} differs from {quote(embedding)}, but "
                    f"{reasons[name]}"
                )
            weights.drop(name)
        return weights

    def _equal(self, weights: Weights, a: str, b: str) -> bool:
        """Return whether two weights have the same bytes."""
        if weights.meta(a) != weights.meta(b):
            return False
        left, right = weights.raw(a), weights.raw(b)
        step = max(1, _MAX_BYTES // max(1, left.shape[1]))
        at = range(0, len(left), step)
        return all(np.array_equal(left[i : i + step], right[i : i + step]) for i in at)

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer import from_directory

        return from_directory(self.path, self.metadata)

    def eos_token_ids(self, vocab: int) -> frozenset[int]:
        """Return the EOS ids below ``vocab`` that the directory's configurations state.

        Its tokenizer may know more. ModelFileError if they are malformed.
        """
        from ..tokenizer.tokenizer_config import TokenizerDirectory

        return TokenizerDirectory(self.path, self.metadata).eos_ids(vocab)

    @cached_property
    def chat_template(self) -> str | None:
        from ..chat import directory_template

        return directory_template(self.path)

    def close(self) -> None:
        self.file.close()
