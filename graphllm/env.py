"""Where graphllm keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache directory, which may not exist yet.

    $GRAPHLLM_CACHE, else $XDG_CACHE_HOME/graphllm, else ~/.cache/graphllm. A relative
    $XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    own = os.environ.get("GRAPHLLM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and os.path.isabs(shared):
        return Path(shared) / "graphllm"
    return Path(os.path.expanduser("~")).absolute() / ".cache" / "graphllm"
