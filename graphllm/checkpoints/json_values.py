"""Strict reading of small JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, join_names, quote
from .hf_directory import read_json


class JsonValues:
    """Values of a JSON file, which may be missing; a key that nothing reads is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = read_json(path) if path.is_file() else {}
        self._read: set[str] = set()

    def get(self, name: str, *kinds: type) -> Any:
        """Return a value of one of these types; None if it is missing or null. ConfigError."""
        self._read.add(name)
        value = self._values.get(name)
        if value is not None and type(value) not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{self.path}: {name} = {quote(value)} is not {wanted}")
        return value

    def finish(self, *ignored: str) -> None:
        """Raise ConfigError for keys that have a value and were not read."""
        known = {*self._read, *ignored}
        unknown = [n for n, v in self._values.items() if v is not None and n not in known]
        if unknown:
            raise ConfigError(f"{self.path}: unknown keys {join_names(unknown, quote)}")
