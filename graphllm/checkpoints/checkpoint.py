"""Model files of every kind, behind one interface."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ModelFileError
from ..weights import Weights
from ..weights.mapped_file import TensorInfo
from .demo import demo_path

if TYPE_CHECKING:
    from ..model.config import DecoderConfig
    from ..model.config_keys import Keys
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer


# A URL, and the name of a model in one of the Hugging Face hub.
_URL = re.compile(r"[a-zA-Z][\w+.-]+://(?:huggingface\.co/([\w.-]+/[\w.-]+)/?$)?")


class Checkpoint(Protocol):
    """An open model: configuration, tensors, tokenizer. ModelFileError where one is malformed."""

    path: Path

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a tokenizer."""

    @property
    def kind(self) -> str:
        """What sort of file it is, for people."""

    @property
    def architecture(self) -> str:
        """What the file calls the model's family."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All that it states, by its own names."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By the file's own names."""

    def spec(self) -> ModelSpec:
        """The family of this package that reads it."""

    def keys(self, spec: ModelSpec) -> Keys:
        """Its configuration under Hugging Face's names."""

    def weights(self, spec: ModelSpec, config: DecoderConfig) -> Weights:
        """Its tensors under canonical names."""

    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> str | None: ...

    def close(self) -> None: ...


def checkpoint_path(model: str | Path) -> Path:
    """The file or directory that MODEL names: a path, ``demo``, or ``org/name`` of the Hugging Face
    hub. ModelFileError."""
    if (url := _URL.match(str(model))) is not None:
        name = url[1] or "org/name"
        raise ModelFileError(
            f"{model}: is a URL; give a file, a directory, or {name!r} for a model of the Hugging "
            "Face hub"
        )
    path = demo_path() if str(model) == "demo" else Path(model)
    if path.exists():
        return path
    from . import hub

    if hub.is_repo_id(str(model)):
        return hub.fetch(str(model))
    raise ModelFileError(f"{path}: no such file")


def open_checkpoint(model: str | Path, data: bool = True) -> Checkpoint:
    """The model that MODEL names. Without ``data`` tensors are not read, and need not be there.
    ModelFileError."""
    path = checkpoint_path(model)
    if path.is_dir() or path.suffix == ".safetensors":
        from .hf_directory import HfCheckpoint

        return HfCheckpoint(path, data) if path.is_dir() else HfCheckpoint(path.parent, data, path)
    if path.suffix == ".bin":
        from .llama2c import Llama2cCheckpoint

        return Llama2cCheckpoint(path, data)
    if path.suffix == ".py":
        raise ModelFileError(
            f"{path}: is Python; a file that defines a model is model_def", "model_def"
        )
    from .gguf import GgufCheckpoint

    return GgufCheckpoint(path, data)
