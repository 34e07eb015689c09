"""Model files of every kind, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..dtype import DType
from ..errors import ModelFileError
from . import Weights
from .demo import demo_path

if TYPE_CHECKING:
    from ..config import DecoderConfig
    from ..models import Family
    from ..tokenizer import Tokenizer
    from .keys import Keys


class Stored(Protocol):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int


class ModelFile(Protocol):
    """An open model: configuration, tensors, tokenizer. ModelFileError where one is malformed."""

    path: Path
    has_vocabulary: bool

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
    def tensors(self) -> Mapping[str, Stored]:
        """By the file's own names."""

    def family(self) -> Family:
        """The family of this package that reads it."""

    def keys(self, family: Family) -> Keys:
        """Its configuration under Hugging Face's names."""

    def weights(self, family: Family, config: DecoderConfig) -> Weights:
        """Its tensors under canonical names."""

    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> str | None: ...

    def close(self) -> None: ...


def open_model(model: str | Path, data: bool = True) -> ModelFile:
    """The model that MODEL names: a path, or ``demo``. Without ``data`` tensors are not read, and
    need not be there. ModelFileError."""
    path = demo_path() if str(model) == "demo" else Path(model)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file")
    if path.is_dir():
        from .directory import Directory

        return Directory(path, data)
    from .gguf import GGUF

    return GGUF(path, data)
