"""Native code of the thread pool: barrier, and the interpreter of compiled programs.

A compiled program is a `ProgramHeader` and its `Entry` records. Every thread goes through the
entries in order and calls their kernels. An entry flagged ONE_THREAD is run by the first thread
only; all threads wait for each other after an entry flagged BARRIER, which the last one must be.
The state of the pool is one control block of 64-bit words, whose indices are listed below.

Each run of a program is a generation. Workers 0 to n - 1 run it. In a short program the thread that
submits it takes the place of worker 0, and only workers 1 to n - 1 are started.
"""

from __future__ import annotations

from typing import NamedTuple

from .argument_block import argument_reader
from .atomics import (  # fmt: skip
    atomic_add,
    atomic_load,
    atomic_swap,
    call_kernel,
    clock_ns,
    futex_wait,
    futex_wake,
    load,
    pause,
    store,
    yield_core,
)
from .jit import ABORT, STATUS, helper, kernel

ONE_THREAD, BARRIER = 1, 2  # flags of an entry


class ProgramHeader(NamedTuple):
    """A compiled program."""

    entries: int  # address of the entries
    entry_count: int
    timestamps: int  # address of int64 nanoseconds, 0: none are taken
    counters: int  # address of the launches' chunk counters, a cache line each
    counter_count: int


class Entry(NamedTuple):
    """One kernel launch of a program."""

    kernel: int  # address of the machine code, 0: nothing to call
    arguments: int  # address of the argument block
    timestamp: int  # index of the timestamp that is taken after the entry, -1: none
    flags: int


TIMESTAMPS = ProgramHeader._fields.index("timestamps")
COUNTER_WORDS = 8  # size of a chunk counter: a cache line
_ENTRY_BYTES = 8 * len(Entry._fields)
_read_program, _read_entry = argument_reader(ProgramHeader), argument_reader(Entry)

# Words of the control block. ABORT and STATUS (see jit.py) come first; words that different
# threads write are a cache line apart.
ARRIVED, PHASE = 16, 24  # threads that have reached the barrier; its phase
SLEEPERS = 32  # threads that sleep until the phase changes
QUIT = 40  # not 0: workers return
FINISHED = 48  # workers that have finished this generation
GENERATION, PROGRAM = 56, 57  # number of the generation; address of its ProgramHeader
THREADS, PARTICIPANTS = 58, 59  # threads that run the program; how many of them are workers
BARRIER_SPIN_NS, IDLE_SPIN_NS = 72, 73  # longest spin at a barrier, and between programs
TIMEOUT = 80  # a timespec
WORKERS, WORKER_WORDS = 88, 16  # index of the first worker's words, and words per worker

# Words of each worker.
RUN_GENERATION = 0  # the latest generation that the worker is to run
ASLEEP, SPIN_LIMIT = 8, 9  # whether it sleeps; how long it spins at a barrier, in nanoseconds


def control_words(workers: int) -> int:
    """Size of the control block in words."""
    return WORKERS + WORKER_WORDS * workers


# ------------------------------------------------------------------------------------- thread pool

_PAUSES = 32  # polls of the word between two reads of the clock
_MIN_SPIN_NS = 1_000


@helper
def spin(control, word, old, limit, yielding):
    """Spin for up to ``limit`` nanoseconds until the word differs from ``old``; True if it does."""
    if atomic_load(control, word) != old:
        return True
    end = clock_ns() + limit
    while clock_ns() < end:
        for _ in range(_PAUSES):
            if atomic_load(control, word) != old:
                return True
            pause()
        if yielding:
            yield_core()
    return False


@helper
def sleep(control, word, old, sleepers):
    """Sleep until the word differs from ``old``, counted in word ``sleepers`` meanwhile."""
    atomic_add(control, sleepers, 1)
    while atomic_load(control, word) == old:
        futex_wait(control, word, old, 0)
    atomic_add(control, sleepers, -1)


