"""`load`: an `LLM` for a decoder, an `EmbeddingModel` for an encoder."""

from __future__ import annotations

import os
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint import Checkpoint, checkpoint_path
from ..errors import GraphllmError, RequestError
from ..loading.load import RULES
from .llm import LLM


@wraps(LLM.load)
def load(model: str | Path | Checkpoint, **options: Any) -> Any:
    """Load a model and prepare it to run: `LLM.load`, or for an encoder `EmbeddingModel.load`.

    See these methods for the arguments; an encoder takes fewer. An encoder that a file of the
    user defines (``model_def``) is loaded with `EmbeddingModel.load` itself.
    """
    if options.get("model_def") is not None or not is_encoder(model):
        return LLM.load(model, **options)
    from ..embedding import EmbeddingModel

    known = signature(EmbeddingModel.load).parameters
    if foreign := [name for name in options if name in RULES and name not in known]:
        raise RequestError(f"{foreign[0]} has no meaning for an encoder", foreign[0])
    return EmbeddingModel.load(model, **options)


def is_encoder(model: str | Path | Checkpoint) -> bool:
    """Return whether ``model`` is a directory of an encoder that is built in."""
    if not isinstance(model, (str, os.PathLike)):
        return False
    try:
        path = checkpoint_path(model)
        if not path.is_dir():
            return False
        from .. import models
        from ..checkpoints.hf_directory import read_json

        kind = read_json(path / "config.json").get("model_type")
        return isinstance(kind, str) and models.spec_of_model_type(kind, path).is_encoder
    except GraphllmError:
        return False  # LLM.load says what is wrong
