"""The loops that ceilings are measured with do all that they are paid for."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm.backends import Log
from graphllm.backends.cpu import ceiling, peaks
from graphllm.backends.cpu.ceiling import Run
from graphllm.backends.cpu.device import Launch, Program
from graphllm.backends.cpu.jit import Kernel
from graphllm.backends.cpu.layouts import allocate
from graphllm.backends.cpu.walk import MEET

NBYTES, CHUNK = 3 << 18, 256 << 10
TURNS = 37


def area(nbytes: int = NBYTES) -> np.ndarray:
    """Bytes that differ."""
    made = allocate(nbytes)
    made[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return made


def folded(vectors: np.ndarray) -> int:
    """What `peaks` keeps of vectors [n, 64] uint8."""
    lanes = np.bitwise_xor.reduce(np.ascontiguousarray(vectors).view(np.uint32), axis=0)
    return int(lanes.astype(np.uint64).sum() % 2**32)


def kept(kernel: Kernel, threads: int, keep: np.ndarray, *words: int) -> list[int]:
    """What each thread kept of a launch."""
    sink = np.full(threads, -1, np.int64)
    launch = Launch(kernel, [*words, sink.ctypes.data])
    Program(threads, [[launch]], [MEET], keep).run(None)
    return [int(number) for number in sink]


def expected_sums(kind: str, operands: np.ndarray, turns: int) -> int:
    """`multiply_add` in NumPy, with numbers that it rounds nowhere."""
    form = {"f32": np.float32, "f16": np.float16, "int8": np.uint8}[kind]
    count = peaks._sums()
    own = operands.reshape(peaks.OPERANDS, 64)[:count]
    factors = operands.reshape(peaks.OPERANDS, 64)[np.arange(turns) % peaks.OPERANDS]
    if kind == "int8":
        pairs = own[:, None].astype(np.int32) * factors[None].view(np.int8)
        sums = own.view(np.int32) + pairs.reshape(count, turns, 16, 4).sum((1, 3), np.int32)
    else:
        first = own.view(form)
        sums = first + (first[:1] * factors.view(form)).sum(axis=0, dtype=form)
    return folded(sums.astype(np.int32 if kind == "int8" else form).view(np.uint8))


def operands(kind: str) -> np.ndarray:
    """Small whole numbers, as bytes."""
    form = {"f32": np.float32, "f16": np.float16, "int8": np.uint8}[kind]
    count = 64 * peaks.OPERANDS // np.dtype(form).itemsize
    made = allocate(64 * peaks.OPERANDS)
    made[:] = np.random.default_rng(1).integers(0, 5, count).astype(form).view(np.uint8)
    return made


def wrong() -> list[str]:
    """The kinds of arithmetic whose sums are not what they should be; for test_cpu_isa.py, too."""
    found = []
    for kind in peaks.kinds():
        kernel, work = peaks.multiply_add(kind)
        data = operands(kind)
        sums = kept(kernel, 2, data, data.ctypes.data, TURNS)
        if sums != [expected_sums(kind, data, TURNS)] * 2 or work % peaks._sums():
            found.append(f"multiply_add {kind}: {sums}")
    return found


def test_arithmetic():
    assert wrong() == [] and {"f32", "int8"} <= set(peaks.kinds())
    assert set(peaks.how()) == {"f32", "f16", "int8"}


@pytest.mark.parametrize("threads", [1, 2])
def test_all_of_memory_is_read(threads):
    data = area()
    sums = kept(peaks.read, threads, data, data.ctypes.data, 0, NBYTES)
    assert sum(sums) == sum(folded(part.reshape(-1, 64)) for part in data.reshape(-1, CHUNK))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_thread_reads_all_of_a_cache(threads):
    """From a place of its own on: what it keeps is of both parts."""
    data, times = area(8 * peaks.TURN), 5
    sums = kept(peaks.cached, threads, data, data.ctypes.data, data.nbytes, times)
    for thread, found in enumerate(sums):
        first = data.nbytes // threads * thread // peaks.TURN * peaks.TURN
        parts = data[first:], data[:first]
        assert found == times * sum(folded(p.reshape(-1, 64)) for p in parts if p.size)


def test_memory_is_written_and_copied():
    def done(run: Run) -> None:
        log = Log()
        run(log)
        ((ends, _),) = log.runs
        assert ends[1] > ends[0] > 0

    data = area()
    first = data[: NBYTES // 2].copy()
    done(ceiling.copier(data, 2))
    assert (data[NBYTES // 2 :] == first).all() and (data[: NBYTES // 2] == first).all()
    done(ceiling.writer(data, 2))
    assert (data.view(np.float32) == 1).all()
    done(ceiling.reader(data, 2))
    assert (data.view(np.float32) == 1).all()


def test_caches_by_name(tmp_path):
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "64K"), ("2", "Unified", "2048K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert ceiling.caches(tmp_path) == {"L1 48 KB": 48 << 10, "L2 2 MB": 2 << 20}
    assert ceiling.caches(tmp_path / "none") == {}
    (tmp_path / "index0" / "size").write_text("big")
    assert ceiling.caches(tmp_path) == {}