@helper
def wait_phase(control, thread, phase):
    """Wait for the end of the phase: spin for a bounded time, then sleep on a futex.

    The spin limit is halved after a spin that timed out (the waiting thread may be occupying the
    core that the awaited thread needs) and doubled after one that succeeded.
    """
    own = control + 8 * (WORKERS + WORKER_WORDS * thread + SPIN_LIMIT)
    limit = load(own)
    if spin(control, PHASE, phase, limit, False):
        store(own, min(2 * limit, load(control + 8 * BARRIER_SPIN_NS)))
    else:
        sleep(control, PHASE, phase, SLEEPERS)
        store(own, max(limit // 2, _MIN_SPIN_NS))


@helper
def barrier(control, thread, threads, timestamp):
    """Wait until all threads have arrived. True when the run must stop.

    The last thread to arrive decides whether the run stops, and publishes the decision in the word
    that releases the others: an odd phase means stop. If each thread read the abort word itself,
    some could leave while others wait for them. The last thread also writes the time to address
    ``timestamp`` (0: nowhere), as any other may wake up much later.
    """
    phase = atomic_load(control, PHASE)
    if atomic_add(control, ARRIVED, 1) == threads - 1:
        if timestamp != 0:
            store(timestamp, clock_ns())
        atomic_swap(control, ARRIVED, 0)
        now = (phase | 1) + (2 if atomic_load(control, ABORT) != 0 else 1)
        atomic_swap(control, PHASE, now)
        if atomic_load(control, SLEEPERS) > 0:
            futex_wake(control, PHASE)
    else:
        wait_phase(control, thread, phase)
        # The next phase cannot end before this thread arrives, so this is the published value.
        now = atomic_load(control, PHASE)
    return now & 1 != 0


@helper
def run_program(control, thread, threads):
    """Run the program of this generation as one of its threads."""
    program = _read_program(load(control + 8 * PROGRAM))
    times = program.timestamps
    # The first timestamp is taken when all threads are running.
    if times != 0 and barrier(control, thread, threads, times):
        return
    for i in range(program.entry_count):
        entry = _read_entry(program.entries + _ENTRY_BYTES * i)
        timestamp = times + 8 * entry.timestamp if times != 0 and entry.timestamp >= 0 else 0
        if entry.kernel != 0:
            if entry.flags & ONE_THREAD == 0:
                call_kernel(entry.kernel, entry.arguments, thread, threads)
            elif thread == 0:
                call_kernel(entry.kernel, entry.arguments, 0, 1)
        if entry.flags & BARRIER != 0:
            if barrier(control, thread, threads, timestamp):
                return
        elif thread == 0 and timestamp != 0:
            store(timestamp, clock_ns())


@kernel
def worker(control, thread, threads):
    """Main loop of a worker: wait for a generation to run, run its program, repeat."""
    word, generation = WORKERS + WORKER_WORDS * thread, 0
    wake_word = word + RUN_GENERATION
    while True:
        if not spin(control, wake_word, generation, load(control + 8 * IDLE_SPIN_NS), True):
            sleep(control, wake_word, generation, word + ASLEEP)
        generation = atomic_load(control, wake_word)
        if atomic_load(control, QUIT) != 0:
            break
        participants = load(control + 8 * PARTICIPANTS)
        run_program(control, thread, load(control + 8 * THREADS))
        if atomic_add(control, FINISHED, 1) == participants - 1:
            futex_wake(control, FINISHED)


@helper
def start_generation(control, program, first, threads):
    """Start workers ``first`` to ``threads`` - 1; none may still be in the last generation."""
    header = _read_program(program)
    for i in range(header.counter_count):
        store(header.counters + 8 * COUNTER_WORDS * i, 0)
    store(control + 8 * PROGRAM, program)
    store(control + 8 * THREADS, threads)
    store(control + 8 * PARTICIPANTS, threads - first)
    atomic_swap(control, ABORT, 0)
    atomic_swap(control, STATUS, 0)
    atomic_swap(control, FINISHED, 0)
    generation = atomic_add(control, GENERATION, 1) + 1
    for i in range(first, threads):
        word = WORKERS + WORKER_WORDS * i
        atomic_swap(control, word + RUN_GENERATION, generation)
        if atomic_load(control, word + ASLEEP) > 0:
            futex_wake(control, word + RUN_GENERATION)


@kernel
def start(control, program, threads):
    """Start the program on workers 0 to ``threads`` - 1 and return at once."""
    start_generation(control, program, 0, threads)


@kernel
def run_with_caller(control, program, threads):
    """Run the program with the calling thread as the first of ``threads``.

    The workers may leave it a little later. They touch nothing but the control block then.
    """
    while atomic_load(control, FINISHED) != load(control + 8 * PARTICIPANTS):
        yield_core()
    start_generation(control, program, 1, threads)
    run_program(control, 0, threads)


@kernel
def wait_finished(control, thread, threads):
    """Sleep until all participating workers have finished the program, or for TIMEOUT."""
    finished = atomic_load(control, FINISHED)
    if finished != load(control + 8 * PARTICIPANTS):
        futex_wait(control, FINISHED, finished, control + 8 * TIMEOUT)
