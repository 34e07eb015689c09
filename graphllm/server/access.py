"""API keys: only requests with one of them reach the application."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

PUBLIC = {"/", "/health"}  # paths that need no key; the chat page asks for one itself


class KeyCheck:
    """ASGI middleware that answers 401 unless a request has ``Authorization: Bearer KEY``.

    Requests of Anthropic's clients may have ``x-api-key: KEY`` instead.

    Args:
        app: the application.
        keys: accepted keys; none for an application without access control.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._digests = app, [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it (ASGI)."""
        is_free = scope["type"] != "http" or not self._digests or scope["path"] in PUBLIC
        if is_free or self._allows(Request(scope)):
            await self._app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"}
        error = ApiError(401, "missing or wrong API key", code="invalid_api_key", headers=headers)
        await error.response(scope["path"])(scope, receive, send)

    def _allows(self, request: Request) -> bool:
        """Whether the request has a valid key. The time does not depend on which key is similar."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        digest = _digest(key.strip().encode("latin-1"))
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
