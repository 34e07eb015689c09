"""Server-sent events, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError, api_error, stopping
from .http_protocol import WriteChunk, chunk_writer

Value = TypeVar("Value")
MAX_JOINED = 1 << 16  # bytes of events that are sent together, but for the last one
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
    watcher.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events.

    Events are sent by callbacks of the event loop (`wake`), since a task for each stream would cost
    more to wake than the event costs to send. A client that reads slowly holds up only its own
    response: `send` waits while the socket's buffer is full, and what comes meanwhile is sent
    together, `MAX_JOINED` bytes at a time: making events of long answers takes time, in which the
    loop does nothing else. An error in mid-stream is an event with the API's error object, without
    the API's end of a stream after it. So is the end of a server that cancels its requests.

    Args:
        events: looks up results, yields their events as bytes, and then nothing if there may be
            more results later. It is closed at the end, or when the client disconnects.
        form: see `EventForm`.
        closed: called when no more will be sent.
    """

    def __init__(
        self, events: Generator[bytes, None, None], form: EventForm, closed: Callable[[], None]
    ) -> None:
        self._events, self._form, self._closed = events, form, closed
        self._send: Send | None = None  # None before the first event, and after the last one
        self._write_chunk: WriteChunk | None = None
        self._task: asyncio.Task[Any] | None = None  # runs the response
        self._waiting: asyncio.Task[None] | None = None  # sends, as soon as there is room
        self._failure: BaseException | None = None  # of a `send` in a callback
        self._caught_up = True  # whether all results that were looked up have been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        self._write_chunk, self._task = chunk_writer(scope), asyncio.current_task()
        try:
            await self._run(receive, send)
        except OSError:
            pass
        except asyncio.CancelledError:
            with suppress(asyncio.TimeoutError, OSError):
                last = send(_body(self._error(stopping()), more=False))
                await asyncio.wait_for(last, _LAST_EVENT_S)
        finally:
            self._closed()

    async def _run(self, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # nginx would collect the events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._send = send
        try:
            self.wake()
            await _disconnect(receive)  # which ASGI also has after the last event
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            # No more events are made. The engine may know this stream until its next step.
            self._send = self._write_chunk = None
            if self._waiting is not None:
                self._waiting.cancel()
            self._events.close()

    def wake(self) -> None:
        """Send the events that there are. Called in the event loop when there may be new ones."""
        if self._send is None or self._waiting is not None:
            return
        data, more = self._new_events()
        if more and (not data or (self._write_chunk is not None and self._write_chunk(data))):
            self._go_on(data)
            return
        try:
            self._waiting = start(self._send(_body(data, more)))
        except Exception as error:
            self._fail(error)
            return
        if self._waiting is not None:
            self._waiting.add_done_callback(partial(self._sent, more))
        elif not more:
            self._send = None
        else:
            self._go_on(data)

    def _go_on(self, data: bytes) -> None:
        """Wake again after other callbacks of the loop if ``data`` may not be all there is."""
        if len(data) >= MAX_JOINED:
            asyncio.get_running_loop().call_soon(self.wake)

    def _sent(self, more: bool, task: asyncio.Task[None]) -> None:
        """Go on after a `send` that had to wait; ``more``: it was not the last one."""
        self._waiting = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
        elif not more:
            self._send = None
        else:
            self.wake()

    def _fail(self, error: BaseException) -> None:
        """End the response with an error of `send`."""
        self._send, self._failure = None, error
        if self._task is not None:
            self._task.cancel()

    def _new_events(self) -> tuple[bytes, bool]:
        """Return the events that there are, `MAX_JOINED` at most, and whether others follow.

        If the last call ended in the middle of the results that it had looked up, this one goes on
        with these, and then looks for new ones: their `wake` may be the one that led to this call.
        """
        data = bytearray()
        try:
            for part in self._events:
                data += part
                if len(data) >= MAX_JOINED:
                    self._caught_up = False
                    return bytes(data), True
                if not part:
                    if self._caught_up:
                        return bytes(data), True
                    self._caught_up = True
            data += self._form.last
        except Exception as error:
            data += self._error(api_error(error))
        return bytes(data), False

    def _error(self, error: ApiError) -> bytes:
        return self._form.frame(self._form.error(error))


def _body(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def start(work: Awaitable[None]) -> asyncio.Task[None] | None:
    """Run ``work`` until it waits; return a task for the rest of it, None if it has ended.

    A task runs nothing before the loop's next iteration (``eager_start`` is new in Python 3.12).
    """
    steps = work.__await__()
    try:
        awaited = steps.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_rest(steps, awaited))


async def run_within(seconds: float, work: Awaitable[Value]) -> Value:
    """As `asyncio.wait_for`, without a task if ``work`` does not wait.

    asyncio.TimeoutError: it took longer.
    """
    steps = work.__await__()
    try:
        awaited = steps.send(None)
    except StopIteration as end:
        return end.value
    return await asyncio.wait_for(_rest(steps, awaited), seconds)


@coroutine
def _rest(steps: Generator[Any, Any, Value], awaited: Any) -> Generator[Any, Any, Value]:
    """Run the rest of ``steps``, which wait for the future ``awaited``."""
    while True:
        try:
            resume = partial(steps.send, (yield awaited))
        except BaseException as error:  # of the future, or a cancellation
            resume = partial(steps.throw, error)
        try:
            awaited = resume()
        except StopIteration as end:
            return end.value
