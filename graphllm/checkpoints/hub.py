"""Models of the Hugging Face Hub by repository id (``org/name``): cached or downloaded.

The cache layout is that of huggingface_hub (its documentation, "Understand caching"):
``models--org--name/refs/REVISION`` names a folder in ``snapshots``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from ..errors import ModelFileError
from ..weights.strict_json import json_object

REVISION = "main"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w./-]+\.safetensors")
# Files to download besides the shards. Pickles and weights for other programs, which can double the
# size of a repository, are left out.
_WANTED = [
    "config.json", "generation_config.json", _SINGLE, _INDEX, "tokenizer*.json", "*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "additional_chat_templates/*",
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
    """Return the folder of a model in the local cache; None unless it is complete."""
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

    ModelFileError if it is not cached and cannot be downloaded.
    """
    found = find_cached(name)
    if found is not None:
        return found
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
        if not _has_weights(found):  # the name of the folder is the commit
            snapshot_download(name, revision=found.name, allow_patterns=_shards(found))
        return found
    except Exception as error:  # network, disk or hub: huggingface_hub documents no base class
        reason = " ".join(str(error).split())[:300]
        raise ModelFileError(f"{where}; it cannot be downloaded: {reason}") from None
