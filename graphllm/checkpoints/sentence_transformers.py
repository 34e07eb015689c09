"""Settings of sentence-transformers directories: modules, pooling, maximum length, prompts.

Source: sentence-transformers 5, ``SentenceTransformer`` and its modules Transformer, Pooling, Dense
and Normalize. A directory without modules.json has its defaults: mean pooling, no prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelFileError, quote
from ..ops.pooling import POOLINGS
from ..weights.strict_json import json_value
from .checkpoint import Checkpoint
from .dense_module import Dense, read_dense
from .gguf import stated_pooling
from .hf_directory import read_json
from .json_values import JsonValues

_POOLING_KEYS = {  # of 1_Pooling/config.json, before version 5.3
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_PATH_BYTES = 255  # of the name of a folder, on most file systems
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")  # in this order


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a directory turns texts into vectors.

    Attributes:
        pooling: names of `pooling.POOLINGS`, whose vectors are concatenated.
        max_length: maximum number of tokens of a text, special tokens included; None: no limit.
        lowercase: whether texts are lowercased.
        prompts: texts that can be put before each text, by name.
        default_prompt: name of the prompt to use if none is chosen; None: no prompt.
        dense: layers that are applied to the pooled vector in turn.
        width: columns of the hidden states that the Pooling module states; None: not stated.
    """

    pooling: tuple[str, ...] = ("mean",)
    max_length: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dense: tuple[Dense, ...] = ()
    width: int | None = None


def read_settings(file: Checkpoint) -> EmbeddingSettings:
    """Read the settings of a directory; a GGUF file states the pooling only.

    Raises:
        ModelFileError: a file is malformed.
        ConfigError: a module or a setting is not supported.
    """
    folder = file.path
    if (pooling := stated_pooling(file.metadata, folder)) is not None:
        return EmbeddingSettings((pooling,))
    if not (folder / "modules.json").is_file():
        return EmbeddingSettings()
    modules = _modules(folder / "modules.json")
    own: dict[str, Any] = {
        "dense": tuple(read_dense(folder / path) for name, path in modules if name == "Dense")
    }
    for name, path in modules:
        if name == "Pooling":
            own["pooling"], own["width"] = _pooling(folder / path / "config.json")
    limits = JsonValues(folder / "sentence_bert_config.json")
    own["max_length"] = most = limits.get("max_seq_length", int)
    if most is not None and most < 1:
        raise ConfigError(f"{limits.path}: max_seq_length = {most} must be positive")
    own["lowercase"] = limits.get("do_lower_case", bool) or False
    limits.finish("transformer_task", "modality_config", "module_output_name")  # as for any text
    texts = JsonValues(folder / "config_sentence_transformers.json")
    own["prompts"] = texts.get("prompts", dict) or {}
    own["default_prompt"] = texts.get("default_prompt_name", str)
    texts.finish("__version__", "similarity_fn_name", "model_type")  # of the writer; of scores
    if not all(isinstance(each, str) for each in own["prompts"].values()):
        raise ConfigError(f"{texts.path}: prompts has a value that is not a string")
    if own["default_prompt"] not in (None, *own["prompts"]):
        raise ConfigError(
            f"{texts.path}: default_prompt_name = {quote(own['default_prompt'])} is not in prompts"
        )
    return EmbeddingSettings(**own)


def tokenizer_limit(folder: Path) -> int | None:
    """Return the maximum number of tokens that tokenizer_config.json states, None if it has none.

    sentence-transformers truncates at it if there is no ``max_seq_length``. ConfigError: it is no
    positive number. Files without a limit state 1e30.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    most = read_json(path).get("model_max_length")
    if most is None:
        return None
    if type(most) not in (int, float) or not most >= 1:
        raise ConfigError(f"{path}: model_max_length = {quote(most)} must be a positive number")
    return int(min(most, 1 << 62))


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module of modules.json."""
    listed = json_value(path.read_bytes(), str(path))
    found: list[tuple[str, str]] = []
    for module in listed if isinstance(listed, list) else [listed]:
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ModelFileError(f"{path}: not a list of modules with a type")
        name, folder = module["type"].rpartition(".")[2], module.get("path", "")
        if name not in _MODULES:
            known = ", ".join(_MODULES)
            raise ConfigError(f"{path}: module {quote(name)} is not supported, only {known}")
        if not isinstance(folder, str) or ".." in Path(folder).parts or Path(folder).is_absolute():
            raise ModelFileError(f"{path}: path = {quote(folder)} is not inside the directory")
        if len(folder.encode()) > _PATH_BYTES:
            raise ModelFileError(f"{path}: path = {quote(folder)} is too long")
        found.append((name, folder))
    names = [name for name, _ in found]
    if "Transformer" not in names:
        raise ConfigError(f"{path}: it has no Transformer module")
    once = [name for name in names if name != "Dense"]
    if names != sorted(names, key=_MODULES.index) or len(set(once)) < len(once):
        raise ConfigError(f"{path}: modules {', '.join(names)}: not supported in this order")
    if ("Transformer", "") not in found:
        raise ConfigError(f"{path}: the Transformer module is in a folder of its own")
    return found


def _pooling(path: Path) -> tuple[tuple[str, ...], int | None]:
    """Return the poolings of a Pooling module, and the columns that it states."""
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file, but modules.json has the module")
    values = JsonValues(path)
    width = values.get("word_embedding_dimension", int) or values.get("embedding_dimension", int)
    values.get("embedding_dimension", int)
    if values.get("include_prompt", bool) is False:
        raise ConfigError(f"{path}: include_prompt = False is not supported")
    chosen = [name for key, name in _POOLING_KEYS.items() if values.get(key, bool)]
    modes = values.get("pooling_mode", str, list)
    if modes is not None:
        chosen = [modes] if isinstance(modes, str) else modes
    values.finish()
    if not chosen or not all(isinstance(n, str) and n in POOLINGS for n in chosen):
        known = ", ".join(POOLINGS)
        raise ConfigError(f"{path}: pooling {quote(chosen)} is not supported, only {known}")
    return tuple(name for name in POOLINGS if name in chosen), width
