"""Backends of other packages, declared as entry points."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlacementError
from .contract import Backend, Device, Options

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "graphllm.backends"  # of the entry points


@cache
def declared_backends() -> dict[str, EntryPoint]:
    """Return the entry points of backends by name."""
    if not any(map(_may_declare, sys.path)) and not _other_finders():
        return {}
    from importlib.metadata import entry_points  # takes 40 ms

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _may_declare(folder: str) -> bool:
    """Whether a package in a folder of ``sys.path`` may declare a backend."""
    try:
        names = os.listdir(folder or ".")
    except NotADirectoryError:  # an archive
        return True
    except OSError:
        return False
    if any(name.endswith(".egg") for name in names):
        return True
    infos = (name for name in names if name.endswith((".dist-info", ".egg-info")))
    return any(_names_group(Path(folder, name, "entry_points.txt")) for name in infos)


def _names_group(file: Path) -> bool:
    try:
        return GROUP.encode() in file.read_bytes()
    except OSError:
        return False


def _other_finders() -> bool:
    """Whether packages may be elsewhere than in ``sys.path``."""
    own = (finder for finder in sys.meta_path if hasattr(finder, "find_distributions"))
    return any(finder is not PathFinder for finder in own)


def load_backend(entry: EntryPoint) -> Backend:
    """Load a third party's backend; on failure return one that is unusable, with the reason."""
    try:
        found = entry.load()
        problem = "" if isinstance(found, Backend) else f"{entry.value} is not a Backend"
    except Exception as error:  # importing a third party's package may raise anything
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return found

    def no_device(options: Options) -> Device:
        raise PlacementError(f"{entry.name}: {problem}")

    return Backend(entry.name, lambda: (False, problem), no_device)
