"""The native part of the thread team: atomics, futex, barrier, and the walk through a program.

A program is five words: address and count of its entries, address of the time stamps (0: none),
address and count of the launches' ticket counters, on a cache line each. An entry is four words:
kernel address (0: nothing to call), argument block, which time stamp follows it (-1: none), and
flags. Every thread goes through the entries; one marked ONE_THREAD is run by the first thread only,
and all wait for each other after an entry marked BARRIER, as the last must be. All words below
live in one control block.

Each run is a generation. Members 0 to n - 1 of the team run it; or, in a program that is over
soon, the thread that asked for it is the first and members 1 to n - 1 are called.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import ABORT, I64, STATUS, _word, helper, kernel

# Words of a program, and flags of an entry.
ENTRIES, ENTRY_COUNT, TIMESTAMPS, COUNTERS, COUNTER_COUNT = range(5)
ONE_THREAD, BARRIER = 1, 2
PROGRAM_WORDS, ENTRY_WORDS, COUNTER_WORDS = 5, 4, 8  # sizes, in words

# Words of the control block, after ABORT and STATUS (see jit.py).
ARRIVED, PHASE, SLEEPERS, QUIT = 16, 24, 32, 40
FINISHED = 48  # members that are done with this generation
GENERATION, PROGRAM, THREADS, PARTICIPANTS = 56, 57, 58, 59
BARRIER_SPIN_NS, IDLE_SPIN_NS = 72, 73  # longest spin at a barrier, and between programs
TIMEOUT = 80  # a timespec
WORKERS, WORKER_WORDS = 88, 16  # the words of each member begin there, and are so many:
RUN_GENERATION = 0  # the generation that it is called to
ASLEEP, SPIN_LIMIT = 8, 9  # whether it sleeps; how long it spins at a meeting, in nanoseconds


def control_words(members: int) -> int:
    """The size of a control block for so many members."""
    return WORKERS + WORKER_WORDS * members


LINUX = sys.platform == "linux"
_SYSCALLS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98,
             "ppc64le": 221, "s390x": 238, "loongarch64": 98}  # fmt: skip
_FUTEX = _SYSCALLS.get(platform.machine().lower(), 0) if LINUX else 0
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_MONOTONIC = 1 if LINUX else 6  # CLOCK_MONOTONIC
_POLL_NS = 50_000  # where there is no futex
_MACHINE = platform.machine().lower()


# ----------------------------------------------------------------------------------------- atomics
# Sequentially consistent throughout: a sleeper counts itself and then looks at the word, a waker
# changes the word and then looks at the count, and neither may overtake itself.


@intrinsic
def atomic_load(typingctx, base, index):
    """Word ``index`` of the block at ``base``."""

    def generate(context, builder, sig, values):
        pointer = builder.gep(builder.inttoptr(values[0], I64.as_pointer()), [values[1]])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return int64(int64, int64), generate


def _update(operation):
    @intrinsic
    def update(typingctx, base, index, value):
        def generate(context, builder, sig, values):
            pointer = builder.gep(builder.inttoptr(values[0], I64.as_pointer()), [values[1]])
            return builder.atomic_rmw(operation, pointer, values[2], "seq_cst")

        return int64(int64, int64, int64), generate

    return update


atomic_add, atomic_swap = _update("add"), _update("xchg")  # both give the value before


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a spin loop."""

    def generate(context, builder, sig, values):
        none, i32 = ir.VoidType(), ir.IntType(32)
        if _MACHINE in ("x86_64", "amd64"):
            kind = ir.FunctionType(none, [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        elif _MACHINE in ("aarch64", "arm64"):
            kind = ir.FunctionType(none, [i32])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.Constant(i32, 1)])  # yield
        return context.get_dummy_value()

    return types.none(), generate


# -------------------------------------------------------------------------------------------- libc


def _call(builder, name, result, *values):
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


