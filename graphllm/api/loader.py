"""`load`: an `LLM` for a decoder, an `EncoderModel` for an encoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.checkpoint import Checkpoint, checkpoint_path, states_pooling
from ..errors import GraphllmError
from .llm import LLM

if TYPE_CHECKING:
    from ..embedding.encoder_model import EncoderModel
    from ..model.spec import ModelSpec


@wraps(LLM.load)
def load(model: str | Path | Checkpoint, **options: Any) -> Any:
    """Load a model and prepare it to run: `LLM.load`, or for an encoder that of its class.

    The class of an encoder follows from ``architectures`` of config.json: `SequenceClassifier`,
    `TokenClassifier`, `MaskedLanguageModel`, or `EmbeddingModel` for all others, for directories of
    sentence-transformers and for GGUF files. See the methods ``load`` for the arguments; an encoder
    takes fewer. An encoder that a file of the user defines (``model_def``) is loaded with the class
    itself.
    """
    kind = None if options.get("model_def") is not None else encoder_class(model)
    return LLM.load(model, **options) if kind is None else _load_encoder(kind, model, options)


def load_encoder(file: Checkpoint, **options: Any) -> EncoderModel:
    """Load the encoder of an open file as `load` does."""
    return _load_encoder(_class_of(file.metadata, file.path), file, options)


def _load_encoder(
    kind: type[EncoderModel], model: str | Path | Checkpoint, options: Mapping[str, Any]
) -> EncoderModel:
    from ..loading.loaded_encoder import encoder_arguments

    encoder_arguments(options, {})
    return kind.load(model, **options)


def encoder_class(model: str | Path | Checkpoint) -> type[EncoderModel] | None:
    """Return the class for the encoder of a file or directory; None for a decoder.

    A decoder that states how its hidden states are pooled counts as an encoder. Encoders that are
    not built in do not.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    try:
        path = checkpoint_path(model)
        found = _spec(path)
        if found is None:
            return None
        spec, metadata = found
        embeds = spec.is_encoder or (spec.is_decoder and states_pooling(path, metadata))
        return _class_of(metadata, path) if embeds else None
    except GraphllmError:
        return None  # LLM.load says what is wrong


def _spec(path: Path) -> tuple[ModelSpec, Mapping[str, Any]] | None:
    """Return the spec of a directory or GGUF file, and the metadata that name its class."""
    from .. import models

    if path.is_dir():
        from ..checkpoints.hf_directory import read_json

        metadata = read_json(path / "config.json")
        kind, of = metadata.get("model_type"), models.spec_of_model_type
    elif path.suffix not in (".safetensors", ".bin", ".py"):
        from ..checkpoints.gguf import leading_metadata

        metadata = leading_metadata(path)
        kind, of = metadata.get("general.architecture"), models.spec_of_architecture
    else:
        return None
    return (of(kind, path), metadata) if isinstance(kind, str) else None


def _class_of(config: Mapping[str, Any], folder: Path) -> type[EncoderModel]:
    """Return the class for an encoder with this configuration; ``folder``: of its files."""
    from .. import embedding
    from ..loading.loaded_encoder import task_of

    classes = (
        embedding.SequenceClassifier, embedding.TokenClassifier, embedding.MaskedLanguageModel
    )  # fmt: skip
    task = task_of(config)
    found = next((kind for kind in classes if kind.task == task), embedding.EmbeddingModel)
    pooled = states_pooling(folder, config)
    return embedding.EmbeddingModel if pooled and task == classes[-1].task else found
