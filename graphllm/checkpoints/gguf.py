"""GGUF files as checkpoints: configuration, weights, tokenizer, chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model.gguf_config import gguf_keys
from ..weights import NamedWeights, Weights
from ..weights.gguf import GgufFile

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.config_keys import Keys
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer


class GgufCheckpoint(GgufFile):
    """An open GGUF file as a `Checkpoint`."""

    has_vocabulary = True  # a GGUF model without a vocabulary is malformed

    def spec(self) -> ModelSpec:
        from .. import models

        return models.spec_of_architecture(self.architecture, self.path)

    def keys(self, spec: ModelSpec) -> Keys:
        return gguf_keys(self, spec.gguf_keys)

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        return NamedWeights(self, spec.gguf_rules(config), strict=True)

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer import from_gguf

        return from_gguf(self)

    @property
    def chat_template(self) -> str | None:
        return self.value("tokenizer.chat_template", str) or None
