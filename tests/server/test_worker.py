"""The thread that computes the answers of encoders and tokenizers, and what waits for it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

pytest.importorskip("starlette")

from graphllm.server.errors import ApiError
from graphllm.server.streaming import ClientDisconnected
from graphllm.server.worker import MAX_PENDING, Worker


class Client:
    """A client, which disconnects when ``gone`` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Payload:
    """A function to run: it waits until it may end, and returns itself."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> Payload:
        self.began.set()
        assert self.may_end.wait(30)
        return self


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(payload: Payload) -> None:
    assert await asyncio.to_thread(payload.began.wait, 30)


def run(worker: Worker, client: Client, payload: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(worker.run(client.receive, payload))


async def disconnect(client: Client, task: asyncio.Task[Any]) -> None:
    client.gone.set()
    with pytest.raises(ClientDisconnected):
        await task


def test_one_function_runs_at_a_time():
    async def check() -> None:
        worker, payloads = Worker("test"), [Payload() for _ in range(3)]
        tasks = [run(worker, Client(), each) for each in payloads]
        for index, each in enumerate(payloads):
            await begun(each)
            assert [other.began.is_set() for other in payloads].count(True) == index + 1
            each.may_end.set()
            assert await tasks[index] is each

        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await worker.run(Client().receive, fail)
        assert await worker.run(Client().receive, lambda: 3) == 3

    asyncio.run(check())


def test_requests_of_disconnected_clients_are_dropped():
    """Those that wait are freed at once, while another one runs."""

    async def check() -> None:
        worker, running = Worker("test"), Payload()
        first = run(worker, Client(), running)
        await begun(running)
        alive = list[weakref.ref[Payload]]()
        for _ in range(100):
            client, payload = Client(), Payload()
            task = run(worker, client, payload)
            alive.append(weakref.ref(payload))
            await turns()
            await disconnect(client, task)
        del client, payload, task
        await turns()  # the loop lets go of the last task
        gc.collect()
        assert not any(each() for each in alive)
        running.may_end.set()
        assert await first is running
        assert await worker.run(Client().receive, lambda: 3) == 3

    asyncio.run(check())


def test_the_next_request_waits_for_one_whose_client_has_left():
    async def check() -> None:
        worker, left, after, client = Worker("test"), Payload(), Payload(), Client()
        task = run(worker, client, left)
        await begun(left)
        await disconnect(client, task)
        waiting = Client()
        task = run(worker, waiting, after)
        await turns()
        assert worker._executor._work_queue.qsize() == 0
        await disconnect(waiting, task)
        task = run(worker, Client(), after)
        left.may_end.set()
        after.may_end.set()
        assert await task is after

    asyncio.run(check())


def test_too_many_requests_are_refused():
    async def check() -> None:
        worker, payload = Worker("test"), Payload()
        tasks = [run(worker, Client(), payload) for _ in range(MAX_PENDING)]
        await begun(payload)
        with pytest.raises(ApiError) as error:
            await worker.run(Client().receive, payload)
        assert (error.value.status, error.value.code) == (503, "server_overloaded")
        payload.may_end.set()
        assert await asyncio.gather(*tasks) == [payload] * MAX_PENDING

    asyncio.run(check())