@intrinsic
def clock_ns(typingctx):
    """Nanoseconds of the monotonic clock, as Python's time.monotonic_ns."""

    def generate(context, builder, sig, values):
        i32 = ir.IntType(32)
        spec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        first = builder.bitcast(spec, I64.as_pointer())
        _call(builder, "clock_gettime", i32, ir.Constant(i32, _MONOTONIC), first)
        nanos = builder.load(builder.gep(first, [ir.Constant(I64, 1)]))
        return builder.add(builder.mul(builder.load(first), ir.Constant(I64, 10**9)), nanos)

    return int64(), generate


@intrinsic
def yield_core(typingctx):
    """Let another thread have the core, if one waits for it."""

    def generate(context, builder, sig, values):
        _call(builder, "sched_yield", ir.IntType(32))
        return context.get_dummy_value()

    return types.none(), generate


def _sleep(builder, nanoseconds):
    spec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    first = builder.bitcast(spec, I64.as_pointer())
    builder.store(ir.Constant(I64, 0), first)
    builder.store(ir.Constant(I64, nanoseconds), builder.gep(first, [ir.Constant(I64, 1)]))
    _call(builder, "nanosleep", ir.IntType(32), first, ir.Constant(I64.as_pointer(), None))


@intrinsic
def futex_wait(typingctx, base, index, value, timeout):
    """Sleep while the word's low half equals ``value``'s; ``timeout``: address of a timespec or 0.

    May return early for no reason.
    """

    def generate(context, builder, sig, values):
        if _FUTEX:
            offset = builder.mul(values[1], ir.Constant(I64, 8))
            numbers = [ir.Constant(I64, v) for v in (_FUTEX, _WAIT, 0)]
            _call(
                builder, "syscall", I64, numbers[0], builder.add(values[0], offset), numbers[1],
                values[2], values[3], numbers[2], numbers[2],
            )  # fmt: skip
        else:
            _sleep(builder, _POLL_NS)
        return context.get_dummy_value()

    return types.none(int64, int64, int64, int64), generate


@intrinsic
def futex_wake(typingctx, base, index):
    """Wake all who sleep on the word."""

    def generate(context, builder, sig, values):
        if _FUTEX:
            offset = builder.mul(values[1], ir.Constant(I64, 8))
            number, wake, count, zero = (ir.Constant(I64, v) for v in (_FUTEX, _WAKE, 2**31 - 1, 0))
            _call(
                builder, "syscall", I64, number, builder.add(values[0], offset), wake, count,
                zero, zero, zero,
            )  # fmt: skip
        return context.get_dummy_value()

    return types.none(int64, int64), generate


@intrinsic
def call_kernel(typingctx, address, block, thread, threads):
    """Call machine code at ``address``."""

    def generate(context, builder, sig, values):
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(int64, int64, int64, int64), generate


@intrinsic
def load(typingctx, address):
    """The int64 at an address."""

    def generate(context, builder, sig, values):
        return builder.load(_word(builder, values[0], 0))

    return int64(int64), generate


@intrinsic
def store(typingctx, address, value):
    def generate(context, builder, sig, values):
        builder.store(values[1], _word(builder, values[0], 0))
        return context.get_dummy_value()

    return types.none(int64, int64), generate


# ----------------------------------------------------------------------------------------- the team

_PAUSES = 32  # between two looks at the clock
_LEAST_NS = 1_000


@helper
def spin(control, word, old, patience, yielding):
    """Look for so many nanoseconds whether the word is no longer ``old``. True if it is not."""
    if atomic_load(control, word) != old:
        return True
    end = clock_ns() + patience
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
    """Sleep until the word is no longer ``old``."""
    atomic_add(control, sleepers, 1)
    while atomic_load(control, word) == old:
        futex_wait(control, word, old, 0)
    atomic_add(control, sleepers, -1)


