"""ASGI applications made of tables of endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import KeyCheck
from .bills import note_arrival
from .chat_page import chat_page
from .errors import ANTHROPIC, ApiError, api_error, stopping
from .json_data import json_response
from .openapi import OPENAPI, openapi_document
from .streaming import ClientDisconnected

CLIENT_CLOSED = 499  # status for the metrics, as nginx has it: nobody gets the response
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Endpoints = tuple[str, str, Endpoint]  # method, path, endpoint


def server_app(table: Sequence[Endpoints], keys: Sequence[str], responses: Counter) -> ASGIApp:
    """Return the application of a server, with an endpoint for the document of its endpoints.

    Args:
        table: the other endpoints; those of OpenAI's API are added without ``/v1``.
        keys: API keys, of which requests need one; none for no access control.
        responses: counts the responses by path and status.
    """
    own = [*table, ("GET", OPENAPI, _document(table))]
    own += without_version(own)
    return _Counted(KeyCheck(endpoints_app(own), keys), responses, {path for _, path, _ in own})


def endpoints_app(table: Sequence[Endpoints]) -> ASGIApp:
    """Return the application of some endpoints, whose exceptions become responses."""
    return _EndpointsApp([(method, path, _guarded(call)) for method, path, call in table])


class _EndpointsApp:
    """ASGI application that looks up a path without parameters by itself.

    Starlette compares a path with one route after another, and has three layers around an endpoint.
    It gets the other requests: paths with parameters, HEAD, and those that are refused.
    """

    def __init__(self, table: Sequence[Endpoints]) -> None:
        self._calls = {(method, path): call for method, path, call in table if "{" not in path}
        routes = [Route(path, call, methods=[method]) for method, path, call in table]
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        # The location of a redirection has the Host header of the request, which is not checked.
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = None
        if scope["type"] == "http":
            call = self._calls.get((scope["method"], scope["path"]))
        if call is None:
            await self._app(scope, receive, send)
            return
        response = await call(Request(scope, receive, send))
        await response(scope, receive, send)


def without_version(table: Sequence[Endpoints]) -> list[Endpoints]:
    """Return the endpoints of OpenAI's API without ``/v1``, as llama.cpp's server has them."""
    found = [each for each in table if each[1].startswith("/v1/")]
    own = [each for each in found if not each[1].startswith(ANTHROPIC)]
    short = [(method, path.removeprefix("/v1"), call) for method, path, call in own]
    taken = {path for _, path, _ in table}  # /completions is another endpoint
    return [each for each in short if each[1] not in taken]


def _document(table: Sequence[Endpoints]) -> Endpoint:
    """Return the endpoint of the OpenAPI document of the other endpoints and itself."""
    paths = [(method, path) for method, path, _ in table]
    document = openapi_document([*paths, ("GET", OPENAPI)])

    async def openapi(request: Request) -> Response:
        """``/openapi.json``."""
        return json_response(document)

    return openapi


async def health(request: Request) -> Response:
    """``/health``."""
    return json_response({"status": "ok"})


async def page(request: Request) -> Response:
    """``/``: the chat page, which no other page may embed."""
    found = chat_page()
    headers = {
        "content-security-policy": f"{found.policy}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(found.text, headers=headers)


def _guarded(call: Endpoint) -> Endpoint:
    """Return the endpoint with its exceptions as responses."""

    async def endpoint(request: Request) -> ASGIApp:
        note_arrival(request)
        try:
            return await call(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED)
        except asyncio.CancelledError:  # by uvicorn, which stops
            return stopping().response(request.url.path)
        except Exception as error:
            return api_error(error).response(request.url.path)

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors (404, 405) in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{request.method} {path[:100]}: {error.detail}"
    return ApiError(error.status_code, text, headers=error.headers).response(path)


class _Counted:
    """ASGI middleware that counts the responses by path and status."""

    def __init__(self, app: ASGIApp, responses: Counter, paths: set[str]) -> None:
        self._app, self._responses, self._paths = app, responses, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)
