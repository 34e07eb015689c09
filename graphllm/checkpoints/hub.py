"""Models of the Hugging Face Hub by repository id (``org/name``): cached or downloaded.

The cache layout is that of huggingface_hub (its documentation, "Understand caching"):
``models--org--name/refs/REVISION`` names a folder in ``snapshots``.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import ModelFileError
from ..terminal import escape_control, note
from ..weights.strict_json import json_object, json_value
from .hf_directory import TOKENIZER_FILES

REVISION = "main"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w./-]+\.safetensors")
_MODULES = "modules.json"  # lists the modules of sentence-transformers
# Architectures of models of embeddings. Other programs cache them without their modules.json.
_BARE = re.compile(r"\w+(Model|ForMaskedLM)")
# Files of a module, besides those that it may lack.
_MODULE_FILES = {"Pooling": ("config.json",), "Dense": ("config.json", _SINGLE)}
# Files to download besides the shards. Pickles and weights for other programs, which can double the
# size of a repository, are left out.
_WANTED = [
    "config.json", "generation_config.json", _SINGLE, _INDEX, "tokenizer*.json", "*.model", "*.spm",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "additional_chat_templates/*",
    # Of sentence-transformers: settings, and the modules after the Transformer.
    _MODULES, "sentence_bert_config.json", "config_sentence_transformers.json", "*/config.json",
    "*_Dense/model.safetensors",
]  # fmt: skip


def is_repo_id(model: str) -> bool:
    """Return whether ``model`` has the form ``org/name``."""
    return _REPO_ID.fullmatch(model) is not None


def cache_folder() -> Path:
    """Return the cache directory of huggingface_hub."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if stated:
        return Path(stated).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(general, "huggingface")
    return Path(home).expanduser() / "hub"


def find_cached(name: str) -> Path | None:
    """Return the folder of a model in the local cache; None unless it is complete.

    A complete model has a configuration, weights, a tokenizer, and the files of the modules that
    its modules.json lists. If it may be a model of embeddings, it has a modules.json, or a mark
    that the repository has none.
    """
    found = _cached_snapshot(name)
    if found is None or not _has_tokenizer(found) or _may_lack_modules(name, found):
        return None
    return found if all((found / file).is_file() for file in _module_files(found)) else None


def _cache_of(name: str) -> Path:
    """Return the folder of a model in the cache."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def _no_modules(name: str, commit: str) -> Path:
    """Return the empty file by which huggingface_hub notes that a commit has no modules.json."""
    return _cache_of(name) / ".no_exist" / commit / _MODULES


def _may_lack_modules(name: str, folder: Path) -> bool:
    """Return whether the repository of a cached model may have a modules.json, not cached."""
    if (folder / _MODULES).is_file() or _no_modules(name, folder.name).is_file():
        return False
    try:
        config = json_object((folder / "config.json").read_bytes(), "config.json")
    except (OSError, ModelFileError):  # loading reports it
        return False
    stated = config.get("architectures")
    names = stated if isinstance(stated, list) else []
    return any(isinstance(each, str) and _BARE.fullmatch(each) for each in names)


def _cached_snapshot(name: str) -> Path | None:
    """Return the cached folder of a model with its configuration and weights, or None."""
    folder = _cache_of(name)
    try:
        revision = (folder / "refs" / REVISION).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[\w.-]+", revision):
        return None
    found = folder / "snapshots" / revision
    return found if (found / "config.json").is_file() and _has_weights(found) else None


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer."""
    present = {name for name in (*TOKENIZER_FILES, "merges.txt") if (folder / name).is_file()}
    # vocab.json is not a tokenizer without the merges or a SentencePiece model.
    return bool(present - {"vocab.json"})


def _module_files(folder: Path) -> list[str]:
    """Return the files of the modules that modules.json lists; loading reports malformed ones."""
    try:
        listed = json_value((folder / _MODULES).read_bytes(), _MODULES)
    except (OSError, ModelFileError):
        return []
    found = []
    for module in listed if isinstance(listed, list) else []:
        kind, path = (module.get(k) if isinstance(module, dict) else None for k in ("type", "path"))
        if isinstance(kind, str) and isinstance(path, str) and re.fullmatch(r"[\w.-]+", path):
            names = _MODULE_FILES.get(kind.rpartition(".")[2], ())
            found += [f"{path}/{name}" for name in names]
    return found


def _has_weights(folder: Path) -> bool:
    """Return whether all safetensors files exist."""
    single = folder / _SINGLE
    return single.is_file() or all((folder / shard).is_file() for shard in _shards(folder))


def _shards(folder: Path) -> list[str]:
    """Return the safetensors files that the index names, or the only one. ModelFileError."""
    index = folder / _INDEX
    if not index.is_file():
        return [_SINGLE]
    homes = json_object(index.read_bytes(), str(index)).get("weight_map")
    stated = list(homes.values()) if isinstance(homes, dict) else [None]
    shards = [each for each in stated if isinstance(each, str) and _SHARD.fullmatch(each)]
    if shards != stated:
        raise ModelFileError(f"{index}: its weight_map does not name .safetensors files")
    return sorted(set(shards))


def fetch(name: str) -> Path:
    """Return the folder of the model ``name``, from the cache or downloaded with a progress bar.

    If only its tokenizer or modules may be missing, and cannot be downloaded, the cached folder is
    returned, with a note. ModelFileError if the model is not cached and cannot be downloaded.
    """
    found = find_cached(name)
    if found is not None:
        return found
    try:
        return _download(name)
    except ModelFileError:
        found = _cached_snapshot(name)
        if found is None:
            raise
        note(
            f"note: {escape_control(name)}: files of the tokenizer or of modules may be missing in "
            "the cache, and cannot be downloaded"
        )
        return found


def _note_no_modules(name: str, commit: str) -> None:
    """Note that a commit has no modules.json, so that it is not looked for again."""
    path = _no_modules(name, commit)
    with suppress(OSError):  # a cache that may only be read
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _download(name: str) -> Path:
    """Return the folder of a model, downloaded into the cache. ModelFileError."""
    where = f"{name}: no such file, and not in the Hugging Face cache ({cache_folder()})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelFileError(f"{where}; HF_HUB_OFFLINE is set")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ModelFileError(f"{where}; to download it: pip install 'graphllm[hub]'") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = Path(snapshot_download(name, revision=REVISION, allow_patterns=_WANTED))
        wanted = [] if _has_weights(found) else _shards(found)
        wanted += [file for file in _module_files(found) if not (found / file).is_file()]
        if wanted:  # the name of the folder is the commit
            snapshot_download(name, revision=found.name, allow_patterns=wanted)
        if not (found / _MODULES).is_file():
            _note_no_modules(name, found.name)
        return found
    except Exception as error:  # network, disk or hub: huggingface_hub documents no base class
        reason = " ".join(str(error).split())[:300]
        raise ModelFileError(f"{where}; it cannot be downloaded: {reason}") from None
