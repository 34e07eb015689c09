"""The native part of the thread team: atomics, futex, barrier, and the walk through a program.

A program is an array of four words an entry: kernel address (0: nothing to call), argument block,
which time stamp follows it (-1: none), and flags. Every thread walks it; an entry marked ALONE is
run by the first thread only, and all meet after an entry marked MEET. All words below live in one
control block, on a cache line each.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import ABORT, I64, _word, helper, kernel

# Flags and size of a program's entry.
ALONE, MEET = 1, 2
ENTRY = 4  # words

# Words of the control block, after ABORT and STATUS (see jit.py).
ARRIVED, PHASE, SLEEPERS, STOP = 24, 32, 40, 48
GENERATION, IDLE, DONE, QUIT = 56, 64, 72, 80
PROGRAM, STEPS, TIMES, SPIN_NS = 88, 89, 90, 91  # written before a generation begins
TIMEOUT = 96  # a timespec
WORDS = 104

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


@helper
def wait_change(control, word, sleepers, old):
    """Until the word is no longer ``old``: spin a while, then sleep. Returns what it is."""
    now = atomic_load(control, word)
    if now != old:
        return now
    end = clock_ns() + load(control + 8 * SPIN_NS)
    while clock_ns() < end:
        for _ in range(_PAUSES):
            now = atomic_load(control, word)
            if now != old:
                return now
            pause()
    atomic_add(control, sleepers, 1)
    now = atomic_load(control, word)
    while now == old:
        futex_wait(control, word, old, 0)
        now = atomic_load(control, word)
    atomic_add(control, sleepers, -1)
    return now


@helper
def barrier(control, threads, stamp):
    """Meet the whole team. True when the run must stop.

    Whoever comes last decides, and publishes it before letting the others go: were each thread to
    look at the abort word itself, some could leave while others wait for them. The last one also
    writes the time at ``stamp`` (0: nowhere); any other may wake up much later.
    """
    phase = atomic_load(control, PHASE)
    if atomic_add(control, ARRIVED, 1) == threads - 1:
        if stamp != 0:
            store(stamp, clock_ns())
        atomic_swap(control, ARRIVED, 0)
        atomic_swap(control, STOP, atomic_load(control, ABORT))
        atomic_swap(control, PHASE, phase + 1)
        if atomic_load(control, SLEEPERS) > 0:
            futex_wake(control, PHASE)
    else:
        wait_change(control, PHASE, SLEEPERS, phase)
    return atomic_load(control, STOP) != 0


@helper
def walk(control, thread, threads):
    """Run the program that the control block names."""
    program, steps = load(control + 8 * PROGRAM), load(control + 8 * STEPS)
    times = load(control + 8 * TIMES)
    if times != 0 and barrier(control, threads, times):  # time begins when all are up
        return
    for i in range(steps):
        entry = program + 8 * ENTRY * i
        address, block, flags = load(entry), load(entry + 8), load(entry + 24)
        stamp = times + 8 * load(entry + 16) if times != 0 and load(entry + 16) >= 0 else 0
        if address != 0:
            if flags & ALONE == 0:
                call_kernel(address, block, thread, threads)
            elif thread == 0:
                call_kernel(address, block, 0, 1)
        if flags & MEET != 0:
            if barrier(control, threads, stamp):
                return
        elif thread == 0 and stamp != 0:
            store(stamp, clock_ns())


@kernel
def worker(control, thread, threads):
    """The life of a team member: wait for a generation, walk its program, begin again."""
    generation = 0
    while True:
        generation = wait_change(control, GENERATION, IDLE, generation)
        if atomic_load(control, QUIT) != 0:
            break
        walk(control, thread, threads)
        if thread == 0:
            atomic_swap(control, DONE, generation)
            futex_wake(control, DONE)


@kernel
def begin(control, thread, threads):
    """Start a generation; the caller has filled in PROGRAM, STEPS and TIMES."""
    atomic_add(control, GENERATION, 1)
    if atomic_load(control, IDLE) > 0:
        futex_wake(control, GENERATION)


@kernel
def wait_done(control, thread, threads):
    """Sleep until the generation is done, or for TIMEOUT."""
    done = atomic_load(control, DONE)
    if done != atomic_load(control, GENERATION):
        futex_wait(control, DONE, done, control + 8 * TIMEOUT)
