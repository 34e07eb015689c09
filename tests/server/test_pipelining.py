"""What follows a request on its connection: other requests, parts of one, and its end."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from typing import Any

import pytest
from running_server import KEY, Running


def post(**body: Any) -> bytes:
    data = json.dumps({"prompt": "hello", "ignore_eos": True, "seed": 1, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


@pytest.fixture
def slow(llm, monkeypatch):
    """Each decode step takes at least 5 ms."""
    runner = llm.engine.batcher.runner
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda *step: (time.sleep(0.005), decode(*step))[1])


def wait_until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("never true")


@pytest.mark.parametrize("extra", [b"", b"\r\n\r\n", b"POST /v1/comp", post(max_tokens=1) * 2])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_after_more_bytes_is_noticed(llm, server, slow, extra, at_once, stream):
    batcher = llm.engine.batcher
    before, request = batcher.steps, post(max_tokens=900, stream=stream)
    with connect(server) as connection:
        connection.sendall(request + (extra if at_once else b""))
        wait_until(lambda: batcher.generations)
        if not at_once:
            connection.sendall(extra)
    wait_until(lambda: not batcher.generations)
    assert batcher.steps - before < 600


def test_pipelined_requests_are_answered_in_order(server):
    """Sent at once, and while the first one runs."""
    for pause in (0, 0.02):
        with connect(server) as connection:
            for count in (30, 2, 3):
                connection.sendall(post(max_tokens=count))
                time.sleep(pause)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            found = b""
            while part := connection.recv(1 << 16):
                found += part
        bodies = [part.partition(b"\r\n\r\n")[2] for part in found.split(b"HTTP/1.1 ")[1:]]
        *answers, health = map(json.loads, bodies)
        assert [each["usage"]["completion_tokens"] for each in answers] == [30, 2, 3]
        assert health == {"status": "ok"}


def test_what_follows_a_request_is_bounded(llm, server, monkeypatch):
    """The server reads no more than it keeps; the client must wait."""
    runner, gate = llm.engine.batcher.runner, threading.Event()
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda *step: (gate.wait(30), decode(*step))[1])
    with connect(server) as connection:
        connection.sendall(post(max_tokens=5))
        wait_until(lambda: llm.engine.batcher.generations)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            for _ in range(200):
                connection.sendall(b"x" * 100_000)
        (own,) = server.server.server_state.connections
        assert len(own.conn.trailing_data[0]) < 500_000
        gate.set()
    wait_until(lambda: not llm.engine.batcher.generations)


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_is_freed_without_the_garbage_collector(server, stream):
    """Whose collections stop all requests for as long as it takes to look at all new objects."""
    gc.collect()
    gc.disable()
    try:
        with connect(server) as connection:
            connection.sendall(post(max_tokens=2, stream=stream))
            found = b""
            while not found.endswith((b"}", b"0\r\n\r\n")):
                found += connection.recv(1 << 16)
            (own,) = server.server.server_state.connections
            alive = weakref.ref(own)
            del own
        wait_until(lambda: alive() is None)
    finally:
        gc.enable()
