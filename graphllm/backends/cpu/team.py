"""The thread team: the program of a whole step is one native call per thread.

Members are daemon threads that never come back from native code while the team lives, so they never
need the interpreter's lock. Between programs they sleep on a futex. The thread that submits a
program waits outside the team, in slices, so that Ctrl-C is seen.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from functools import cache

import numpy as np

from ...errors import GraphllmError
from . import walk
from .isa import usable_cores
from .jit import ABORT, STATUS, Kernel

_SPIN_NS = 20_000
_SLICE_NS = 50_000_000  # how long a wait may keep Python from seeing a signal

# What kernels report through `set_status`.
STATUS_ID = 1
_MESSAGES = {STATUS_ID: "a token id or row index lies outside its table"}


@cache
def _native(kernel: Kernel) -> ctypes._FuncPointer:
    """A kernel as a Python callable that lets go of the interpreter's lock."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)


class Team:
    """``threads`` threads that run programs together. Threads start with the first program."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # Aligned to a cache line: the words are spaced by one.
        room = np.zeros(walk.WORDS + 8, np.int64)
        skip = (-room.ctypes.data % 64) // 8
        self._words = room[skip : skip + walk.WORDS]
        self.control = int(self._words.ctypes.data)
        self._members: list[threading.Thread] = []

    def _start(self) -> None:
        words = self._words
        words[:] = 0
        words[walk.TIMEOUT + 1] = _SLICE_NS
        # With more threads than cores, whoever spins keeps off the core someone it waits for.
        words[walk.SPIN_NS] = _SPIN_NS if self.threads <= usable_cores() else 0
        body = _native(walk.worker)
        _native(walk.begin), _native(walk.wait_done)  # compiled before the first is needed
        for i in range(self.threads):
            job = (self.control, i, self.threads)
            member = threading.Thread(target=body, args=job, daemon=True, name=f"graphllm-cpu-{i}")
            self._members.append(member)
            member.start()

    def run(self, program: int, steps: int, times: int = 0) -> None:
        """Run ``steps`` entries at address ``program``; see walk.py. One program at a time.

        ``times``: address of int64 time stamps, 0 for none. On KeyboardInterrupt the team is
        stopped and ready again before the exception goes on. GraphllmError: a kernel's complaint.
        """
        with _lock:
            if not self._members:
                self._start()
            words = self._words
            if words[walk.DONE] != words[walk.GENERATION]:  # a second Ctrl-C cut the clean-up short
                words[ABORT] = 1
                self._wait()
            words[ABORT] = words[STATUS] = 0
            words[walk.PROGRAM], words[walk.STEPS], words[walk.TIMES] = program, steps, times
            try:
                _native(walk.begin)(self.control, 0, 0)
                self._wait()
            except BaseException:
                words[ABORT] = 1
                self._wait_stubbornly()
                raise
            status = int(words[STATUS])
        if status:
            raise GraphllmError(_MESSAGES.get(status, f"a CPU kernel failed with status {status}"))

    def _wait(self) -> None:
        words, wait = self._words, _native(walk.wait_done)
        while words[walk.DONE] != words[walk.GENERATION]:
            wait(self.control, 0, 0)

    def _wait_stubbornly(self) -> None:
        while True:
            try:
                return self._wait()
            except KeyboardInterrupt:
                continue  # the first one is on its way up already

    def stop(self) -> None:
        """End the threads; the next program starts new ones."""
        members, self._members = self._members, []
        if members:
            self._words[walk.QUIT] = 1
            _native(walk.begin)(self.control, 0, 0)
            for member in members:
                member.join(timeout=1)

    def forget(self) -> None:
        """In a forked child: the threads stayed behind with the parent."""
        self._members = []


_lock = threading.Lock()
_teams: dict[int, Team] = {}


def team(threads: int) -> Team:
    """The process's team of that size."""
    if threads not in _teams:
        _teams[threads] = Team(threads)
    return _teams[threads]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for each in _teams.values():
        each.forget()


def _at_exit() -> None:
    for each in _teams.values():
        each.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
