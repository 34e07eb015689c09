"""A thread that computes answers, one request at a time, with a bound on those that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

from .errors import overloaded
from .streaming import until_disconnect

Value = TypeVar("Value")
MAX_PENDING = 64  # requests that run or wait; more are refused


class Worker:
    """Runs functions in a thread of its own, one after another.

    Requests wait in the event loop, and not in the queue of the thread: what a client has given up
    would stay there, with the whole body of its request, until the thread comes to it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._idle = asyncio.Lock()  # held while the thread runs a function
        self._pending = 0

    async def run(self, receive: Receive, function: Callable[[], Value]) -> Value:
        """Return what ``function`` returns, or raise its error.

        A function that runs cannot be stopped: if the client disconnects, it ends by itself, and
        the next one waits for that.

        Raises:
            ApiError: too many requests run or wait.
            ClientDisconnected: the client disconnected; see `until_disconnect`.
        """
        if self._pending >= MAX_PENDING:
            raise overloaded()
        self._pending += 1
        try:
            return await until_disconnect(receive, self._run(function))
        finally:
            self._pending -= 1

    async def _run(self, function: Callable[[], Value]) -> Value:
        loop = asyncio.get_running_loop()

        def end(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed, and no request waits
                loop.call_soon_threadsafe(self._idle.release)

        await self._idle.acquire()
        work = self._executor.submit(function)
        work.add_done_callback(end)
        return await asyncio.wrap_future(work)
