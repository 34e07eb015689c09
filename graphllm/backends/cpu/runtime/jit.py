"""Kernels compiled by Numba, and the primitives they are written with.

    @kernel
    def double(p, thread, threads):
        x, y, n_at = args(p, 3)              # the argument block: 64-bit integers
        a, b, n = f32s(x), f32s(y), load_i64(n_at)
        c = next_chunk(p)                    # chunks 0, 1, 2, ... are shared out among the threads
        while c * 1024 < n:
            for i in range(c * 1024, min(n, c * 1024 + 1024)):
                b[i] = a[i] * float32(2)
            c = next_chunk(p)

Every thread of the pool calls the kernel, or a single thread as ``(p, 0, 1)`` if the step is small;
each launch has its own chunk counter. A kernel never raises and never allocates. It is compiled, or
loaded from the disk cache, when its address is first needed. The two words before an argument block
are the addresses of the launch's chunk counter and of the thread pool's control block. See
`argument_block` for blocks with named fields.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....debug import debug
from ....env import debug_level, perf_map_enabled
from .kernel_cache import DiskCache, load_machine_code
from .lazy_numba import (  # fmt: skip
    RequireLiteralValue,
    activate,
    cgutils,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    intrinsic,
    ir,
    is_own,
    lazy,
    register,
    types,
    uint8,
    uint16,
    uint32,
)
from .machine_code import Function

# ----------------------------------------------------------------------------------- control block

# Words of the control block that kernels use, a cache line each; step_interpreter.py has the rest.
ABORT, STATUS = 0, 8
# Words before an argument block: addresses of the control block and of the chunk counter.
CONTROL_WORD, COUNTER_WORD, HEADER_WORDS = -1, -2, 2
NO_CHUNK = 1 << 40  # beyond every chunk: no work is left

# --------------------------------------------------------------------------------------- compiling

_PLAIN = (int, str, bool, float, type(None))
_lock = threading.RLock()  # of loading and compiling


def linked(function: Callable[..., Any], fastmath: bool | set[str] = False, **options: Any) -> Any:
    """Return a Numba function that kernels call; ``options`` are those of `numba.njit`.

    ``fastmath`` = True stands for the flags of kernels. The function has no entry points for Python
    and C, and no machine code of its own.
    """

    def make() -> Any:
        import numba

        from .compiler import FASTMATH, helper_pipeline

        return numba.njit(
            boundscheck=False,
            error_model="numpy",
            no_cpython_wrapper=True,
            no_cfunc_wrapper=True,
            pipeline_class=helper_pipeline,
            fastmath=FASTMATH if fastmath is True else fastmath,
            **options,
        )(function)

    register(function)
    return lazy(make)


def helper(function: Callable[..., Any]) -> Any:
    """Decorator for a function that kernels call. It is compiled into each kernel."""
    return linked(function, fastmath=True)


def inlined(function: Callable[..., Any]) -> Any:
    """As `helper`, for functions called in loops: a loop with a call in it is not vectorised."""
    return linked(function, fastmath=True, forceinline=True)


def exact_helper(function: Callable[..., Any]) -> Any:
    """As `helper`, for arithmetic that must round exactly as written."""
    return linked(function)


class Kernel:
    """A function ``f(p, thread, threads)`` that is compiled when it is first needed."""

    def __init__(self, function: Callable[..., Any], key: tuple[Any, ...] | None = None) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.function = function
        self.seconds = 0.0  # spent compiling or loading
        self._address = 0
        own = _closure(function) if key is None else key
        self.label = f"{self.name}[{', '.join(map(str, own))}]" if own else self.name
        code = "" if is_own(function) else _code_key(function)
        self._cache = DiskCache(repr((self.name, own, code)))
        register(function)

    @property
    def compiled(self) -> bool:
        """Whether the machine code is in memory."""
        return self._address != 0

    def load(self) -> bool:
        """Load the machine code from the disk cache. Returns whether it is in memory now."""
        # Debug level 4 prints LLVM code, which exists only while compiling.
        with _lock:
            if self._address == 0 and debug_level() < 4:
                start = time.perf_counter()
                found = self._cache.load()
                if found is not None:
                    self._done("loaded", start, *found)
        return self._address != 0

    def compile(self) -> None:
        """Compile unless the machine code is in memory, and save the result in the disk cache."""
        with _lock:
            if self._address == 0:
                start = time.perf_counter()
                activate()
                from .compiler import compile_kernel

                code, symbol, reusable = compile_kernel(self.name, self.function)
                if reusable:
                    self._cache.save(code, symbol)
                self._done("compiled", start, *load_machine_code(code, symbol))

    @property
    def address(self) -> int:
        """Address of the machine code, which is loaded or compiled at the first call."""
        if self._address == 0 and not self.load():
            self.compile()
        return self._address

    def _done(self, how: str, start: float, address: int, functions: list[Function]) -> None:
        self._address = address
        self.seconds = time.perf_counter() - start
        debug(1, f"kernel {self.name}: {how}, {self.seconds:.3f} s")
        if perf_map_enabled():
            from . import perf_map

            perf_map.add_symbols(self.label, functions)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def prepare_compiler() -> None:
    """Import Numba, its implementations of Python's functions included."""
    activate()
    from .compiler import prepare

    prepare()


