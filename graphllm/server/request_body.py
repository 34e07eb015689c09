"""Reading of request bodies: JSON of bounded size, in bounded time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError
from .json_data import parse_json
from .streaming import ClientDisconnected, run_within

BODY_TIMEOUT = 60.0  # seconds until the whole body must have come
_LARGE = 100_000  # bytes of a body whose fields may take some 10 ms to check


async def read_json(request: Request, most: int) -> Any:
    """Return the JSON value of the body, of at most ``most`` bytes; the first call reads it.

    Other content types are refused: a web page may send those to any server without asking it.
    ``request.state.is_large`` is whether its fields may take long to check.

    Raises:
        ApiError: the body is too large, late or malformed, or of another content type.
        ClientDisconnected: the client disconnected before its end.
    """
    state = request.scope.setdefault("state", {})  # that of `Request.state`
    if "json" in state:
        return state["json"]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json")
    try:
        data = await run_within(BODY_TIMEOUT, _read(request, most))
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT:.0f} s") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    state["is_large"] = len(data) > _LARGE
    try:
        state["json"] = parse_json(data)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return state["json"]


async def _read(request: Request, most: int) -> bytes:
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and len(stated) < 20 and int(stated) > most:
        raise _too_large(most)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise _too_large(most)
    return bytes(data)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most} bytes", code="request_too_large")
