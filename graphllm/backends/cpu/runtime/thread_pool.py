"""The thread team: the program of a whole step is one native call per thread.

A process has one team, which grows to the most threads that any program asks for; programs take
turns. Members are daemon threads that never come back from native code while the team lives, so
they never need the interpreter's lock. Between programs they spin for a moment, since a decode loop
comes back soon, and then sleep on a futex.

The thread that submits a program waits outside the team, in slices, so that Ctrl-C is seen. In a
program that is over sooner than anybody could complain it is a member itself: nobody has to be
woken at the end, and no core is wanted by one thread more than there are cores.
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
from .isa import MAX_THREADS
from .jit import ABORT, STATUS, Kernel

_BARRIER_SPIN_NS = 400_000  # longer than one thread's small steps with cold caches
_IDLE_SPIN_NS = 2_000_000  # longer than Python needs between two tokens
_SLICE_NS = 50_000_000  # how long a wait may keep Python from seeing a signal

# What kernels report through `set_status`.
STATUS_ID, STATUS_VALUE = 1, 2
_MESSAGES = {
    STATUS_ID: "a token id or row index lies outside its table",
    STATUS_VALUE: "a value cannot be quantised",
}


@cache
def _native(kernel: Kernel) -> ctypes._FuncPointer:
    """A kernel as a Python callable that lets go of the interpreter's lock."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)


class ThreadPool:
    """Threads that run programs together, as many as the widest program so far wanted."""

    def __init__(self) -> None:
        size = step_interpreter.control_words(MAX_THREADS)
        # Aligned to a cache line: the words are spaced by one.
        room = np.zeros(size + 8, np.int64)
        skip = (-room.ctypes.data % 64) // 8
        self._words = room[skip : skip + size]
        self.control = int(self._words.ctypes.data)
        self._members: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._busy = False  # with a program that somebody waits for outside

    @property
    def size(self) -> int:
        """How many threads there are."""
        return len(self._members)

    def _grow(self, threads: int) -> None:
        """Start the members that are missing."""
        words = self._words
        if not self._members:
            words[:] = 0
            words[step_interpreter.TIMEOUT + 1] = _SLICE_NS
            words[step_interpreter.BARRIER_SPIN_NS], words[step_interpreter.IDLE_SPIN_NS] = (
                _BARRIER_SPIN_NS,
                _IDLE_SPIN_NS,
            )
            words[
                step_interpreter.WORKERS
                + step_interpreter.SPIN_LIMIT :: step_interpreter.WORKER_WORDS
            ] = _BARRIER_SPIN_NS
            for each in (
                step_interpreter.start,
                step_interpreter.run_with_caller,
                step_interpreter.wait_finished,
            ):
                _native(each)  # compiled before the first is needed
        body = _native(step_interpreter.worker)
        for i in range(len(self._members), threads):
            job = (self.control, i, 0)
            member = threading.Thread(target=body, args=job, daemon=True, name=f"graphllm-cpu-{i}")
            member.start()
            self._members.append(member)

    def run(self, program: int, threads: int, short: bool = False) -> None:
        """Run the program at this address on so many threads; see walk.py.

        ``short``: it is over in less than 0.2 s, and cannot be interrupted. On KeyboardInterrupt
        the team is stopped and ready again before the exception goes on. GraphllmError: a kernel's
        complaint.
        """
        with self._lock:
            if threads > len(self._members):
                self._grow(threads)
            if self._busy:  # a second Ctrl-C cut the clean-up short
                self._words[ABORT] = 1
                self._wait()
                self._busy = False
            if short:
                _native(step_interpreter.run_with_caller)(self.control, program, threads)
            else:
                self._run_outside(program, threads)
            status = int(self._words[STATUS])
        if status:
            raise GraphllmError(_MESSAGES.get(status, f"a CPU kernel failed with status {status}"))

    def _run_outside(self, program: int, threads: int) -> None:
        self._wait()  # for whoever has not left the last program yet
        self._busy = True
        try:
            _native(step_interpreter.start)(self.control, program, threads)
            self._wait()
        except BaseException:
            self._words[ABORT] = 1
            self._wait_stubbornly()
            self._busy = False
            raise
        self._busy = False

    def _wait(self) -> None:
        words, wait = self._words, _native(step_interpreter.wait_finished)
        while words[step_interpreter.FINISHED] != words[step_interpreter.PARTICIPANTS]:
            wait(self.control, 0, 0)

    def _wait_stubbornly(self) -> None:
        while True:
            try:
                return self._wait()
            except KeyboardInterrupt:
                continue  # the first one is on its way up already

    def stop(self) -> None:
        """End the threads, and what they may be doing; the next program starts new ones."""
        self._words[ABORT] = 1
        if self._lock.acquire(timeout=1):  # a daemon thread may hold it at the end of the process
            self._wait()
            members, self._members = self._members, []
            self._words[step_interpreter.QUIT] = 1
            nothing = np.zeros(step_interpreter.PROGRAM_WORDS, np.int64)
            if members:
                _native(step_interpreter.start)(
                    self.control, int(nothing.ctypes.data), len(members)
                )
            for member in members:
                member.join(timeout=1)
            self._lock.release()

    def forget(self) -> None:
        """In a forked child: the threads stayed behind with the parent."""
        self._members, self._lock, self._busy = [], threading.Lock(), False


THREAD_POOL = ThreadPool()

os.register_at_fork(after_in_child=THREAD_POOL.forget)
atexit.register(THREAD_POOL.stop)
