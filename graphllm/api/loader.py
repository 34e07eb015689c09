"""`load`: an `LLM` for a decoder, an `EncoderModel` for an encoder."""

from __future__ import annotations

import os
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.checkpoint import Checkpoint, checkpoint_path
from ..errors import GraphllmError, RequestError
from ..loading.load import RULES
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
    kind = _encoder_class(config)
    known = signature(kind.load).parameters
    if foreign := [name for name in options if name in RULES and name not in known]:
        raise RequestError(f"{foreign[0]} has no meaning for an encoder", foreign[0])
    return kind.load(model, **options)


def encoder_config(model: str | Path | Checkpoint) -> Path | None:
    """Return the path of config.json if ``model`` is a directory of an encoder that is built in."""
    if not isinstance(model, (str, os.PathLike)):
        return None
    try:
        path = checkpoint_path(model)
        if not path.is_dir():
            return None
        from .. import models
        from ..checkpoints.hf_directory import read_json

        kind = read_json(path / "config.json").get("model_type")
        encoder = isinstance(kind, str) and models.spec_of_model_type(kind, path).is_encoder
        return path / "config.json" if encoder else None
    except GraphllmError:
        return None  # LLM.load says what is wrong


def _encoder_class(config: Path) -> type[EncoderModel]:
    """Return the class for an encoder's config.json."""
    from .. import embedding
    from ..checkpoints.hf_directory import read_json
    from ..embedding.encoder_model import task_of

    classes = (
        embedding.SequenceClassifier, embedding.TokenClassifier, embedding.MaskedLanguageModel
    )  # fmt: skip
    task = task_of(read_json(config))
    found = next((kind for kind in classes if kind.task == task), embedding.EmbeddingModel)
    pooled = (config.parent / "modules.json").is_file()
    return embedding.EmbeddingModel if pooled and task == classes[-1].task else found
