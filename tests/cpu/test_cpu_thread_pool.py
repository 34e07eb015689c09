"""The CPU backend's foundation: the thread pool, and the cache of compiled kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from math import inf
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import Linkage

import graphllm
from graphllm.backends import Options
from graphllm.backends.cpu.kernels import fused_attention, routing, sampling
from graphllm.backends.cpu.runtime import isa, kernel_cache
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.backends.cpu.runtime.isa import MAX_THREADS, cgroup_cores, thread_count, usable_cores
from graphllm.backends.cpu.runtime.jit import args, i64s, kernel, next_chunk, set_status
from graphllm.backends.cpu.runtime.step_interpreter import BARRIER, run_with_caller
from graphllm.backends.cpu.runtime.thread_pool import THREAD_POOL, ThreadPool
from graphllm.errors import GraphllmError

PACKAGE = Path(graphllm.__file__).parent
LATE, COUNTERS = 99, 64


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

    def __init__(self, threads: int, body, steps: int, *words: int, short=False, crew=THREAD_POOL):
        self.crew, self.threads, self.short = crew, threads, short
        self.tickets = np.zeros((steps, 8), np.int64)
        self.blocks = [np.array([t.ctypes.data, crew.control, *words]) for t in self.tickets]
        address = body.address if body else 0
        entries = [(address, b.ctypes.data + 16, i, BARRIER) for i, b in enumerate(self.blocks, 1)]
        self.entries = np.array(entries, np.int64)
        self.words = np.array([self.entries.ctypes.data, steps, 0, self.tickets.ctypes.data, steps])

    def run(self, times: np.ndarray | None = None) -> None:
        self.words[2] = 0 if times is None else times.ctypes.data
        self.crew.run(int(self.words.ctypes.data), self.threads, self.short)


def _counting(threads: int, steps: int, **options) -> tuple[_Script, np.ndarray, np.ndarray]:
    """A program that checks itself, the steps of each thread, the turns of each ticket."""
    counts, marks = np.zeros(8 * threads, np.int64), np.zeros(COUNTERS, np.int64)
    words = (counts.ctypes.data, marks.ctypes.data, COUNTERS)
    return _Script(threads, _meet, steps, *words, **options), counts[::8], marks


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_thread_meets_the_others_after_each_step(threads, short):
    steps = 2000 if threads <= usable_cores() else 200
    script, counts, marks = _counting(threads, steps, short=short)
    for _ in range(3):
        script.run()
    assert (counts == 3 * steps).all()
    assert (marks == 3 * steps).all()  # every ticket once a step


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_time_stamps_never_go_back(threads):
    times = np.zeros(101, np.int64)
    for short in (True, False):
        _Script(threads, None, 100, short=short).run(times)
        assert times[0] > 0
        assert (np.diff(times) >= 0).all()


def test_a_kernel_reports_by_status_and_the_team_lives_on():
    for short in (True, False):
        with pytest.raises(GraphllmError, match="1234"):
            _Script(2, _fail, 3, short=short).run()
        _Script(2, None, 3, short=short).run()


def test_a_team_can_be_stopped_and_used_again():
    crew = ThreadPool()
    for short in (True, False, True):
        _Script(2, None, 10, short=short, crew=crew).run()
        crew.stop()
        assert crew.size == 0


def test_a_team_grows_to_the_most_threads_and_no_further():
    """Whatever comes after one another: programs of fewer threads use the first of them."""
    crew = ThreadPool()
    for threads, size in ((2, 2), (1, 2), (4, 4), (3, 4), (2, 4)):
        for short in (False, True):
            script, counts, marks = _counting(threads, 50, short=short, crew=crew)
            script.run()
            assert (counts == 50).all() and (marks == 50).all()
            assert crew.size == size
    names = [t.name for t in threading.enumerate()]
    crew.stop()
    assert len(names) - len(threading.enumerate()) == 4


def test_programs_of_several_threads_take_turns():
    """Each checks itself; more of them than cores, wider and narrower than each other."""
    scripts = [_counting(n, 300, short=n % 2 == 0) for n in (1, 2, 3, 4)]

    def repeat(script: _Script) -> None:
        for _ in range(20):
            script.run()

    callers = [threading.Thread(target=repeat, args=(s,), daemon=True) for s, _, _ in scripts]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for _, counts, marks in scripts:
        assert (counts == 20 * 300).all() and (marks == 20 * 300).all()


@pytest.mark.parametrize("short", [True, False])
def test_a_forked_child_has_its_own_threads(short):
    script = _Script(2, None, 10, short=short)
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


# ------------------------------------------------------------------------------------------- cores


def _fake(folder: Path, groups: str, mounts: list[str], limits: dict[str, str]) -> Path:
    """A /proc/self in ``folder`` whose control groups are mounted in ``folder``, too."""
    process = folder / "self"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    lines = [f"3{i} 23 0:2{i} {m.replace('@', str(folder))}\n" for i, m in enumerate(mounts)]
    (process / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "".join(lines))
    for name, text in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return process


V2 = "/ @/sys rw,nosuid shared:9 - cgroup2 cgroup2 rw"
V1 = "/ @/sys/cpu rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "/ @/sys/memory rw - cgroup cgroup rw,memory"
INSIDE = "/docker/abc @/sys/cpu rw - cgroup cgroup rw,cpu"  # a container's view of version 1


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "want"),
    [
        ("0::/\n", [V2], {}, inf),
        ("0::/a\n", [V2], {"sys/a/cpu.max": "max 100000\n"}, inf),
        ("0::/a\n", [V2], {"sys/a/cpu.max": "150000 100000\n"}, 1.5),
        # The smallest on the path counts, and no neighbour's.
        ("0::/a/b/c\n", [V2], {"sys/a/cpu.max": "200000 100000", "sys/a/b/c/cpu.max": "3 1",
                               "sys/a/d/cpu.max": "1 1"}, 2),
        ("0::/a/b\n", [V2], {"sys/a/b/cpu.max": "50000 100000", "sys/a/cpu.max": "max 1"}, 0.5),
        ("0::/../up\n", [V2], {"sys/cpu.max": "2 1"}, 2),  # outside of what is mounted
        ("4:cpu,cpuacct:/a/b\n2:memory:/c\n", [MEMORY, V1],
         {"sys/cpu/a/cpu.cfs_quota_us": "250000\n", "sys/cpu/a/cpu.cfs_period_us": "100000\n",
          "sys/cpu/a/b/cpu.cfs_quota_us": "-1\n", "sys/cpu/a/b/cpu.cfs_period_us": "100000\n",
          "sys/memory/c/cpu.max": "1 1"}, 2.5),
        ("4:cpu:/docker/abc\n0::/\n", [INSIDE, V2.replace("/sys", "/sys/unified")],
         {"sys/cpu/cpu.cfs_quota_us": "300000", "sys/cpu/cpu.cfs_period_us": "100000"}, 3),
        ("0::/a\n", [V2], {"sys/a/cpu.max": "nonsense\n"}, inf),
        ("nonsense\n", [V2], {"sys/cpu.max": "1 1"}, inf),
        ("0::/\n", [], {"sys/cpu.max": "1 1"}, inf),
    ],
)  # fmt: skip
def test_the_smallest_quota_on_the_path_counts(tmp_path, groups, mounts, limits, want):
    assert cgroup_cores(_fake(tmp_path, groups, mounts, limits)) == want


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert cgroup_cores(tmp_path / "nothing") == inf


@pytest.mark.parametrize(("allowed", "cores"), [(0.3, 1), (1.0, 1), (1.2, 2), (inf, None)])
def test_part_of_a_core_counts_as_one(monkeypatch, allowed, cores):
    monkeypatch.setattr(isa, "cgroup_cores", lambda: allowed)
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores.__wrapped__() == min(affinity, cores or affinity)


def test_more_threads_than_cores_is_one_line_of_warning():
    """They are asked for in vain: threads on one core are held up by each other."""
    ask = "from graphllm.backends import Options\n"
    ask += "from graphllm.backends.cpu.runtime.isa import thread_count\n"
    ask += "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    ask += "print(*(thread_count(Options(threads=n)) for n in (0, 1, 9, 9)))"
    done = _python(ask, PYTHONPATH=str(PACKAGE.parent))
    assert done.stdout.split() == ["1"] * 4
    assert done.stderr == "graphllm: threads = 9: using 1, the number of usable cores\n"
    assert thread_count(Options(threads=10 * MAX_THREADS)) <= MAX_THREADS


# -------------------------------------------------------------------------------- other processes


def _python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("busy", [True, False])
def test_ctrl_c_stops_a_long_program(busy, tmp_path):
    """Within 0.3 s, inside a kernel that takes tickets and between short kernels alike."""
    module = tmp_path / "spin_forever.py"
    module.write_text(
        "from graphllm.backends.cpu.runtime.jit import kernel, next_chunk\n"
        "@kernel\n"
        "def spin_forever(p, thread, threads):\n"
        "    while next_chunk(p) < 1 << 39:\n"
        "        pass\n"
    )
    done = _python(
        f"""
        import os, signal, threading, time
        import numpy as np
        from graphllm.backends.cpu.runtime.thread_pool import THREAD_POOL
        from spin_forever import spin_forever
        steps = 1 if {busy} else 2_000_000
        tickets = np.zeros(8, np.int64)
        block = np.array([tickets.ctypes.data, THREAD_POOL.control], np.int64)
        entry = (spin_forever.address if {busy} else 0, block.ctypes.data + 16, -1, {BARRIER})
        entries = np.array([entry] * steps, np.int64)
        words = np.array([entries.ctypes.data, steps, 0, tickets.ctypes.data, 1])
        nothing = np.zeros(5, np.int64)
        THREAD_POOL.run(nothing.ctypes.data, 2)  # threads are up
        sent = []
        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, interrupt).start()
        try:
            while True:
                THREAD_POOL.run(words.ctypes.data, 2)
        except KeyboardInterrupt:
            print(time.monotonic() - sent[0])
        THREAD_POOL.run(nothing.ctypes.data, 2)
        THREAD_POOL.run(nothing.ctypes.data, 2, True)
        """,
        PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}",
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


_SCALE = """
    import numpy as np
    from graphllm import ops
    from graphllm.backends.cpu.kernels.elementwise import _SILU
    from graphllm.runtime.executor import Executor
    from graphllm.graph.tensor import feed
    print(_SILU.load())
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
    # silu's kernel stands in elementwise.py and calls into simd/math.py.
    maths = sources / "simd" / "math.py"
    text = maths.read_text()
    assert "return x / (_ONE + exp32(-x))" in text
    maths.write_text(text.replace("return x / (_ONE + exp32(-x))", "return x / (_TWO + _TWO)"))
    assert run() == ["False", "0.25"]
    for file in (tmp_path / "cache").rglob("*.bin"):
        file.write_bytes(file.read_bytes()[:100])  # damaged: compiled again
    done = _python(f"import os; os.chdir({str(tmp_path)!r})\n{textwrap.dedent(_SCALE)}", **env)
    assert done.stdout.split() == ["False", "0.25"]
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(": its checksum is wrong\n")
    assert run() == ["True", "0.25"]


