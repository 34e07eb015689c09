"""Strict parsing of untrusted JSON files."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ..errors import ModelFileError, quote

# Maximum number of values in a file, enough for 260,000 tensors. Python takes up to 200 bytes each.
_MAX_VALUES = 1 << 21


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse ``data`` as `json_value` does. ModelFileError if it is not one JSON object."""
    value = json_value(data, where)
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: not a JSON object")
    return value


def json_value(data: bytes, where: str) -> Any:
    """Parse ``data`` as JSON.

    Stricter than `json.loads`: UTF-8 only, no duplicate keys, no NaN or Infinity, no lone
    surrogates, and a limit on the number of values.

    Raises:
        ModelFileError: The data is malformed; the text begins with ``where``.
    """
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > _MAX_VALUES:
        raise ModelFileError(f"{where}: more than {_MAX_VALUES} values")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for a lone surrogate
    except RecursionError:
        raise ModelFileError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{where}: not valid JSON: {error}") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{quote(key)} appears twice")
        found[key] = value
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
