"""JSON of requests and responses."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from starlette.responses import Response

_FORM: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_ENCODER = json.JSONEncoder(**_FORM)
PART = 1 << 15  # bytes of a part of a JSON text, which take a few milliseconds
_MARK = secrets.token_hex(16)  # stands for a `LazyArray`; no client can know it
SMALLEST_LOGPROB = -9999.0  # what OpenAI's API has for -inf, which JSON cannot express


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. ValueError: it is malformed."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def json_bytes(value: Any) -> bytes:
    """Return the JSON text of a value in UTF-8; a lone surrogate becomes a question mark."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


class LazyArray:
    """An array of JSON whose elements are made when `json_parts` comes to them.

    The log-probabilities of an answer would take seconds if they were all made at once. Only
    `json_parts` and `encode_json` take a value with such arrays, once.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def json_parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON text of a value in parts of at least `PART` bytes, but for the last one.

    The elements of each `LazyArray` are made meanwhile. Other arrays are never divided.
    """
    data = bytearray()
    for fragment in _fragments(value):
        data += fragment
        if len(data) >= PART:
            yield bytes(data)
            data.clear()
    if data:
        yield bytes(data)


def _fragments(value: Any) -> Iterator[bytes]:
    arrays: list[LazyArray] = []

    def mark(array: Any) -> str:
        if not isinstance(array, LazyArray):
            raise TypeError(f"JSON has no {type(array).__name__}")
        arrays.append(array)
        return _MARK

    text = json.JSONEncoder(**_FORM, default=mark).encode(value)
    before, *after = text.encode("utf-8", "replace").split(b'"%b"' % _MARK.encode())
    yield before
    for array, rest in zip(arrays, after, strict=True):
        yield b"["
        for index, item in enumerate(array.items):
            if index:
                yield b","
            yield from _fragments(item)
        yield b"]"
        yield rest


async def encode_json(value: Any) -> bytes:
    """Return the JSON text of a value; the event loop runs between its parts, see `json_parts`."""
    parts: list[bytes] = []
    for part in json_parts(value):
        if parts:
            await asyncio.sleep(0)
        parts.append(part)
    return b"".join(parts)


def json_response(value: Any) -> Response:
    """Return a response with a JSON value."""
    return Response(json_bytes(value), media_type="application/json")


def json_logprob(value: float) -> float:
    """Return a log-probability as JSON can express it."""
    return value if math.isfinite(value) else SMALLEST_LOGPROB
