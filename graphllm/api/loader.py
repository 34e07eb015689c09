"""`load`: an `LLM` for a decoder, an `EncoderModel` for an encoder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.checkpoint import Checkpoint, checkpoint_path
from ..errors import GraphllmError
from .llm import LLM

if TYPE_CHECKING:
    from ..embedding.encoder_model import EncoderModel


@wraps(LLM.load)
def load(model: str | Path | Checkpoint, **options: Any) -> Any:
    """Load a model and prepare it to run: `LLM.load`, or for an encoder that of its class.

    The class of an encoder follows from ``architectures`` of config.json: `SequenceClassifier`,
    `TokenClassifier`, `MaskedLanguageModel`, or `EmbeddingModel` for all others and for directories
    of sentence-transformers. See the methods ``load`` for the arguments; an encoder takes fewer. An
    encoder that a file of the user defines (``model_def``) is loaded with the class itself.
    """
    config = None if options.get("model_def") is not None else encoder_config(model)
    if config is None:
        return LLM.load(model, **options)
    from ..checkpoints.hf_directory import read_json

    return _load_encoder(model, read_json(config), config.parent, options)


def load_encoder(file: Checkpoint, **options: Any) -> EncoderModel:
    """Load the encoder of an open file as `load` does."""
    return _load_encoder(file, file.metadata, file.path, options)


def _load_encoder(
    model: str | Path | Checkpoint, config: Mapping[str, Any], folder: Path,
    options: Mapping[str, Any],
) -> EncoderModel:  # fmt: skip
    from ..loading.loaded_encoder import encoder_arguments

    kind = _encoder_class(config, folder)
    encoder_arguments(options, {})
    return kind.load(model, **options)


def encoder_config(model: str | Path | Checkpoint) -> Path | None:
    """Return the path of config.json if ``model`` is a directory of an encoder that is built in.

    A decoder in a directory of sentence-transformers counts as one.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    try:
        path = checkpoint_path(model)
        if not path.is_dir():
            return None
        from .. import models
        from ..checkpoints.hf_directory import read_json

        kind = read_json(path / "config.json").get("model_type")
        spec = models.spec_of_model_type(kind, path) if isinstance(kind, str) else None
        pooled = (path / "modules.json").is_file()
        embeds = spec is not None and (spec.is_encoder or (spec.is_decoder and pooled))
        return path / "config.json" if embeds else None
    except GraphllmError:
        return None  # LLM.load says what is wrong


def _encoder_class(config: Mapping[str, Any], folder: Path) -> type[EncoderModel]:
    """Return the class for an encoder with this configuration; ``folder``: that of its files."""
    from .. import embedding
    from ..loading.loaded_encoder import task_of

    classes = (
        embedding.SequenceClassifier, embedding.TokenClassifier, embedding.MaskedLanguageModel
    )  # fmt: skip
    task = task_of(config)
    found = next((kind for kind in classes if kind.task == task), embedding.EmbeddingModel)
    pooled = (folder / "modules.json").is_file()
    return embedding.EmbeddingModel if pooled and task == classes[-1].task else found
