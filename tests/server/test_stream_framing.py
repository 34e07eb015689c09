"""Streams as bytes of HTTP: chunks, which the server writes without h11, and HTTP/1.0."""

from __future__ import annotations

import json
import socket

import pytest
from running_server import KEY, Running


def exchange(server: Running, version: str, body: dict[str, object]) -> tuple[bytes, bytes]:
    """Send a request whose connection the server closes; return the response's head and body."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}\r\n".encode() + data)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    head_, _, rest = found.partition(b"\r\n\r\n")
    return head_.lower(), rest


def joined(chunks: bytes) -> bytes:
    """The content of a chunked body, which must be complete."""
    found = b""
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        count = int(size, 16)
        found, end, chunks = found + chunks[:count], chunks[count : count + 2], chunks[count + 2 :]
        assert end == b"\r\n"
        if not count:
            assert not chunks
            return found


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_has_chunks_only_in_http_1_1(llm, server, version):
    body = {"prompt": "hello", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    want = json.loads(exchange(server, version, body)[1])["choices"][0]["text"]
    head, data = exchange(server, version, {**body, "stream": True})
    assert (b"transfer-encoding: chunked" in head) == (version == "1.1")
    if version == "1.1":
        data = joined(data)
    *events, end = data.removesuffix(b"\n\n").split(b"\n\n")
    assert end == b"data: [DONE]"
    pieces = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert "".join(pieces) == want


def test_paths_with_and_without_parameters_and_other_methods(server):
    assert server.call("/v1/models")[0] == server.call("/v1/models/tiny")[0] == 200
    assert server.call("/v1/models/nothing")[0] == 404
    assert server.call("/v1/completions/", {"prompt": "a"})[0] == 404  # no redirection
    status, answer = server.call("/v1/completions")
    assert status == 405 and "GET /v1/completions" in answer["error"]["message"]
    connection = server.connect()
    connection.request("HEAD", "/health")
    response = connection.getresponse()
    assert response.status == 200 and response.read() == b""
    connection.close()