@contextmanager
def compiler_locks() -> Iterator[None]:
    """Wait until no other thread loads or compiles, and keep it so."""
    from numba.core.compiler_lock import global_compiler_lock

    with _lock, global_compiler_lock:
        yield


def _code_key(function: Callable[..., Any]) -> str:
    """Hash of the code of a kernel that is defined outside this backend."""
    from .kernel_key import code_key

    return code_key(function, closure=False)


def _closure(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Values that a kernel closes over; they distinguish kernels made by one factory."""
    cells = function.__closure__ or ()
    values = tuple(cell.cell_contents for cell in cells)
    other = [v for v in values if not isinstance(v, _PLAIN)]
    if other:
        raise TypeError(f"{function.__qualname__} closes over {other}: pass kernel(key=...)")
    return values


def kernel(function: Any = None, *, key: tuple[Any, ...] | None = None) -> Any:
    """Decorator that makes a function of this package a lazy `Kernel`.

    Functions made by one factory are distinguished by the numbers and strings they close over. One
    that closes over anything else (such as an intrinsic made for a shape) needs a ``key`` of
    numbers and strings.
    """
    if function is None:
        return lambda f: Kernel(f, key)
    return Kernel(function, key)


# ------------------------------------------------------------------------------- argument blocks


def f32_bits(value: float) -> int:
    """Bits of a float32 as an integer; the inverse of `as_f32`."""
    return struct.unpack("<i", struct.pack("<f", np.float32(value)))[0]


I64 = lazy(lambda: ir.IntType(64))


def _word(builder: Any, address: Any, index: int) -> Any:
    """Pointer to the 64-bit word ``index`` words after ``address``."""
    pointer = builder.inttoptr(address, I64.as_pointer())
    return builder.gep(pointer, [ir.Constant(I64, index)])


@intrinsic(prefer_literal=True)
def args(typingctx, p, n):
    """Return the first ``n`` (a literal) words of the argument block as a tuple of int64."""
    if not isinstance(n, types.IntegerLiteral):
        raise RequireLiteralValue("args(p, n) needs a literal n")
    count = n.literal_value

    def generate(context, builder, sig, values):
        words = [builder.load(_word(builder, values[0], i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, words)

    return types.UniTuple(int64, count)(int64, n), generate


@intrinsic(prefer_literal=True)
def f32_args(typingctx, p, first, n):
    """Return the low halves of ``n`` words from ``first`` on (literals) as a tuple of float32."""
    if not all(isinstance(each, types.IntegerLiteral) for each in (first, n)):
        raise RequireLiteralValue("f32_args(p, first, n) needs literals")
    start, count = first.literal_value, n.literal_value

    def generate(context, builder, sig, values):
        words = [builder.load(_word(builder, values[0], start + i)) for i in range(count)]
        floats = [_low_f32(builder, word) for word in words]
        return context.make_tuple(builder, sig.return_type, floats)

    return types.UniTuple(float32, count)(int64, first, n), generate


@intrinsic
def next_chunk(typingctx, p):
    """Take the next chunk, an int64 counted from 0; `NO_CHUNK` once the run is being stopped."""

    def generate(context, builder, sig, values):
        control = builder.load(_word(builder, values[0], CONTROL_WORD))
        counter = builder.load(_word(builder, values[0], COUNTER_WORD))
        abort = builder.load_atomic(_word(builder, control, ABORT), "monotonic", 8)
        one = ir.Constant(I64, 1)
        chunk = builder.atomic_rmw("add", _word(builder, counter, 0), one, "monotonic")
        go = builder.icmp_signed("==", abort, ir.Constant(I64, 0))
        return builder.select(go, chunk, ir.Constant(I64, NO_CHUNK))

    return int64(int64), generate


@intrinsic
def set_status(typingctx, p, code):
    """Report an error of this run; the first code other than 0 is raised when the run ends."""

    def generate(context, builder, sig, values):
        control = builder.load(_word(builder, values[0], CONTROL_WORD))
        zero = ir.Constant(I64, 0)
        builder.cmpxchg(_word(builder, control, STATUS), zero, values[1], "monotonic", "monotonic")
        return context.get_dummy_value()

    return types.none(int64, int64), generate


# ----------------------------------------------------------------------------------- bits and views


def _bits(result: Any, cast: Callable[[Any, Any], Any], operand: Any = None) -> Any:
    """Make an intrinsic that reinterprets one value."""

    @intrinsic
    def reinterpret(typingctx, value):
        def generate(context, builder, sig, values):
            return cast(builder, values[0])

        return result(operand or int64), generate

    return reinterpret


def _low_f32(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.trunc(value, ir.IntType(32)), ir.FloatType())


def _half_to_f32(builder: Any, value: Any) -> Any:
    return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())


def _f32_to_half(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


_I32 = lazy(lambda: ir.IntType(32))
as_f32 = _bits(float32, _low_f32)  # the low 32 bits of a word
as_f64 = _bits(float64, lambda b, v: b.bitcast(v, ir.DoubleType()))
f16_to_f32 = _bits(float32, _half_to_f32, uint16)  # the bits of a float16
f32_to_f16 = _bits(uint16, _f32_to_half, float32)  # nearest even
bits_f32 = _bits(int32, lambda b, v: b.bitcast(v, _I32), float32)
f32_of_bits = _bits(float32, lambda b, v: b.bitcast(v, ir.FloatType()), int32)
f64_as_bits = _bits(int64, lambda b, v: b.bitcast(v, I64), float64)
load_i64 = _bits(int64, lambda b, v: b.load(_word(b, v, 0)))


def _view(element: Any) -> Any:
    """Make an intrinsic that turns an address into a pointer, indexed without bounds checks."""

    @intrinsic
    def view(typingctx, address, n=None):
        pointer = types.CPointer(element)

        def generate(context, builder, sig, values):
            return builder.inttoptr(values[0], context.get_value_type(pointer))

        return pointer(int64, n or types.Omitted(None)), generate

    return view


f32s, f64s = _view(float32), _view(float64)
f16s = u16s = _view(uint16)  # a float16 is represented by its bits; see f16_to_f32
u8s, i8s = _view(uint8), _view(int8)
i16s, i32s, i64s = _view(int16), _view(int32), _view(int64)
u32s = _view(uint32)


@inlined
def bf16_to_f32(bits):
    """Convert a bfloat16, given by its bits as uint16, to float32."""
    return f32_of_bits(types.int32(types.uint32(bits) << types.uint32(16)))


@inlined
def f32_to_bf16(value):
    """Round to the nearest bfloat16 (ties to even); returns its bits as uint16. NaN stays NaN."""
    bits = types.uint32(bits_f32(value))
    if value != value:
        return types.uint16((bits >> types.uint32(16)) | types.uint32(0x40))
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at ``address``."""

    def generate(context, builder, sig, values):
        pointer = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        kinds = [ir.IntType(32)] * 3
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer.type, *kinds]),
            "llvm.prefetch.p0",
        )
        builder.call(function, [pointer, *(ir.Constant(k, v) for k, v in zip(kinds, (0, 3, 1)))])
        return context.get_dummy_value()

    return types.none(int64), generate
