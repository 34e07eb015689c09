"""Packing from mapped files: bits, release of pages, and the check of scales on its own."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
from linear_cases import any_bits

from graphllm.backends.cpu.kernels.weight_packing import check_scales, pack
from graphllm.backends.cpu.runtime.host_memory import allocate
from graphllm.errors import ModelFileError
from graphllm.formats import quantization
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Meta

ROWS, COLUMNS = 3001, 12 * 256  # chunks of several rows, the last tile not full
FORMAT = dtype("q6_k")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture(scope="module")
def raw():
    return np.resize(any_bits(FORMAT, 100, COLUMNS), (ROWS, FORMAT.row_nbytes(COLUMNS)))


@pytest.fixture
def mapped(raw, tmp_path):
    """The rows in a file, behind a header that is no multiple of a page.

    Written page by page, as the page cache maps what is written at once as a whole.
    """
    path, data = tmp_path / "weights", b"header" + raw.tobytes()
    with open(path, "wb", buffering=0) as file:
        for first in range(0, len(data), mmap.PAGESIZE):
            file.write(data[first : first + mmap.PAGESIZE])
    with open(path, "rb") as file:
        area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memoryview(area), np.uint8, offset=6).reshape(raw.shape)


def resident_bytes(array: np.ndarray) -> int:
    """Bytes in memory of the mapping that holds the array."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        next(line for line in lines if line.startswith(f"{start:x}-"))
        return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@LINUX
def test_packed_rows_of_a_mapped_file_leave_memory(raw, mapped):
    packed = pack(mapped, Meta.of((ROWS, COLUMNS), FORMAT))
    assert resident_bytes(mapped) < raw.nbytes / 10
    assert np.array_equal(packed, pack(raw, Meta.of((ROWS, COLUMNS), FORMAT)))
    assert np.array_equal(mapped, raw)


@LINUX
def test_checked_rows_of_a_mapped_file_leave_memory(raw, mapped):
    check_scales(mapped, FORMAT)
    assert resident_bytes(mapped) < raw.nbytes / 10
    assert np.array_equal(mapped, raw)


def test_rows_in_anonymous_memory_stay(raw):
    """Their pages could not be read again."""
    held = allocate(raw.nbytes).reshape(raw.shape)
    held[:] = raw
    pack(held, Meta.of((ROWS, COLUMNS), FORMAT))
    check_scales(held, FORMAT)
    assert np.array_equal(held, raw)


def test_every_second_matrix(raw):
    """Rows that are not contiguous, as the halves of a joint tensor: each matrix is padded."""
    columns = COLUMNS // 2
    meta, half = Meta.of((7, 20, columns), FORMAT), raw.shape[1] // 2
    joint = raw[:140, half:]
    assert np.array_equal(pack(joint, meta), pack(joint.copy(), meta))


@pytest.mark.parametrize("row", [0, 15, 1499, ROWS - 1])
def test_the_first_row_with_a_bad_scale_is_named(raw, row):
    """As the formula in NumPy names it, and whether or not the rows are packed."""
    bad = raw.copy()
    for block, each in ((2, row), (0, ROWS - 1)):
        bad[each, (block + 1) * FORMAT.nbytes - 1] = 0x7C  # the last byte of d
    says = f"^row {row} has an infinite or NaN q6_k scale$"
    for check in (
        lambda: pack(bad, Meta.of((ROWS, COLUMNS), FORMAT)),
        lambda: check_scales(bad, FORMAT),
        lambda: quantization.check_scales(bad, FORMAT),
    ):
        with pytest.raises(ModelFileError, match=says):
            check()
