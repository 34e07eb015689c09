"""Interface of checkpoints: GGUF files, Hugging Face directories, llama2.c files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ModelFileError
from ..weights import Weights
from ..weights.mapped_file import TensorInfo

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.config_keys import Keys
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer


# A URL; the group is the repository id in a URL of the Hugging Face Hub.
_URL = re.compile(r"[a-zA-Z][\w+.-]+://(?:huggingface\.co/([\w.-]+/[\w.-]+)/?$)?")


class Checkpoint(Protocol):
    """An open model: configuration, tensors, tokenizer. Methods raise ModelFileError."""

    path: Path

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a tokenizer."""

    @property
    def kind(self) -> str:
        """Kind of the file, for display."""

    @property
    def architecture(self) -> str:
        """The file's name of the architecture, such as ``llama``."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Configuration under the file's own names."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by the file's own names."""

    def spec(self) -> ModelSpec:
        """Return the built-in model spec of the architecture."""

    def keys(self, spec: ModelSpec) -> Keys:
        """Return the configuration under Hugging Face's names."""

    def weights(self, spec: ModelSpec, config: ModelConfig) -> Weights:
        """Return the weights under canonical names."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """Chat template (Jinja), or None."""

    def close(self) -> None: ...


def checkpoint_path(model: str | os.PathLike[str]) -> Path:
    """Return the file or directory of ``model``: a path, ``demo``, ``minilm``, or ``org/name``.

    ``org/name`` is a model of the Hugging Face Hub, downloaded if it is not cached. ModelFileError
    if there is no such model.
    """
    if (url := _URL.match(str(model))) is not None:
        name = url[1] or "org/name"
        raise ModelFileError(
            f"{model}: is a URL; give a file, a directory, or {name!r} for a model of the Hugging "
            "Face hub"
        )
    if str(model) == "minilm":
        from .minilm import minilm_path

        return minilm_path()
    if str(model) == "demo":
        from .demo import demo_path

        return demo_path()
    path = Path(model)
    if path.exists():
        return path
    from . import hub

    if hub.is_repo_id(str(model)):
        return hub.fetch(str(model))
    raise ModelFileError(f"{path}: no such file")


def states_pooling(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Return whether a model states how its hidden states become embeddings: a directory of
    sentence-transformers, or a GGUF file with a pooling type. ConfigError as `stated_pooling`.

    Args:
        path: Directory or file.
        metadata: Its configuration under its own names.
    """
    from .gguf import stated_pooling

    return (path / "modules.json").is_file() or stated_pooling(metadata, path) is not None


def open_checkpoint(model: str | os.PathLike[str] | Checkpoint, data: bool = True) -> Checkpoint:
    """Open the checkpoint of ``model``, see `checkpoint_path`; return one that is open already.

    Without ``data`` only headers are read, and the tensors' data may be missing. ModelFileError if
    the model does not exist or is malformed.
    """
    if not isinstance(model, (str, os.PathLike)):
        return model
    path = checkpoint_path(model)
    if path.is_dir() or path.suffix == ".safetensors":
        from .hf_directory import HfCheckpoint

        return HfCheckpoint(path, data) if path.is_dir() else HfCheckpoint(path.parent, data, path)
    if path.suffix == ".bin":
        from .llama2c import Llama2cCheckpoint

        return Llama2cCheckpoint(path, data)
    if path.suffix == ".py":
        raise ModelFileError(
            f"{path}: is Python; pass a file that defines a model as model_def", "model_def"
        )
    from .gguf import GgufCheckpoint

    return GgufCheckpoint(path, data)
