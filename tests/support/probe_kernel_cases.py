"""Checks of the roofline probe kernels."""

from __future__ import annotations

import numpy as np

from graphllm.backends.cpu.runtime import probe_kernels
from graphllm.backends.cpu.runtime.device import CompiledProgram, Launch
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.backends.cpu.runtime.jit import Kernel
from graphllm.backends.cpu.runtime.step_interpreter import BARRIER

ITERATIONS = 37


def combined(vectors: np.ndarray) -> int:
    """The int64 to which probe kernels combine vectors [n, 64] uint8."""
    lanes = np.bitwise_xor.reduce(np.ascontiguousarray(vectors).view(np.uint32), axis=0)
    return int(lanes.astype(np.uint64).sum() % 2**32)


def results(kernel: Kernel, threads: int, keep: np.ndarray, *words: int) -> list[int]:
    """The result of each thread of a launch."""
    sink = np.full(threads, -1, np.int64)
    launch = Launch(kernel, [*words, sink.ctypes.data])
    CompiledProgram(threads, [[launch]], [BARRIER], keep).run(None)
    return [int(number) for number in sink]


def form_of(kind: str) -> type:
    """Element type of the operands."""
    forms = {"f32": np.float32, "f16": np.float16, "int8": np.uint8 if isa().avx2 else np.int16}
    return forms[kind]


def expected_sums(kind: str, operands: np.ndarray, iterations: int) -> int:
    """`multiply_add` in NumPy, on numbers that need no rounding."""
    chain, form = probe_kernels.multiply_add_loops()[kind], form_of(kind)
    if chain.tiles:
        return expected_tiles(operands, iterations)
    vectors = operands.reshape(probe_kernels.FACTOR_VECTORS, 64).view(form)
    wide = np.int64 if kind == "int8" else form
    lanes = 16 if kind == "int8" else vectors.shape[1]
    found = []
    for i in range(chain.sums):
        at = i % chain.sets * chain.owns
        total = vectors[i].view(np.int32 if kind == "int8" else form).astype(wide)
        for turn in range(iterations):
            first = turn % probe_kernels.FACTOR_PERIOD
            own = vectors[at : at + chain.owns].astype(wide).sum(axis=0)
            factors = vectors[first : first + chain.factors].astype(wide).sum(axis=0)
            total = total + (own * factors).reshape(lanes, -1).sum(axis=1)
        found.append(total.astype(np.int32 if kind == "int8" else form).view(np.uint8))
    return combined(np.stack(found))


def expected_tiles(operands: np.ndarray, iterations: int) -> int:
    """Sums of products of two tiles: left [token][column], right [column // 4][row][column % 4]."""
    tiles = operands.reshape(2, 16, 64).astype(np.int64)
    right = [tile.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16) for tile in tiles]
    pairs = (0, 1), (0, 0), (1, 1), (1, 0)
    found = [iterations * tiles[a] @ right[b] for a, b in pairs]
    return combined(np.stack(found).astype(np.int32).reshape(64, 16).view(np.uint8))


def operands(kind: str) -> np.ndarray:
    """Small integers, as bytes."""
    form = form_of(kind)
    made = allocate(64 * probe_kernels.FACTOR_VECTORS)
    some = np.random.default_rng(1).integers(0, 4, len(made) // np.dtype(form).itemsize)
    made[:] = some.astype(form).view(np.uint8)
    return made


def wrong() -> list[str]:
    """Errors of the multiply-add kernels, by kind; test_cpu_isa.py uses it, too."""
    found = []
    for kind, chain in probe_kernels.multiply_add_loops().items():
        kernel, work = probe_kernels.multiply_add(kind)
        data = operands(kind)
        sums = results(kernel, 2, data, data.ctypes.data, ITERATIONS)
        products = chain.sums * chain.owns * chain.factors
        each = 64 // np.dtype(form_of(kind)).itemsize  # multiply-adds
        each = 16 * 16 * 64 if chain.tiles else each
        expected = [expected_sums(kind, data, ITERATIONS)] * 2
        if sums != expected or work != products * 2 * each:
            found.append(f"multiply_add {kind}: {sums}, not {expected}; {work} operations")
    return found
