"""Compilation of several kernels in forked processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from graphllm.backends.cpu.runtime import jit, parallel_compiler
from graphllm.backends.cpu.runtime.jit import HEADER_WORDS, Kernel, args, i64s
from graphllm.backends.cpu.runtime.parallel_compiler import compile_kernels
from graphllm.errors import GraphllmError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")


def made(number: int) -> Kernel:
    """A kernel that stores a number at the address in its argument block."""

    def store(p, thread, threads):
        (out,) = args(p, 1)
        i64s(out)[0] = number

    return Kernel(store)


def stored(kernel: Kernel) -> int:
    out = np.zeros(1, np.int64)
    block = np.array([0] * HEADER_WORDS + [out.ctypes.data], np.int64)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    run(block.ctypes.data + 8 * HEADER_WORDS, 0, 1)
    return int(out[0])


@pytest.fixture
def compiled_here(tmp_path, monkeypatch):
    """Names of the kernels that this process compiled, in a cache of its own."""
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path))
    parent, here = os.getpid(), []
    compile_one = Kernel.compile

    def compile_and_note(kernel):
        if os.getpid() == parent:
            here.append(kernel.label)
        compile_one(kernel)

    monkeypatch.setattr(Kernel, "compile", compile_and_note)
    return here


def in_children(monkeypatch, action):
    """Let children call ``action`` before they compile a kernel."""
    parent, compile_one = os.getpid(), Kernel.compile

    def compile_or_act(kernel):
        if os.getpid() != parent:
            action()
        compile_one(kernel)

    monkeypatch.setattr(Kernel, "compile", compile_or_act)


def test_children_share_the_work(compiled_here, monkeypatch):
    fork, children = os.fork, []
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    kernels, shown = [made(100 + i) for i in range(12)], []
    compile_kernels(kernels, 3, lambda done, total: shown.append((done, total)))
    assert [stored(kernel) for kernel in kernels] == [100 + i for i in range(12)]
    assert len(compiled_here) < len(kernels)
    assert shown[-1] == (12, 12) and sorted(shown) == shown
    assert len(children) == 2
    for pid in children:  # none is left
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_what_a_child_leaves_is_compiled_here(compiled_here, monkeypatch):
    in_children(monkeypatch, lambda: os._exit(1))
    kernels = [made(200 + i) for i in range(4)]
    compile_kernels(kernels, 2, lambda done, total: None)
    assert [stored(kernel) for kernel in kernels] == [200, 201, 202, 203]
    assert len(compiled_here) == 4


def test_children_may_end_without_a_status(compiled_here):
    """The application ignores SIGCHLD, as its parent may have told it to."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        kernels = [made(700 + i) for i in range(6)]
        compile_kernels(kernels, 2, lambda done, total: None)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [stored(kernel) for kernel in kernels] == [700 + i for i in range(6)]


def test_a_thread_that_compiles_does_not_block_the_children(compiled_here, monkeypatch):
    """It holds the lock of the compiler while they are forked."""
    monkeypatch.setattr(parallel_compiler, "_CHILD_TIMEOUT_S", 100.0)
    jit.prepare_compiler()
    held = threading.Event()

    def hold():
        with jit._lock:
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    kernels, start = [made(600 + i) for i in range(12)], time.monotonic()
    compile_kernels(kernels, 2, lambda done, total: None)
    thread.join()
    assert len(compiled_here) < len(kernels) and time.monotonic() - start < 90


def test_without_a_cache_all_are_compiled_here(compiled_here, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "file"))
    kernels = [made(300 + i) for i in range(3)]
    compile_kernels(kernels, 2, lambda done, total: None)
    assert [stored(kernel) for kernel in kernels] == [300, 301, 302]


def test_an_error_is_raised_here(compiled_here):
    def wrong(p, thread, threads):
        return p.nothing

    with pytest.raises(GraphllmError, match="nothing"):
        compile_kernels([made(400), Kernel(wrong), made(401)], 2, lambda done, total: None)


def test_a_child_that_hangs_is_ended(compiled_here, monkeypatch):
    monkeypatch.setattr(parallel_compiler, "_CHILD_TIMEOUT_S", 0.2)
    in_children(monkeypatch, lambda: time.sleep(60))
    kernels = [made(500 + i) for i in range(3)]
    compile_kernels(kernels, 2, lambda done, total: None)
    assert [stored(kernel) for kernel in kernels] == [500, 501, 502]
