"""1,000 requests, three times: disconnects and malformed requests beside those that survive."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from typing import Any

import idle_engine
import pytest
import tiny_models as tiny
from running_server import Running

import graphllm

REQUESTS, AT_ONCE, ROUNDS = 1000, 200, 3
MALFORMED = (b"{", b'{"prompt": 1.5}', b'{"prompt": "a", "n": 999}', b"\xff" * 100, b"[" * 100_000)


def body(kind: int) -> dict[str, Any]:
    """One of a few requests, so that texts can be compared."""
    return {
        "prompt": "hello " * (1 + kind % 7),
        "max_tokens": 4 + 3 * kind,
        "seed": kind,
        "temperature": 1.1,
        "ignore_eos": True,
        "n": 1 + kind % 2,
        "stream": kind % 3 == 0,
    }


async def send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode())
    writer.write(data)
    return reader, writer


def texts(response: bytes, stream: bool) -> list[str]:
    """The texts of the samples of a response with status 200."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), response[:300]
    if not stream:
        choices = json.loads(rest)["choices"]
        return [each["text"] for each in choices]
    found = dict[int, str]()
    lines = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    events = b"".join(line + b"\n\n" for line in lines).split(b"data: ")
    assert events[-1].startswith(b"[DONE]")
    for event in events[1:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


async def one(port: int, rng: random.Random, want: list[list[str]]) -> str:
    """Send a request that ends in some way, and return which."""
    kind, fate = rng.randrange(len(want)), rng.choice(["survives", "survives", "leaves", "wrong"])
    data = rng.choice(MALFORMED) if fate == "wrong" else json.dumps(body(kind)).encode()
    reader, writer = await send(port, data)
    if fate == "leaves":
        await asyncio.sleep(rng.random() * 0.2)
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        return fate
    response = await reader.read()
    writer.close()
    if fate == "wrong":
        assert response.startswith(b"HTTP/1.1 400"), response[:300]
    else:
        assert texts(response, body(kind)["stream"]) == want[kind]
    return fate


async def all_requests(port: int, rng: random.Random, want: list[list[str]]) -> int:
    """Send all requests, and return how many survived."""
    places = asyncio.Semaphore(AT_ONCE)

    async def placed() -> str:
        async with places:
            return await one(port, rng, want)

    fates = await asyncio.gather(*(placed() for _ in range(REQUESTS)))
    return fates.count("survives")


@pytest.mark.long
def test_requests_survive_their_neighbours(tmp_path):
    path = tiny.write_tiny(tmp_path / "m.gguf", "llama")
    # A pool for a part of the sequences: the others wait.
    one_sequence = 128 * tiny.LAYERS * 2 * tiny.KV * tiny.WIDTH * 2
    with graphllm.load(
        path, device="cpu", context=128, max_sequences=16, kv_memory=3 * one_sequence
    ) as llm:
        server = Running(llm)
        want = [
            [each["text"] for each in server.call("/v1/completions", {**body(kind),
             "stream": False})[1]["choices"]] for kind in range(12)
        ]  # fmt: skip
        rng, objects = random.Random(7), list[int]()
        for _ in range(ROUNDS):
            survived = asyncio.run(all_requests(server.port, rng, want))
            assert survived > REQUESTS // 3
            gc.collect()
            idle_engine.check(llm)
            objects.append(sys.getallocatedblocks())
        # The first round fills caches. A leak of one object for every second request fails.
        assert objects[2] - objects[1] < REQUESTS // 2, objects
        server.stop()
