"""JSON from a file of a model: one object, read as hostile."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ..errors import ModelFileError, quote

# Values that a file may hold: 260,000 tensors. Python needs up to some 200 bytes for each.
_MAX_VALUES = 1 << 21


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """The object that ``data`` is. ModelFileError, which begins with ``where``.

    Stricter than `json.loads`: UTF-8 only, no key twice in any object, no NaN or Infinity, no half
    of a surrogate pair, and a limit on the count of values.
    """
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > _MAX_VALUES:
        raise ModelFileError(f"{where}: holds more than {_MAX_VALUES} values")
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a pair has no UTF-8
    except RecursionError:
        raise ModelFileError(f"{where}: no valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{where}: no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: no JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{quote(key)} appears twice")
        found[key] = value
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
