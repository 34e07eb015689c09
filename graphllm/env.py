"""Environment variables that graphllm reads; every ``GRAPHLLM_*`` variable is read here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache directory, which may not exist yet.

    It is $GRAPHLLM_CACHE, else $XDG_CACHE_HOME/graphllm, else ~/.cache/graphllm. A relative
    $XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    own = os.environ.get("GRAPHLLM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and os.path.isabs(shared):
        return Path(shared) / "graphllm"
    return Path(os.path.expanduser("~")).absolute() / ".cache" / "graphllm"


def debug_level() -> int:
    """Return the level set by $GRAPHLLM_DEBUG, 0 by default; `graphllm.debug` lists the levels."""
    value = os.environ.get("GRAPHLLM_DEBUG", "")
    return int(value) if value.isdigit() else 0


def perf_map_enabled() -> bool:
    """Return whether $GRAPHLLM_PERF_MAP asks for a symbol map of compiled CPU kernels."""
    return os.environ.get("GRAPHLLM_PERF_MAP", "") not in ("", "0")
