"""Several models of one server: loading on demand, the budget of memory, names, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models as tiny
from running_server import KEY, Running

import graphllm
from graphllm.cli.options import GenerationLoadOptions
from graphllm.cli.served_models import ServedModels
from graphllm.server.errors import ApiError
from graphllm.server.model_pool import ModelPool, ModelSource
from graphllm.server.model_router import ModelRouter

OPTIONS = GenerationLoadOptions(device="cpu", threads=1, context=128)
ASK = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Models:
    """A pool of models that are only names, whose loads wait for an event if asked to."""

    def __init__(self, sizes: dict[str, int], budget: int | None = None, timeout_s: float = 30):
        self.events: list[str] = []
        self.gate, self.fails = threading.Event(), set[str]()
        self.gate.set()
        sources = {n: ModelSource(lambda s=s: s, self.loader(n)) for n, s in sizes.items()}
        self.pool = ModelPool(sources, lambda name, *_: name, budget, timeout_s)

    def loader(self, name: str):
        def load(progress):
            assert self.gate.wait(30)
            progress("loading", 1, 2)
            if name in self.fails:
                raise graphllm.ModelFileError(f"secret/{name}: no model")
            self.events.append(f"+{name}")
            return SimpleNamespace(close=lambda: self.events.append(f"-{name}"))

        return load

    async def use(self, *names: str) -> None:
        for name in names:
            assert await self.pool.acquire(name) == name
            self.pool.release(name)


def test_idle_models_make_room_for_others():
    """The ones used least recently first, and never one that is in use."""
    models = Models({"a": 4, "b": 4, "c": 4, "huge": 13}, budget=9)

    async def run() -> None:
        await models.use("a", "b", "a", "c")
        assert models.events == ["+a", "+b", "-b", "+c"]
        await models.pool.acquire("a")
        await models.pool.acquire("a")
        await models.use("b")  # c is idle
        assert models.events[4:] == ["-c", "+b"]
        await models.pool.acquire("b")
        waiting = asyncio.create_task(models.use("c"))
        await asyncio.sleep(0.02)
        models.pool.release("a")
        await asyncio.sleep(0.02)
        assert not waiting.done() and models.pool.state("c") == {"value": "loading"}
        models.pool.release("a")  # the last use
        await waiting
        assert models.events[6:] == ["-a", "+c"]
        with pytest.raises(ApiError, match="'huge' cannot be loaded"):
            await models.use("huge")
        assert models.pool.state("huge") == {"value": "unloaded", "failed": True}
        assert [models.pool.state(n)["value"] for n in "abc"] == ["unloaded", "loaded", "loaded"]

    asyncio.run(run())
    models.pool.close()
    assert sorted(models.events[8:]) == ["-b", "-c"]


def test_requests_share_a_load_and_its_failure(capfd):
    models = Models({"a": 1, "b": 1})
    models.fails.add("b")

    async def run() -> None:
        models.gate.clear()
        tasks = [asyncio.create_task(models.use(name)) for name in "aabbb"]
        gone = asyncio.create_task(models.use("a"))
        await asyncio.sleep(0.02)
        gone.cancel()
        models.gate.set()
        first, second, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert first is second is None and models.events == ["+a"]
        for error in others:
            assert (error.status, error.code) == (500, "model_load_failed")
            assert "secret" not in error.message
        models.fails.clear()
        await models.use("b")  # which can be loaded by now

    asyncio.run(run())
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert errors == ["error: the model 'b' cannot be loaded: secret/b: no model"]
    models.pool.close()


def test_a_client_that_disconnects_as_its_model_is_loaded_does_not_use_it():
    """Also if the load ends in the same turn of the event loop in which the request is cancelled:
    a model with a use too many would never be unloaded."""
    models = Models({"a": 4, "b": 4}, budget=5)

    async def run() -> None:
        models.gate.clear()
        gone = asyncio.create_task(models.pool.acquire("a"))
        while (loading := models.pool._entries["a"].loading) is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the request waits
        loading.add_done_callback(lambda _: gone.cancel())
        models.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await models.use("b")

    asyncio.run(run())
    models.pool.close()
    assert models.events == ["+a", "-a", "+b", "-b"]


def test_a_model_that_cannot_be_served_is_closed(capfd):
    """An encoder without a tokenizer, for example. It would be in memory beside the others."""
    models = Models({"a": 4})

    def refuse(*model: object) -> None:
        raise graphllm.ModelFileError("no tokenizer")

    models.pool._make_app = refuse

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(ApiError, match="'a' cannot be loaded"):
                await models.use("a")

    asyncio.run(run())
    assert models.events == ["+a", "-a", "+a", "-a"]
    models.pool.close()


def test_waits_are_bounded():
    """For a load, and for memory of models that are in use; closing ends a load."""
    models = Models({"a": 4, "b": 4}, budget=5, timeout_s=0.05)

    async def run() -> None:
        models.gate.clear()
        with pytest.raises(ApiError, match="'a' is not loaded yet; try again") as busy:
            await models.use("a")
        assert busy.value.status == 503
        models.gate.set()
        while models.pool.loaded("a") is None:
            await asyncio.sleep(0.01)
        await models.pool.acquire("a")
        with pytest.raises(ApiError, match=r"(others are in use|not loaded yet); try again"):
            await models.use("b")
        await asyncio.sleep(0.1)
        models.pool.release("a")
        models.gate.clear()
        with pytest.raises(ApiError, match="try again"):
            await models.use("b")

    asyncio.run(run())
    threading.Timer(0.05, models.gate.set).start()
    models.pool.close()
    assert models.events == ["+a", "-a"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "bad.gguf").write_bytes(b"no model")
    return {
        "one": tiny.write_tiny(folder / "one.gguf", "llama"),
        "org/two": tiny.write_tiny(folder / "two.gguf", "qwen2"),
        "bad": folder / "bad.gguf",
    }


@pytest.fixture
def server(paths) -> Iterator[Running]:
    models = ServedModels(others=[f"{name}={path}" for name, path in paths.items()], parallel=2)
    sources = models.sources(OPTIONS)
    largest = max(sources[name].predict_bytes() for name in ("one", "org/two"))
    router = ModelRouter(sources, [KEY], budget=largest)
    running = Running(None, app=router.app)
    yield running
    running.stop()
    router.pool.close()


def test_requests_go_to_their_models(paths, server):
    def states() -> dict[str, str]:
        found = server.call("/v1/models")[1]["data"]
        return {each["id"]: each["status"]["value"] for each in found}

    assert states() == dict.fromkeys(paths, "unloaded")
    assert server.call("/v1/completions", ASK | {"model": "one"}, key=None)[0] == 401
    assert server.call("/props?model=one")[1]["error"]["code"] == "model_not_loaded"
    assert server.call("/nowhere", ASK)[0] == 404 and "loaded" not in states().values()
    for name in ("one", "org/two", "one"):
        with graphllm.load(paths[name], device="cpu", threads=1, context=128) as llm:
            want = llm.generate(**ASK).text
        status, found = server.call("/v1/completions", ASK | {"model": name})
        assert (status, found["model"], found["choices"][0]["text"]) == (200, name, want)
        assert states() == {each: "loaded" if each == name else "unloaded" for each in paths}
        assert server.call(f"/v1/models/{name}")[1]["max_model_len"] == 128
    assert server.events("/v1/completions", **ASK)[0]["model"] == "one"  # the first is the default
    status, found = server.call("/v1/completions", ASK | {"model": "bad"})
    assert (status, found["error"]["code"]) == (500, "model_load_failed")
    for name in ("../one", str(paths["one"]), "", "one\0"):
        status, found = server.call("/v1/completions", ASK | {"model": name})
        assert (status, found["error"]["code"]) == (404, "model_not_found")
    assert server.call("/v1/completions", ASK | {"model": 1})[0] == 400
    assert server.call("/v1/embeddings", {"input": "a", "model": "one"})[0] == 404
    assert server.call("/slots")[1][1]["is_processing"] is False
    assert server.call("/tokenize", {"content": "a", "model": "one"})[0] == 200
    text = server.call("/metrics")[1]
    assert text.count("# TYPE graphllm_generated_tokens_total") == 1
    assert 'graphllm_generated_tokens_total{model="one"} 18.0' in text
    assert 'graphllm_sequences_running{model="one"}' in text
    assert 'graphllm_generated_tokens_total{model="org/two"} 6.0' in text
    assert "/v1/embeddings" in server.call("/openapi.json")[1]["paths"]
