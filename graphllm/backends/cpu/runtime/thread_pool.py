"""Thread pool: each thread runs the program of a whole step in one native call.

A process has one pool, which grows to the largest number of threads that any program asks for; one
program runs at a time. Workers are daemon threads that do not return from native code while the
pool lives, so they never need Python's global interpreter lock. Between programs they spin for a
moment, as the next decode step follows soon, and then sleep on a futex.

The thread that submits a program waits outside the pool, in slices, so that Python sees Ctrl-C. In
a short program it takes part itself: no thread has to be woken at the end, and there are no more
threads than cores. A thread with a small stack does not: see `_Caller`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from functools import cache

import numpy as np

from ....errors import GraphllmError
from . import step_interpreter
from .cores import MAX_THREADS
from .jit import ABORT, STATUS, Kernel

# Of workers: kernels keep up to 401 KiB on the stack. An application may give its threads less
# (`threading.stack_size`, ulimit -s).
_STACK_BYTES = 2 << 20
_CALLER_STACK_BYTES = 1 << 20  # with room for the frames of Python
_BARRIER_SPIN_NS = 400_000  # longer than one thread's small steps with cold caches
_IDLE_SPIN_NS = 2_000_000  # longer than Python needs between two tokens
_WAIT_SLICE_NS = 50_000_000  # longest time in which Python does not see a signal

# Errors that kernels report through `set_status`.
STATUS_ID, STATUS_VALUE = 1, 2
_MESSAGES = {
    STATUS_ID: "a token id or row index lies outside its table",
    STATUS_VALUE: "a value cannot be quantised",
}


@cache
def native(kernel: Kernel) -> ctypes._FuncPointer:
    """Return a kernel as a Python callable that releases the global interpreter lock."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)


class _Caller(threading.local):
    """Whether the current thread has a stack that is large enough for kernels."""

    def __init__(self) -> None:
        self.runs_kernels = _stack_bytes() >= _CALLER_STACK_BYTES


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    return libc


def _stack_bytes() -> int:
    """Return the size of the current thread's stack; that of a worker if it is not known."""
    libc, attributes, size = _libc(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    read = getattr(libc, "pthread_getattr_np", None)
    if read is None or read(ctypes.c_void_p(libc.pthread_self()), attributes):
        return _STACK_BYTES
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    libc.pthread_attr_destroy(attributes)
    return size.value


_CALLER = _Caller()


class ThreadPool:
    """Worker threads that run programs, as many as any program so far has asked for."""

    def __init__(self) -> None:
        size = step_interpreter.control_words(MAX_THREADS)
        # Aligned to a cache line, as words of different threads are a cache line apart.
        buffer = np.zeros(size + 8, np.int64)
        skip = (-buffer.ctypes.data % 64) // 8
        self._words = buffer[skip : skip + size]
        self.control = int(self._words.ctypes.data)
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._busy = False  # with a program whose submitter waits outside the pool

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that the pool itself consists of."""
        return (
            step_interpreter.worker,
            step_interpreter.start,
            step_interpreter.run_with_caller,
            step_interpreter.wait_finished,
        )

    @property
    def size(self) -> int:
        """Number of worker threads."""
        return len(self._workers)

    def _grow(self, threads: int) -> None:
        """Start workers until there are ``threads``."""
        words = self._words
        if not self._workers:
            words[:] = 0
            words[step_interpreter.TIMEOUT + 1] = _WAIT_SLICE_NS
            words[step_interpreter.BARRIER_SPIN_NS] = _BARRIER_SPIN_NS
            words[step_interpreter.IDLE_SPIN_NS] = _IDLE_SPIN_NS
            first = step_interpreter.WORKERS + step_interpreter.SPIN_LIMIT
            words[first :: step_interpreter.WORKER_WORDS] = _BARRIER_SPIN_NS
            for each in self.kernels:
                native(each)  # compile before the first use
        body = native(step_interpreter.worker)
        before = threading.stack_size(_STACK_BYTES)
        try:
            for i in range(len(self._workers), threads):
                job, name = (self.control, i, 0), f"graphllm-cpu-{i}"
                worker = threading.Thread(target=body, args=job, daemon=True, name=name)
                worker.start()
                self._workers.append(worker)
        finally:
            threading.stack_size(before)

    def run(self, program: int, threads: int, short: bool = False) -> None:
        """Run a program and wait for its end.

        Args:
            program: address of a `step_interpreter.ProgramHeader`.
            threads: number of threads that run it.
            short: the program takes less than 0.2 s and need not be interruptible.

        Raises:
            GraphllmError: a kernel reported an error.
            KeyboardInterrupt: after the program has been stopped; the pool can be used again.
        """
        with self._lock:
            if threads > len(self._workers):
                self._grow(threads)
            if self._busy:  # a second Ctrl-C interrupted the clean-up
                self._words[ABORT] = 1
                self._wait()
                self._busy = False
            if short and _CALLER.runs_kernels:
                native(step_interpreter.run_with_caller)(self.control, program, threads)
            else:
                self._run_outside(program, threads)
            status = int(self._words[STATUS])
        if status:
            raise GraphllmError(_MESSAGES.get(status, f"a CPU kernel failed with status {status}"))

    def _run_outside(self, program: int, threads: int) -> None:
        self._wait()  # until all workers have left the last program
        self._busy = True
        try:
            native(step_interpreter.start)(self.control, program, threads)
            self._wait()
        except BaseException:
            self._words[ABORT] = 1
            self._wait_uninterrupted()
            self._busy = False
            raise
        self._busy = False

    def _wait(self) -> None:
        words, wait = self._words, native(step_interpreter.wait_finished)
        while words[step_interpreter.FINISHED] != words[step_interpreter.PARTICIPANTS]:
            wait(self.control, 0, 0)

    def _wait_uninterrupted(self) -> None:
        while True:
            try:
                return self._wait()
            except KeyboardInterrupt:
                continue  # the first one is being raised already

    def stop(self) -> None:
        """Stop the running program and end all workers; the next program starts new ones."""
        if not self._workers:
            return
        self._words[ABORT] = 1
        if self._lock.acquire(timeout=1):  # a daemon thread may hold it at exit
            self._wait()
            workers, self._workers = self._workers, []
            self._words[step_interpreter.QUIT] = 1
            empty = np.zeros(len(step_interpreter.ProgramHeader._fields), np.int64)
            native(step_interpreter.start)(self.control, int(empty.ctypes.data), len(workers))
            for worker in workers:
                worker.join(timeout=1)
            self._lock.release()

    def forget(self) -> None:
        """Start over in a forked child, which does not inherit the threads."""
        self._workers, self._lock, self._busy = [], threading.Lock(), False


THREAD_POOL = ThreadPool()

os.register_at_fork(after_in_child=THREAD_POOL.forget)
atexit.register(THREAD_POOL.stop)