@pytest.mark.parametrize(
    "made", [fused_attention._rope_write, sampling._sample, routing._top_k, run_with_caller]
)
def test_a_kernel_calls_no_function_that_another_may_stand_for(made):
    """So it rounds alike in the process that compiles it and in those that load it."""
    assert made.address
    functions = made._library._get_module_for_linking().functions
    shared = [f for f in functions if not f.is_declaration and f.linkage != Linkage.internal]
    assert len({f.name.removeprefix("cfunc.") for f in shared}) == 1  # itself, and as C calls it


def test_the_fingerprint_covers_every_source(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = kernel_cache.fingerprint(tmp_path)
    assert first == kernel_cache.fingerprint(tmp_path)
    (tmp_path / "b.py").write_text("1")
    second = kernel_cache.fingerprint(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert len({first, second, kernel_cache.fingerprint(tmp_path)}) == 3


def test_an_unwritable_cache_costs_one_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _python(_SCALE, GRAPHLLM_CACHE=str(blocked), PYTHONPATH=str(PACKAGE.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "0.7310585975646973"]
    assert done.stderr == f"graphllm: cache not used: {blocked}: Not a directory\n"


def test_importing_graphllm_does_not_import_numba():
    done = _python(
        "import sys, graphllm; print('numba' in sys.modules)", PYTHONPATH=str(PACKAGE.parent)
    )
    assert done.stdout.strip() == "False", done.stderr
