"""Check that requests have left nothing behind."""

from __future__ import annotations

import threading

import graphllm


def check(llm: graphllm.LLM) -> None:
    """No request is left, no request holds blocks of the cache, and no thread runs steps."""
    llm.engine.worker.join()
    with llm.engine.lock.hold("a test"):
        llm.engine.settle()
        llm.engine.manager.check()
        assert set(llm.engine.manager.held.values()) == {0}
    assert not llm.engine.batcher.generations
    assert not [t for t in threading.enumerate() if t.name == "graphllm-worker"]
