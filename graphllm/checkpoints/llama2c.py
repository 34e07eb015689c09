"""llama2.c files as checkpoints, with the tokenizer.bin of the same directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError
from ..model.config_keys import Keys
from ..weights import NamedWeights, Weights
from ..weights.llama2c import Llama2c, read_vocabulary

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer

VOCABULARY = "tokenizer.bin"


class Llama2cCheckpoint(Llama2c):
    """An open llama2.c file as a `Checkpoint` of a llama."""

    kind, architecture, chat_template = "llama2.c version 0", "llama", None

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.config

    @property
    def has_vocabulary(self) -> bool:
        return self.path.with_name(VOCABULARY).is_file()

    def spec(self) -> ModelSpec:
        from .. import models

        return models.spec_of_model_type(self.architecture, self.path)

    def keys(self, spec: ModelSpec) -> Keys:
        keys = Keys(str(self.path), self.config, self.tensors, {})
        keys.interleaved = self.interleaved
        return keys

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        return NamedWeights(self, spec.hf_rules(config), strict=False)

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer.sentencepiece_model import from_llama2c

        path = self.path.with_name(VOCABULARY)
        if not path.is_file():
            raise ModelFileError(f"{self.path}: no tokenizer: {path} is missing")
        pieces, scores = read_vocabulary(path)
        return from_llama2c(pieces, scores.tolist(), path)
