"""Streams of server-sent events: how their parts are divided, slow readers, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from loop_turns import LoopTurns

pytest.importorskip("starlette")

from graphllm.server.errors import ApiError
from graphllm.server.streaming import MAX_JOINED, EventStream


class Form:
    """An `EventForm`."""

    last = b"end"

    def error(self, error: ApiError) -> dict[str, Any]:
        raise AssertionError(error)

    def frame(self, event: dict[str, Any]) -> bytes:
        raise AssertionError


class Stream:
    """A stream of parts of 10,000 bytes, and its client.

    Attributes:
        results: number of parts that are there and were not looked up.
        ended: whether these are the last ones.
    """

    def __init__(self, slow: bool) -> None:
        self.results, self.ended = 100, True
        self.turns, self.made, self.sent = LoopTurns(), 0, list[tuple[int, int]]()
        self.disconnect, self.room = asyncio.Event(), asyncio.Event()
        self.stream = EventStream(self._events(), Form(), lambda: None)
        self._slow = slow

    def _events(self) -> Generator[bytes, None, None]:
        while True:
            found, ended, self.results = self.results, self.ended, 0
            for _ in range(found):
                self.made += 1
                yield b"x" * 10_000
            if ended:
                return
            yield b""

    async def _receive(self) -> dict[str, Any]:
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append((len(message["body"]), self.turns.count))
            if self._slow:
                await self.room.wait()
            if not message["more_body"]:
                self.disconnect.set()  # as ASGI has it after a response

    async def run(self) -> None:
        await self.stream({"http_version": "1.0"}, self._receive, self._send)


def test_a_stream_sends_long_answers_step_by_step():
    """The loop runs between the parts of events that were all there at once."""

    async def run() -> Stream:
        stream = Stream(slow=False)
        await stream.run()
        return stream

    sent = asyncio.run(run()).sent
    sizes, turns = zip(*sent, strict=True)
    assert sum(sizes) == 100 * 10_000 + len(Form.last) and max(sizes) <= MAX_JOINED + 10_000
    assert len(set(turns)) == len(turns) > 10


def test_results_that_come_while_a_slow_reader_waits_are_sent():
    """Also the last ones: `wake` is called once for them, when older parts are yet to be sent."""

    async def run() -> Stream:
        stream = Stream(slow=True)
        stream.results, stream.ended = 10, False
        task = asyncio.ensure_future(stream.run())
        while not stream.sent:
            await asyncio.sleep(0)
        stream.results, stream.ended = 3, True
        stream.stream.wake()
        stream.room.set()
        await asyncio.wait_for(task, 60)
        return stream

    stream = asyncio.run(run())
    assert stream.made == 13
    assert sum(size for size, _ in stream.sent) == 13 * 10_000 + len(Form.last)


def test_no_events_are_made_after_a_disconnect():
    """Also if there is room for more in the same turn of the loop in which the client leaves."""

    async def run() -> tuple[int, Stream]:
        stream = Stream(slow=True)
        task = asyncio.ensure_future(stream.run())
        while not stream.sent:
            await asyncio.sleep(0)
        made = stream.made
        stream.room.set()
        stream.disconnect.set()
        await task
        return made, stream

    made, stream = asyncio.run(run())
    assert stream.made == made < 10 and len(stream.sent) == 1


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_an_error_of_send_ends_the_response(slow, known):
    """Of a `send` that waits or does not, in a callback or when the response begins.

    The client does not disconnect.
    """

    async def run() -> Stream:
        stream = Stream(slow)
        stream.results, stream.ended = (5 if known else 0), False
        send = stream._send

        async def failing(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                raise ValueError("no")

        task = asyncio.ensure_future(
            stream.stream({"http_version": "1.0"}, stream._receive, failing)
        )
        for _ in range(3):
            await asyncio.sleep(0)
        stream.results = 5
        stream.stream.wake()
        await asyncio.sleep(0)
        stream.room.set()
        with pytest.raises(ValueError, match="no"):
            await asyncio.wait_for(task, 60)
        stream.stream.wake()
        return stream

    assert len(asyncio.run(run()).sent) == 1
