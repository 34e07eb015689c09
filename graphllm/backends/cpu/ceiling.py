"""What memory gives at best here: a read of every vector, and a float matrix-vector product.

Both go over one large buffer, by the team that runs plans; `graphllm.profiler.ceilings` asks for
them and keeps the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numba import types
from numba.extending import intrinsic

from ... import ops
from ...errors import GraphllmError
from ...tensor import INPUT, WEIGHT, Meta, Tensor
from .. import Bound, Header, Log, Operand, Options
from . import BACKEND
from .device import CpuDevice, Launch, Program
from .isa import usable_cores
from .jit import args, i64s, kernel, next_chunk
from .layouts import allocate
from .simd import VECTOR, Emit
from .walk import MEET

ROUNDS = 10  # of which the fastest counts
_WIDTH = 4096  # of the matrix
_UNIT = 4 * _WIDTH * 16  # bytes that both measurements divide the buffer into
_CHUNK = 256 << 10  # bytes that a reader takes at a time
_AHEAD = 1024  # bytes between a load and what is asked for
_LOADS = 4  # vectors of one turn, each with a sum of its own

Run = Callable[[Log | None], None]


@intrinsic
def _read(typingctx, at, nbytes):
    """Load every vector of a piece of memory; an int64 that depends on all of them."""

    def generate(context, builder, sig, values):
        e = Emit(builder)
        sums = [e.variable(e.i32(0)) for _ in range(_LOADS)]
        with e.loop(e.b.sdiv(values[1], e.count(_LOADS * VECTOR))) as loop:
            line = e.at(values[0], e.times(loop.index, _LOADS * VECTOR))
            for i, total in enumerate(sums):
                e.prefetch(line, _AHEAD + i * VECTOR)
                e.set(total, e.b.xor(e.get(total), e.load(line, offset=i * VECTOR)))
        found = e.get(sums[0])
        for total in sums[1:]:
            found = e.b.xor(found, e.get(total))
        return e.b.zext(e.reduce("add", found), context.get_value_type(types.int64))

    return types.int64(types.int64, types.int64), generate


@kernel(key=("read", _AHEAD, _LOADS))
def read(p, thread, threads):
    start, nbytes, sink = args(p, 3)
    chunk, total = next_chunk(p), 0
    while chunk * _CHUNK < nbytes:
        total += _read(start + chunk * _CHUNK, min(_CHUNK, nbytes - chunk * _CHUNK))
        chunk = next_chunk(p)
    i64s(sink)[thread] = total


def reader(area: np.ndarray, threads: int) -> Run:
    """A program that reads ``area``, whole turns of `_LOADS` vectors of it."""
    sink = np.zeros(threads, np.int64)
    launch = Launch(read, [area.ctypes.data, area.nbytes, sink.ctypes.data])
    return Program(threads, [[launch]], [MEET], (area, sink)).run


def product(area: np.ndarray, threads: int) -> Run:
    """A program that multiplies one row of activations with ``area`` as float32 weights."""
    options = Options("float", threads)
    device, rows = CpuDevice(options), area.nbytes // (4 * _WIDTH)
    x = Tensor(INPUT, (), {"name": "x"}, Meta.of((1, _WIDTH), "f32"), scopes=("",))
    w = Tensor(WEIGHT, (), {"name": "w"}, Meta.of((rows, _WIDTH), "f32"), scopes=("",))
    node = ops.get("linear")(x, w)
    chosen = BACKEND.select(node, options)
    if isinstance(chosen, str):
        raise GraphllmError(chosen)
    places = [device.alloc(t.meta.nbytes) for t in (x, node)]
    inputs = Operand(x.meta, places[0]), Operand(w.meta, area)
    return device.build([Bound(node, chosen, inputs, Operand(node.meta, places[1]))], Header()).run


KINDS: dict[str, Callable[[np.ndarray, int], Run]] = {
    "read": reader,
    "float matrix-vector": product,
}


def counts(cores: int) -> Iterator[int]:
    """Counts of threads to try: all of a few, else powers of two, and all cores."""
    yield from range(1, cores + 1) if cores <= 8 else [2**i for i in range(cores.bit_length())]
    if cores > 8 and cores & (cores - 1):
        yield cores


def measure(nbytes: int, show: Callable[[str, int, int], None]) -> dict[str, dict[int, float]]:
    """Bytes a second by kind and count of threads, over ``nbytes`` of memory, all of it touched.

    ``show`` is told how far it is: what, done, total.
    """
    area = allocate(max(1, nbytes // _UNIT) * _UNIT)
    area.view(np.float32)[:] = 1.0
    tries = [(kind, threads) for threads in counts(usable_cores()) for kind in KINDS]
    found: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for done, (kind, threads) in enumerate(tries):
        show("measuring memory", done, len(tries))
        run, log = KINDS[kind](area, threads), Log()
        for _ in range(ROUNDS + 1):
            run(log)
        took = (int(ends[-1] - ends[0]) for ends, _ in log.runs[1:])  # the first wakes the team
        found[kind][threads] = area.nbytes / min(took) * 1e9
    show("measuring memory", len(tries), len(tries))
    return found


BACKEND.measure = measure
