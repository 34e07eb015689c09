"""Compiled programs: kernel launches that the thread pool runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import TimestampLog
from .argument_block import argument_words
from .jit import HEADER_WORDS, Kernel
from .step_interpreter import BARRIER, COUNTER_WORDS, ONE_THREAD, TIMESTAMPS, Entry, ProgramHeader
from .thread_pool import THREAD_POOL


@dataclass(frozen=True)
class Launch:
    """A kernel and its argument block.

    Attributes:
        arguments: a NamedTuple that the kernel reads by name (see `argument_block`), or plain
            64-bit words.
        overlaps_previous: a thread may start this launch before the other threads have finished the
            previous launch of the step.
    """

    kernel: Kernel
    arguments: Sequence[Any]
    overlaps_previous: bool = False


class CompiledProgram:
    """A program for the thread pool: entries and argument blocks at fixed addresses.

    Args:
        threads: number of threads that run the program.
        launches: launches of each step.
        flags: flags of the last entry of each step; see `barriers.barrier_flags`.
        keep: objects that the addresses in the argument blocks point into.
        short: see `ThreadPool.run`.
    """

    def __init__(
        self,
        threads: int,
        launches: Sequence[Sequence[Launch]],
        flags: Sequence[int],
        keep: object,
        short: bool = False,
    ) -> None:
        self._threads, self._short = threads, short
        self._keep = (keep, kernels_of(launches))
        self._blocks: list[np.ndarray] = []
        count = len(self._keep[1])
        self._counters = np.zeros((count, COUNTER_WORDS), np.int64)
        entries: list[Entry] = []
        for index, (parts, flag) in enumerate(zip(launches, flags), 1):
            for launch in parts:
                counter = int(self._counters[len(self._blocks)].ctypes.data)
                words = argument_words(launch.arguments)
                block = np.array([counter, THREAD_POOL.control, *words], np.int64)
                self._blocks.append(block)
                address = int(block.ctypes.data) + 8 * HEADER_WORDS
                if launch.overlaps_previous:
                    entries[-1] = entries[-1]._replace(flags=flag & ONE_THREAD)
                # Launches of a step wait for each other, unless one thread runs them all.
                between = flag & ONE_THREAD or BARRIER
                entries.append(Entry(launch.kernel.address, address, -1, between))
            last = entries.pop() if parts else Entry(0, 0, -1, 0)
            entries.append(last._replace(timestamp=index, flags=flag))
        self._entries = np.array(entries, np.int64).reshape(-1, len(Entry._fields))
        self._size = len(flags)
        header = ProgramHeader(
            entries=int(self._entries.ctypes.data),
            entry_count=len(entries),
            timestamps=0,
            counters=int(self._counters.ctypes.data),
            counter_count=count,
        )
        self._words = np.array(header, np.int64)
        self._address = int(self._words.ctypes.data)

    def run(self, log: TimestampLog | None) -> None:
        """See `graphllm.backends.Segment`. Without a log no timestamps are taken."""
        if log is None:
            THREAD_POOL.run(self._address, self._threads, self._short)
            return
        times = np.zeros(self._size + 1, np.int64)
        self._words[TIMESTAMPS] = int(times.ctypes.data)
        try:
            THREAD_POOL.run(self._address, self._threads, self._short)
        finally:
            self._words[TIMESTAMPS] = 0
        log.runs.append((times, times[:-1]))


def kernels_of(launches: Sequence[Sequence[Launch]]) -> list[Kernel]:
    return [launch.kernel for parts in launches for launch in parts]
