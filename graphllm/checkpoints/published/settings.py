"""Strict reading of ``quantization_config``: each key is read, ignorable, or an error."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ConfigError, join_names, quote
from ...model.keys import Keys

# Why static scales of activations are refused.
STATIC_SCALES = "kernels compute the scales of activations per token, not from stored input scales"
GROUP = 32  # elements of a block: groups are whole blocks


class Settings:
    """One JSON object of ``quantization_config``. A key with the value null counts as missing.

    Args:
        source: The file and the path of the object, for error messages.
        values: The object.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.keys = Keys(source, values, (), {})

    def one_of(self, name: str, known: Iterable[Any], default: Any = ...) -> Any:
        """Return a value that is one of ``known``; ConfigError otherwise, or if it is missing."""
        value: Any = self.keys(name, builtins.object, default)
        known = tuple(known)
        if not any(type(value) is type(each) and value == each for each in known):
            only = f"only {', '.join(map(quote, known))}" if known else "only null"
            raise self.error(name, value, only)
        return value

    def only(self, name: str, *known: Any) -> None:
        """Accept only the values ``known`` for key ``name``, or no value."""
        if self.keys.has(name):
            self.one_of(name, known)
        self.keys.ignore(name)

    def group_size(self, default: Any = ...) -> int:
        """Return ``group_size``, a multiple of 32, or -1 for one group per row."""
        value = self.keys("group_size", int, default)
        if value != -1 and (value <= 0 or value % GROUP or value >= 2**31):
            raise self.error("group_size", value, f"only -1 and multiples of {GROUP}")
        return value

    def strings(self, name: str) -> list[str]:
        """Return a list of strings, empty if the key is missing."""
        found = self.keys(name, list, [])
        for each in found:
            if not isinstance(each, str) or not each:
                raise self.error(name, found, f"{quote(each)} is not the name of a module")
        return found

    def object(self, name: str) -> Settings:
        """Return the settings of an object; ConfigError if it is missing."""
        return Settings(f"{self.source}.{name}", self.keys(name, dict))

    def objects(self, name: str) -> list[Settings]:
        """Return the settings of the objects in an object, at least one."""
        found = self.keys(name, dict)
        for each in found.values() or [None]:
            if not isinstance(each, dict):
                raise self.error(name, found, "only objects, at least one")
        return [
            Settings(f"{self.source}.{name}[{quote(key)}]", each) for key, each in found.items()
        ]

    def ignore(self, *names: str) -> None:
        """Count keys as read that do not change the weights."""
        self.keys.ignore(*names)

    def error(self, name: str, value: Any, text: str) -> ConfigError:
        return self.keys.error(name, f"= {quote(value)} is not supported: {text}")

    def finish(self) -> None:
        """Raise ConfigError for keys that were not read."""
        read = self.keys.read_names
        values = self.keys.values.items()
        unknown = [name for name, value in values if value is not None and name not in read]
        if unknown:
            raise ConfigError(
                f"{self.source}: unknown key{'s' * (len(unknown) > 1)} {join_names(unknown)}"
            )
