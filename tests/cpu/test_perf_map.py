"""The map from which `perf` reads the names of compiled kernels."""

from __future__ import annotations

import os
import stat

import pytest

from graphllm.backends.cpu.runtime import perf_map
from graphllm.backends.cpu.runtime.jit import Kernel, args, i64s
from graphllm.errors import RequestError


def made(number: int) -> Kernel:
    """A kernel that no other test uses."""

    def store(p, thread, threads):
        (out,) = args(p, 1)
        i64s(out)[0] = number

    return Kernel(store)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(perf_map, "FOLDER", tmp_path)
    monkeypatch.setenv("GRAPHLLM_PERF_MAP", "1")
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / f"perf-{os.getpid()}.map"


def entries(path) -> list[tuple[range, str]]:
    """Code range and name of each line."""
    found = []
    for line in path.read_text().splitlines():
        start, nbytes, name = line.split(" ", 2)
        found.append((range(int(start, 16), int(start, 16) + int(nbytes, 16)), name))
    return found


@pytest.mark.parametrize("how", ["compiled", "loaded"])
def test_a_kernel_is_named(path, how):
    if how == "loaded":
        _ = made(11).address
        path.unlink()
    kernel = made(11)
    assert kernel.load() == (how == "loaded")
    address = kernel.address
    found = entries(path)
    (own,) = (code for code, name in found if address in code)
    assert own.start == address and len(own) > 8
    assert {name for _, name in found} == {f"{__name__}.made.<locals>.store[11]"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_written_unless_enabled(path, monkeypatch, value):
    monkeypatch.setenv("GRAPHLLM_PERF_MAP", value)
    _ = made(12).address
    assert not path.exists()


def test_entries_are_appended_to_an_existing_file(path):
    """Python writes to the same file with -X perf."""
    path.write_text("1000 10 py::main\n")
    _ = made(13).address
    assert entries(path)[0] == (range(0x1000, 0x1010), "py::main") and len(entries(path)) > 1


def test_a_symbolic_link_is_not_followed(path, tmp_path):
    (tmp_path / "elsewhere").write_text("")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match=r"GRAPHLLM_PERF_MAP: .*perf-\d+\.map"):
        _ = made(14).address
    assert (tmp_path / "elsewhere").read_text() == ""
