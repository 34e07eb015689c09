"""Models by their name on the Hugging Face hub, as ``org/name``: in the local cache, or fetched.

The cache's layout is that of huggingface_hub (its documentation, "Understand caching"):
``models--org--name/refs/REVISION`` names a folder of ``snapshots``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ..errors import ModelFileError
from ..weights.strict_json import json_object

REVISION = "main"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w./-]+\.safetensors")
# What a model is made of beside its shards; pickles and weights for other programs, of which many
# repositories hold as much again, stay where they are.
_WANTED = [
    "config.json", "generation_config.json", _SINGLE, _INDEX, "tokenizer*.json", "*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "additional_chat_templates/*",
]  # fmt: skip


def is_repo_id(model: str) -> bool:
    """Whether it looks like ``org/name``."""
    return _NAME.fullmatch(model) is not None


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if stated:
        return Path(stated).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(general, "huggingface")
    return Path(home).expanduser() / "hub"


def find_cached(name: str) -> Path | None:
    """The folder of a model that is whole in the local cache."""
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / REVISION).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[\w.-]+", revision):
        return None
    found = folder / "snapshots" / revision
    return found if (found / "config.json").is_file() and _has_weights(found) else None


def _has_weights(folder: Path) -> bool:
    """Whether all safetensors are there."""
    single = folder / _SINGLE
    return single.is_file() or all((folder / shard).is_file() for shard in _shards(folder))


def _shards(folder: Path) -> list[str]:
    """The files that the index names, or the one that there is without an index. ModelFileError."""
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
    """The folder of the model called ``name``: from the cache, or downloaded into it with progress.

    ModelFileError where it is neither there nor to be had.
    """
    found = find_cached(name)
    if found is not None:
        return found
    where = f"{name}: no such file, and not in the Hugging Face cache ({cache_folder()})"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelFileError(f"{where}; HF_HUB_OFFLINE forbids to download it")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ModelFileError(f"{where}; to download it: pip install 'graphllm[hub]'") from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        found = Path(snapshot_download(name, revision=REVISION, allow_patterns=_WANTED))
        if not _has_weights(found):  # the folder is called as the commit that it is of
            snapshot_download(name, revision=found.name, allow_patterns=_shards(found))
        return found
    except Exception as error:  # of the network, the disk, or the hub: whatever it raises
        reason = " ".join(str(error).split())[:300]
        raise ModelFileError(f"{where}; it cannot be downloaded: {reason}") from None
