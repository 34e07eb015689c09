"""Primitives of the thread pool's native code: atomics, futex, clock, and calls of kernels."""

from __future__ import annotations

import platform
import sys
from typing import Any

from .jit import I64, _word
from .lazy_numba import cgutils, int64, intrinsic, ir, types

LINUX = sys.platform == "linux"
_SYSCALLS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98,
             "ppc64le": 221, "s390x": 238, "loongarch64": 98}  # fmt: skip
_FUTEX = _SYSCALLS.get(platform.machine().lower(), 0) if LINUX else 0
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_MONOTONIC = 1 if LINUX else 6  # CLOCK_MONOTONIC
_POLL_NS = 50_000  # sleep where there is no futex
_MACHINE = platform.machine().lower()


# ----------------------------------------------------------------------------------------- atomics
# All are sequentially consistent: a sleeper increments the count of sleepers and then reads the
# word, a waker writes the word and then reads the count. Neither pair may be reordered.


@intrinsic
def atomic_load(typingctx, base, index):
    """Load word ``index`` of the block at ``base``."""

    def generate(context, builder, sig, values):
        pointer = builder.gep(builder.inttoptr(values[0], I64.as_pointer()), [values[1]])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return int64(int64, int64), generate


def _update(operation: str) -> Any:
    @intrinsic
    def update(typingctx, base, index, value):
        def generate(context, builder, sig, values):
            pointer = builder.gep(builder.inttoptr(values[0], I64.as_pointer()), [values[1]])
            return builder.atomic_rmw(operation, pointer, values[2], "seq_cst")

        return int64(int64, int64, int64), generate

    return update


atomic_add, atomic_swap = _update("add"), _update("xchg")  # return the old value


@intrinsic
def pause(typingctx):
    """Emit the processor's hint for spin loops."""

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


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


@intrinsic
def clock_ns(typingctx):
    """Return the monotonic clock in nanoseconds, as Python's time.monotonic_ns."""

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
    """Yield the core to another thread that waits for it."""

    def generate(context, builder, sig, values):
        _call(builder, "sched_yield", ir.IntType(32))
        return context.get_dummy_value()

    return types.none(), generate


def _sleep(builder: Any, nanoseconds: int) -> None:
    spec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    first = builder.bitcast(spec, I64.as_pointer())
    builder.store(ir.Constant(I64, 0), first)
    builder.store(ir.Constant(I64, nanoseconds), builder.gep(first, [ir.Constant(I64, 1)]))
    _call(builder, "nanosleep", ir.IntType(32), first, ir.Constant(I64.as_pointer(), None))


@intrinsic
def futex_wait(typingctx, base, index, value, timeout):
    """Sleep while the low 32 bits of the word equal those of ``value``.

    ``timeout`` is the address of a timespec, or 0. Spurious wake-ups are possible.
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
    """Wake all threads that sleep on the word."""

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
def advise_pages(typingctx, address, nbytes, advice):
    """Call madvise; a failure is ignored, as it is only advice."""

    def generate(context, builder, sig, values):
        i32, pointer = ir.IntType(32), builder.inttoptr(values[0], I64.as_pointer())
        _call(builder, "madvise", i32, pointer, values[1], builder.trunc(values[2], i32))
        return context.get_dummy_value()

    return types.none(int64, int64, int64), generate


@intrinsic
def call_kernel(typingctx, address, block, thread, threads):
    """Call the kernel at ``address``."""

    def generate(context, builder, sig, values):
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(int64, int64, int64, int64), generate


@intrinsic
def load(typingctx, address):
    """Load the int64 at an address."""

    def generate(context, builder, sig, values):
        return builder.load(_word(builder, values[0], 0))

    return int64(int64), generate


@intrinsic
def store(typingctx, address, value):
    """Store an int64 at an address."""

    def generate(context, builder, sig, values):
        builder.store(values[1], _word(builder, values[0], 0))
        return context.get_dummy_value()

    return types.none(int64, int64), generate