@helper
def wait_phase(control, thread, phase):
    """Until the phase is over: spin, then sleep.

    Who spins in vain may keep off the core just the one it waits for, and is less patient the next
    time; on a machine with nothing else to do hardly anyone sleeps.
    """
    own = control + 8 * (WORKERS + WORKER_WORDS * thread + SPIN_LIMIT)
    patience = load(own)
    if spin(control, PHASE, phase, patience, False):
        store(own, min(2 * patience, load(control + 8 * BARRIER_SPIN_NS)))
    else:
        sleep(control, PHASE, phase, SLEEPERS)
        store(own, max(patience // 2, _LEAST_NS))


@helper
def barrier(control, thread, threads, stamp):
    """Meet the whole team. True when the run must stop.

    Whoever comes last decides, and publishes it with what lets the others go, an odd phase: were
    each thread to look at the abort word itself, some could leave while others wait for them. The
    last one also writes the time at ``stamp`` (0: nowhere); any other may wake up much later.
    """
    phase = atomic_load(control, PHASE)
    if atomic_add(control, ARRIVED, 1) == threads - 1:
        if stamp != 0:
            store(stamp, clock_ns())
        atomic_swap(control, ARRIVED, 0)
        now = (phase | 1) + (2 if atomic_load(control, ABORT) != 0 else 1)
        atomic_swap(control, PHASE, now)
        if atomic_load(control, SLEEPERS) > 0:
            futex_wake(control, PHASE)
    else:
        wait_phase(control, thread, phase)
        now = atomic_load(control, PHASE)  # as it was published: nobody goes on without this one
    return now & 1 != 0


@helper
def run_program(control, thread, threads):
    """Run the program that the control block names."""
    program = load(control + 8 * PROGRAM)
    entries, steps = load(program + 8 * ENTRIES), load(program + 8 * ENTRY_COUNT)
    times = load(program + 8 * TIMESTAMPS)
    if times != 0 and barrier(control, thread, threads, times):  # time begins when all are up
        return
    for i in range(steps):
        entry = entries + 8 * ENTRY_WORDS * i
        address, block, flags = load(entry), load(entry + 8), load(entry + 24)
        stamp = times + 8 * load(entry + 16) if times != 0 and load(entry + 16) >= 0 else 0
        if address != 0:
            if flags & ONE_THREAD == 0:
                call_kernel(address, block, thread, threads)
            elif thread == 0:
                call_kernel(address, block, 0, 1)
        if flags & BARRIER != 0:
            if barrier(control, thread, threads, stamp):
                return
        elif thread == 0 and stamp != 0:
            store(stamp, clock_ns())


@kernel
def worker(control, thread, threads):
    """The life of a team member: wait to be called, walk the program, begin again."""
    word, generation = WORKERS + WORKER_WORDS * thread, 0
    while True:
        if not spin(
            control, word + RUN_GENERATION, generation, load(control + 8 * IDLE_SPIN_NS), True
        ):
            sleep(control, word + RUN_GENERATION, generation, word + ASLEEP)
        generation = atomic_load(control, word + RUN_GENERATION)
        if atomic_load(control, QUIT) != 0:
            break
        called = load(control + 8 * PARTICIPANTS)
        run_program(control, thread, load(control + 8 * THREADS))
        if atomic_add(control, FINISHED, 1) == called - 1:
            futex_wake(control, FINISHED)


@helper
def start_generation(control, program, first, threads):
    """Begin a generation with members ``first`` to ``threads`` - 1. All have left the last one."""
    tickets = load(program + 8 * COUNTERS)
    for i in range(load(program + 8 * COUNTER_COUNT)):
        store(tickets + 8 * COUNTER_WORDS * i, 0)
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
    """Let members 0 to ``threads`` - 1 run the program; returns at once."""
    start_generation(control, program, 0, threads)


@kernel
def run_with_caller(control, program, threads):
    """Run the program with the calling thread as the first of ``threads``.

    The others may leave it a little later. They touch nothing but the control block then.
    """
    while atomic_load(control, FINISHED) != load(control + 8 * PARTICIPANTS):
        yield_core()
    start_generation(control, program, 1, threads)
    run_program(control, 0, threads)


@kernel
def wait_finished(control, thread, threads):
    """Sleep until all members called have left the program, or for TIMEOUT."""
    left = atomic_load(control, FINISHED)
    if left != load(control + 8 * PARTICIPANTS):
        futex_wait(control, FINISHED, left, control + 8 * TIMEOUT)
