"""Server-sent events, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from .errors import ApiError, api_error, stopping

Value = TypeVar("Value")
_LAST_EVENT_S = 1.0  # for the last event of a stopping server, which a slow reader may not take


class EventForm(Protocol):
    """How an API writes errors and the end of a stream; see `Answer`."""

    last: bytes

    def error(self, error: ApiError) -> dict[str, Any]: ...
    def frame(self, event: dict[str, Any]) -> bytes: ...


class ClientDisconnected(Exception):
    """The client has closed the connection; nobody gets the answer."""


async def until_disconnect(receive: Receive, work: Awaitable[Value]) -> Value:
    """Return the result of ``work``; cancel it if the client disconnects.

    Raises:
        ClientDisconnected: the client disconnected before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events.

    A client that reads slowly holds up only its own response: `send` waits while the socket's
    buffer is full. An error in mid-stream is an event with the API's error object, without the
    API's end of a stream after it. So is the end of a server that cancels its requests.

    Args:
        events: yields events as bytes. It is closed at the end, or when the client disconnects.
        form: see `EventForm`.
        closed: called when no more will be sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], form: EventForm, closed: Callable[[], None]
    ) -> None:
        self._events, self._form, self._closed = events, form, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        try:
            await until_disconnect(receive, self._send(send))
        except (ClientDisconnected, OSError):
            pass
        except asyncio.CancelledError:
            with suppress(asyncio.TimeoutError, OSError):
                last = self._body(send, self._error(stopping()), more=False)
                await asyncio.wait_for(last, _LAST_EVENT_S)
        finally:
            self._closed()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = self._form.last
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._body(send, data)
        except OSError:
            raise
        except Exception as error:
            last = self._error(api_error(error))
        await self._body(send, last, more=False)

    def _error(self, error: ApiError) -> bytes:
        return self._form.frame(self._form.error(error))

    @staticmethod
    async def _body(send: Send, data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})
