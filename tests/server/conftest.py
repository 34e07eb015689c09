"""A chat model and its server, for the tests with clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chat_model
import idle_engine
import pytest
from running_server import KEY, Running

import graphllm


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """The package. Its import takes two seconds, too long for the collection of tests."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="session")
def openai() -> Any:
    """The package; see `anthropic`."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    return chat_model.load(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(llm) -> Iterator[Running]:
    running = Running(llm, keys=[KEY])
    yield running
    running.stop()
    idle_engine.check(llm)
