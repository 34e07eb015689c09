"""The CPU backend's foundation: the thread team, and the cache of compiled kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import graphllm
from graphllm.backends import Options
from graphllm.backends.cpu import diskcache
from graphllm.backends.cpu.device import CpuDevice
from graphllm.backends.cpu.isa import threads_for, usable_cores
from graphllm.backends.cpu.jit import args, i64s, kernel, next_chunk, set_status
from graphllm.backends.cpu.team import Team, team
from graphllm.backends.cpu.walk import MEET
from graphllm.errors import GraphllmError

PACKAGE = Path(graphllm.__file__).parent
LATE, TICKETS = 99, 64


@kernel
def _meet(p, thread, threads):
    """Each thread counts its steps and complains if another is not in the same one."""
    counts, marks, tickets = args(p, 3)
    mine = i64s(counts)[thread * 8]
    for t in range(threads):
        other = i64s(counts)[t * 8]
        if other != mine and other != mine + 1:
            set_status(p, LATE)
    ticket = next_chunk(p)
    while ticket < tickets:
        i64s(marks)[ticket] += 1
        ticket = next_chunk(p)
    i64s(counts)[thread * 8] = mine + 1


@kernel
def _fail(p, thread, threads):
    if thread == 0:
        set_status(p, 1234)


class _Script:
    """``steps`` times one kernel, as a program."""

    def __init__(self, crew: Team, body, steps: int, *words: int) -> None:
        self.crew, self.steps = crew, steps
        self.tickets = np.zeros((steps, 8), np.int64)
        self.blocks = [np.array([t.ctypes.data, crew.control, *words]) for t in self.tickets]
        address = body.address if body else 0
        entries = [(address, b.ctypes.data + 16, i, MEET) for i, b in enumerate(self.blocks, 1)]
        self.entries = np.array(entries, np.int64)

    def run(self, times: np.ndarray | None = None) -> None:
        stamps = 0 if times is None else int(times.ctypes.data)
        self.tickets[:] = 0
        self.crew.run(int(self.entries.ctypes.data), self.steps, stamps)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_thread_meets_the_others_after_each_step(threads):
    counts, marks = np.zeros(8 * threads, np.int64), np.zeros(TICKETS, np.int64)
    words = (counts.ctypes.data, marks.ctypes.data, TICKETS)
    steps = 2000 if threads <= usable_cores() else 200
    script = _Script(team(threads), _meet, steps, *words)
    for _ in range(3):
        script.run()
    assert (counts[::8] == 3 * steps).all()
    assert (marks == 3 * steps).all()  # every ticket once a step


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_time_stamps_never_go_back(threads):
    times = np.zeros(101, np.int64)
    _Script(team(threads), None, 100).run(times)
    assert times[0] > 0
    assert (np.diff(times) >= 0).all()


def test_a_kernel_reports_by_status_and_the_team_lives_on():
    with pytest.raises(GraphllmError, match="1234"):
        _Script(team(2), _fail, 3).run()
    _Script(team(2), None, 3).run()


def test_a_team_can_be_stopped_and_used_again():
    crew = Team(2)
    for _ in range(2):
        _Script(crew, None, 10).run()
        crew.stop()


def test_a_forked_child_has_its_own_threads():
    script = _Script(team(2), None, 10)
    script.run()
    child = os.fork()
    if child == 0:
        try:
            script.run()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    script.run()


def test_buffers_are_zeroed_and_aligned():
    device = CpuDevice(Options(threads=2))
    for nbytes in (0, 1, 100, 5 << 20):
        buffer = device.alloc(nbytes)
        assert buffer.nbytes == nbytes and not buffer.any()
        assert nbytes == 0 or buffer.ctypes.data % 64 == 0
    assert threads_for(Options(threads=3)) == 3


# -------------------------------------------------------------------------------- other processes


def _python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("busy", [True, False])
def test_ctrl_c_stops_a_long_program(busy, tmp_path):
    """Within 0.3 s, inside a kernel that takes tickets and between short kernels alike."""
    module = tmp_path / "endless.py"
    module.write_text(
        "from graphllm.backends.cpu.jit import kernel, next_chunk\n"
        "@kernel\n"
        "def endless(p, thread, threads):\n"
        "    while next_chunk(p) < 1 << 39:\n"
        "        pass\n"
    )
    done = _python(
        f"""
        import os, signal, threading, time
        import numpy as np
        from graphllm.backends.cpu.team import team
        from endless import endless
        crew, steps = team(2), 1 if {busy} else 2_000_000
        tickets = np.zeros(1, np.int64)
        block = np.array([tickets.ctypes.data, crew.control], np.int64)
        entry = (endless.address if {busy} else 0, block.ctypes.data + 16, -1, {MEET})
        program = np.array([entry] * steps, np.int64)
        crew.run(0, 0)  # threads are up
        sent = []
        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, interrupt).start()
        try:
            while True:
                crew.run(program.ctypes.data, steps)
        except KeyboardInterrupt:
            print(time.monotonic() - sent[0])
        crew.run(0, 0)
        """,
        PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}",
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


_SCALE = """
    import numpy as np
    from graphllm import ops
    from graphllm.backends.cpu import elementwise
    from graphllm.executor import Executor
    from graphllm.tensor import feed
    print(elementwise._SILU.cached)
    ex = Executor(backends=["cpu"])
    plan = ex.compile({"y": ops.silu(feed("x", (4,), "f32"))})
    print(float(ex.run(plan, {"x": np.ones(4, np.float32)})["y"][0]))
    """


def _copied_package(folder: Path) -> Path:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "graphllm", ignore=skip)
    shutil.copytree(PACKAGE.parent / "models", folder / "models", ignore=skip)
    return folder / "graphllm" / "backends" / "cpu"


def test_kernels_are_cached_until_any_source_changes(tmp_path):
    sources = _copied_package(tmp_path)
    env = {"PYTHONPATH": str(tmp_path), "GRAPHLLM_CACHE": str(tmp_path / "cache")}

    def run() -> list[str]:
        done = _python(f"import os; os.chdir({str(tmp_path)!r})\n{textwrap.dedent(_SCALE)}", **env)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout.split()

    assert run() == ["False", "0.7310585975646973"]
    assert run() == ["True", "0.7310585975646973"]
    # silu's kernel stands in elementwise.py and calls into maths.py.
    maths = sources / "maths.py"
    text = maths.read_text()
    assert "return x / (_ONE + exp32(-x))" in text
    maths.write_text(text.replace("return x / (_ONE + exp32(-x))", "return x / (_TWO + _TWO)"))
    assert run() == ["False", "0.25"]
    for file in (tmp_path / "cache").rglob("*.bin"):
        file.write_bytes(file.read_bytes()[:100])  # damaged: compiled again
    done = _python(f"import os; os.chdir({str(tmp_path)!r})\n{textwrap.dedent(_SCALE)}", **env)
    assert done.stdout.split() == ["True", "0.25"]


def test_the_fingerprint_covers_every_source(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = diskcache.fingerprint(tmp_path)
    assert first == diskcache.fingerprint(tmp_path)
    (tmp_path / "b.py").write_text("1")
    second = diskcache.fingerprint(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert len({first, second, diskcache.fingerprint(tmp_path)}) == 3


def test_an_unwritable_cache_costs_one_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _python(_SCALE, GRAPHLLM_CACHE=str(blocked), PYTHONPATH=str(PACKAGE.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "0.7310585975646973"]
    assert len(done.stderr.splitlines()) == 1 and "not cached" in done.stderr


def test_importing_graphllm_does_not_import_numba():
    done = _python(
        "import sys, graphllm; print('numba' in sys.modules)", PYTHONPATH=str(PACKAGE.parent)
    )
    assert done.stdout.strip() == "False", done.stderr
