"""GGUF files as checkpoints: configuration, weights, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, quote
from ..model.gguf_config import gguf_keys
from ..weights import NamedWeights, Weights
from ..weights.gguf import GgufFile
from ..weights.gguf_format import Cursor, read_header
from ..weights.mapped_file import MappedFile

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.config_keys import Keys
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer


POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # by <architecture>.pooling_type


def stated_pooling(metadata: Mapping[str, Any], where: object) -> str | None:
    """Return the pooling that a GGUF file states, a name of `ops.pooling.POOLINGS`; None for none.

    ConfigError, whose text begins with ``where``: it is not supported.
    """
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(key, 0)
    if kind == 0:
        return None
    if kind not in POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in POOLINGS.items())
        raise ConfigError(f"{where}: {key} = {quote(kind)} is not supported, only {known}")
    return POOLINGS[kind]


def leading_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata before the vocabulary, whose arrays take longer to read."""
    file = MappedFile(path, data=False)
    cursor, found = Cursor(file.view(), path), {}
    for _ in range(read_header(cursor)[2]):
        key = cursor.string()
        if key == "tokenizer.ggml.tokens" and "general.architecture" in found:
            break
        found[key] = cursor.value()
    del cursor
    file.close()
    return found


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
