"""CPU threads: several models at once, and an idle chat."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import tiny_models as tiny
from cpu_time import cpu_seconds

import graphllm
from graphllm.backends.cpu.runtime.thread_pool import THREAD_POOL

ROUNDS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write two models of the same shape with different weights."""
    folder = tmp_path_factory.mktemp("two")
    return [tiny.write_llama(folder / f"{s}.gguf", tiny.llama_weights(s)) for s in (0, 1)]


def _tokens(llm, prompt: str, tokens: int) -> list[int]:
    return llm.generate(prompt, max_tokens=tokens, temperature=0.8, seed=5, ignore_eos=True).ids


def _together(works: list[Callable[[], list[int]]]) -> list[list[list[int]]]:
    """Return the results of each function, run repeatedly while the others run."""
    found: list[list[list[int]]] = [[] for _ in works]
    begin = threading.Barrier(len(works))

    def repeat(work: Callable[[], list[int]], into: list[list[int]]) -> None:
        begin.wait(60)
        for _ in range(ROUNDS):
            into.append(work())

    callers = [
        threading.Thread(target=repeat, args=each, daemon=True) for each in zip(works, found)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(300)
    return found


@pytest.mark.parametrize("threads", [(2, 2), (1, 2)])
def test_two_concurrent_models(files, threads):
    models = [graphllm.load(f, device="cpu", threads=n) for f, n in zip(files, threads)]
    works = [lambda llm=llm: _tokens(llm, "hello", 60) for llm in models]
    alone = [work() for work in works]
    assert alone[0] != alone[1]
    assert _together(works) == [[ids] * ROUNDS for ids in alone]


@pytest.mark.realmodel
def test_the_demo_and_another_model_at_once(files):
    """A long prefill that occupies the thread pool, concurrent with many short steps."""
    demo = graphllm.load("demo", device="cpu", context=512)
    other = graphllm.load(files[0], device="cpu")
    text = "The quick brown fox jumps over the lazy dog. " * 20

    def from_the_start() -> list[int]:
        demo.engine.clear_cache()
        return _tokens(demo, text, 8)

    works = [from_the_start, lambda: _tokens(other, "hello", 100)]
    alone = [work() for work in works]
    assert _together(works) == [[ids] * ROUNDS for ids in alone]


def test_models_share_one_thread_pool(files):
    """The pool has as many threads as the model with the most, however many models there are."""
    most = max(os.cpu_count() or 1, THREAD_POOL.size)  # earlier tests may have used more
    for threads in (1, 2, 0, 1):
        _tokens(graphllm.load(files[0], device="cpu", threads=threads), "hello", 3)
    names = [t.name for t in threading.enumerate() if t.name.startswith("graphllm-cpu")]
    assert len(names) == len(set(names)) == THREAD_POOL.size <= most


def test_an_idle_chat_uses_no_cpu_time(files):
    """At a terminal, after an answer: less than 1 % of a core."""
    import pty

    ours, theirs = pty.openpty()
    words = ["chat", str(files[0]), "--chat-template", "zephyr", "-n", "20", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "graphllm", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def read_until(pattern: bytes) -> None:
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            assert select.select([ours], [], [], 120)[0], f"no {pattern!r} in {shown!r}"
            shown += os.read(ours, 1000)
        shown = shown[found.end() :]

    try:
        read_until(b"> ")
        os.write(ours, b"Tell me a story\n")
        read_until(b"\n")  # the terminal's echo
        read_until(rb"\n(\x1b\[\?2004h)?> ")  # with bracketed paste switched on
        assert cpu_seconds(process.pid) > 0
        used = []
        while min(used, default=1) > 0.04:  # on a busy machine the answer's end takes a while
            assert len(used) < 10, used
            before = cpu_seconds(process.pid)
            time.sleep(4)
            used.append(cpu_seconds(process.pid) - before)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
