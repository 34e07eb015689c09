"""From a llama2.c file, and the vocabulary beside it, to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ModelFileError
from ..model.config_keys import Keys
from ..weights import NamedWeights, Weights
from ..weights.llama2c import Llama2c, read_vocabulary

if TYPE_CHECKING:
    from ..model.config import DecoderConfig
    from ..model.spec import Family
    from ..tokenizer import Tokenizer

VOCABULARY = "tokenizer.bin"  # in the same directory


class Llama2cModel(Llama2c):
    """An open llama2.c file as a model, a llama."""

    kind, architecture, chat_template = "llama2.c version 0", "llama", None

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.config

    @property
    def has_vocabulary(self) -> bool:
        return self.path.with_name(VOCABULARY).is_file()

    def family(self) -> Family:
        from .. import models

        return models.of_type(self.architecture, self.path)

    def keys(self, family: Family) -> Keys:
        keys = Keys(str(self.path), self.config, self.tensors, {})
        keys.interleaved = self.interleaved
        return keys

    def weights(self, family: Family, config: DecoderConfig) -> Weights:
        return NamedWeights(self, family.hf_rules(config), strict=False)

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer import from_pieces

        path = self.path.with_name(VOCABULARY)
        if not path.is_file():
            raise ModelFileError(f"{self.path}: has no tokenizer: {path} is missing")
        pieces, scores = read_vocabulary(path)
        return from_pieces(pieces, scores.tolist(), path)
