"""The runtime of the CPU backend: thread pool, usable cores, and the kernel cache."""

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

import graphllm
from graphllm.backends import Options
from graphllm.backends.cpu.runtime import cores, kernel_cache, thread_pool
from graphllm.backends.cpu.runtime.cores import (
    MAX_THREADS,
    cgroup_cores,
    thread_count,
    usable_cores,
)
from graphllm.backends.cpu.runtime.device import CpuDevice
from graphllm.backends.cpu.runtime.jit import (  # fmt: skip
    HEADER_WORDS,
    args,
    i64s,
    kernel,
    next_chunk,
    set_status,
)
from graphllm.backends.cpu.runtime.step_interpreter import (  # fmt: skip
    BARRIER,
    COUNTER_WORDS,
    TIMESTAMPS,
    Entry,
    ProgramHeader,
)
from graphllm.backends.cpu.runtime.thread_pool import THREAD_POOL, ThreadPool
from graphllm.errors import GraphllmError

PACKAGE = Path(graphllm.__file__).parent
OUT_OF_STEP, CHUNKS = 99, 64


@kernel
def _count_steps(p, thread, threads):
    """Each thread counts its steps, and reports an error if another is not in the same step."""
    counts, marks, chunks = args(p, 3)
    mine = i64s(counts)[thread * 8]
    for t in range(threads):
        other = i64s(counts)[t * 8]
        if other != mine and other != mine + 1:
            set_status(p, OUT_OF_STEP)
    chunk = next_chunk(p)
    while chunk < chunks:
        i64s(marks)[chunk] += 1
        chunk = next_chunk(p)
    i64s(counts)[thread * 8] = mine + 1


@kernel
def _fail(p, thread, threads):
    if thread == 0:
        set_status(p, 1234)


class _Script:
    """A program that runs one kernel ``steps`` times."""

    def __init__(self, threads: int, body, steps: int, *words: int, short=False, pool=THREAD_POOL):
        self.pool, self.threads, self.short = pool, threads, short
        self.counters = np.zeros((steps, COUNTER_WORDS), np.int64)
        self.blocks = [np.array([c.ctypes.data, pool.control, *words]) for c in self.counters]
        address, skip = body.address if body else 0, 8 * HEADER_WORDS
        entries = [Entry(address, b.ctypes.data + skip, i, BARRIER)
                   for i, b in enumerate(self.blocks, 1)]  # fmt: skip
        self.entries = np.array(entries, np.int64)
        header = ProgramHeader(
            entries=self.entries.ctypes.data,
            entry_count=steps,
            timestamps=0,
            counters=self.counters.ctypes.data,
            counter_count=steps,
        )
        self.words = np.array(header)

    def run(self, times: np.ndarray | None = None) -> None:
        self.words[TIMESTAMPS] = 0 if times is None else times.ctypes.data
        self.pool.run(int(self.words.ctypes.data), self.threads, self.short)


def _counting(threads: int, steps: int, **options) -> tuple[_Script, np.ndarray, np.ndarray]:
    """A program that checks itself, the steps of each thread, and how often each chunk ran."""
    counts, marks = np.zeros(8 * threads, np.int64), np.zeros(CHUNKS, np.int64)
    words = (counts.ctypes.data, marks.ctypes.data, CHUNKS)
    return _Script(threads, _count_steps, steps, *words, **options), counts[::8], marks


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_wait_at_the_barrier_after_each_step(threads, short):
    steps = 2000 if threads <= usable_cores() else 200
    script, counts, marks = _counting(threads, steps, short=short)
    for _ in range(3):
        script.run()
    assert (counts == 3 * steps).all()
    assert (marks == 3 * steps).all()  # each chunk runs once a step


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_timestamps_are_monotonic(threads):
    times = np.zeros(101, np.int64)
    for short in (True, False):
        _Script(threads, None, 100, short=short).run(times)
        assert times[0] > 0
        assert (np.diff(times) >= 0).all()


def test_pool_is_usable_after_a_kernel_reports_an_error():
    for short in (True, False):
        with pytest.raises(GraphllmError, match="1234"):
            _Script(2, _fail, 3, short=short).run()
        _Script(2, None, 3, short=short).run()


def test_pool_can_be_stopped_and_used_again():
    pool = ThreadPool()
    for short in (True, False, True):
        _Script(2, None, 10, short=short, pool=pool).run()
        pool.stop()
        assert pool.size == 0


def test_pool_grows_to_the_largest_number_of_threads():
    """Programs of fewer threads use the first workers."""
    pool = ThreadPool()
    for threads, size in ((2, 2), (1, 2), (4, 4), (3, 4), (2, 4)):
        for short in (False, True):
            script, counts, marks = _counting(threads, 50, short=short, pool=pool)
            script.run()
            assert (counts == 50).all() and (marks == 50).all()
            assert pool.size == size
    names = [t.name for t in threading.enumerate()]
    pool.stop()
    assert len(names) - len(threading.enumerate()) == 4


def test_programs_of_several_threads_run_one_at_a_time():
    """Each program checks itself. There are more of them than cores, of different widths."""
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
    """Make a /proc/self in ``folder`` whose control groups are mounted in ``folder`` as well."""
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
        # The smallest quota on the path counts; siblings do not.
        ("0::/a/b/c\n", [V2], {"sys/a/cpu.max": "200000 100000", "sys/a/b/c/cpu.max": "3 1",
                               "sys/a/d/cpu.max": "1 1"}, 2),
        ("0::/a/b\n", [V2], {"sys/a/b/cpu.max": "50000 100000", "sys/a/cpu.max": "max 1"}, 0.5),
        ("0::/../up\n", [V2], {"sys/cpu.max": "2 1"}, 2),  # outside the mount
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


@pytest.mark.parametrize(("allowed", "count"), [(0.3, 1), (1.0, 1), (1.2, 2), (inf, None)])
def test_a_fraction_of_a_core_counts_as_a_core(monkeypatch, allowed, count):
    monkeypatch.setattr(cores, "cgroup_cores", lambda: allowed)
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores.__wrapped__() == min(affinity, count or affinity)


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({"cpu_core/cpus": "0-3\n", "cpu_atom/cpus": "4-7\n"}, 4),  # Intel
        ({"cpu_core/cpus": "0,2,6-7\n"}, 4),
        ({"cpu_core/cpus": "20-31\n"}, 8),  # none of them may be used
        ({"cpu_core/cpus": "nonsense\n"}, 8),
        ({f"system/cpu/cpu{i}/cpu_capacity": "1024" for i in range(8)}, 8),  # Arm
        ({f"system/cpu/cpu{i}/cpu_capacity": str(446 if i < 6 else 1000 + i) for i in range(8)}, 2),
    ],
)
def test_slow_cores_of_a_hybrid_processor_get_no_thread(tmp_path, monkeypatch, files, count):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {*range(8)})
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores.performance_cores(tmp_path / "system" / "cpu") == count


def test_more_threads_than_cores_warns_once():
    ask = "from graphllm.backends import Options\n"
    ask += "from graphllm.backends.cpu.runtime.cores import thread_count\n"
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
    """Within 0.3 s of both threads, in a kernel that takes chunks and between short kernels.

    CPU time, since the time of day depends on the load.
    """
    module = tmp_path / "infinite.py"
    module.write_text(
        "from graphllm.backends.cpu.runtime.jit import kernel, next_chunk\n"
        "@kernel\n"
        "def loop(p, thread, threads):\n"
        "    while next_chunk(p) < 1 << 39:\n"
        "        pass\n"
    )
    done = _python(
        f"""
        import os, signal, threading, time
        import numpy as np
        from graphllm.backends.cpu.runtime.thread_pool import THREAD_POOL
        from infinite import loop
        steps = 1 if {busy} else 2_000_000
        counter = np.zeros(8, np.int64)
        block = np.array([counter.ctypes.data, THREAD_POOL.control], np.int64)
        entry = (loop.address if {busy} else 0, block.ctypes.data + 16, -1, {BARRIER})
        entries = np.array([entry] * steps, np.int64)
        words = np.array([entries.ctypes.data, steps, 0, counter.ctypes.data, 1])
        empty = np.zeros(5, np.int64)
        THREAD_POOL.run(empty.ctypes.data, 2)  # starts the threads
        sent = []
        def interrupt():
            sent.append(time.process_time())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, interrupt).start()
        try:
            while True:
                THREAD_POOL.run(words.ctypes.data, 2)
        except KeyboardInterrupt:
            print(time.process_time() - sent[0])
        THREAD_POOL.run(empty.ctypes.data, 2)
        THREAD_POOL.run(empty.ctypes.data, 2, True)
        """,
        PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}",
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2 * 0.3


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
    # The kernel of silu is defined in elementwise.py and calls a function of simd/math.py.
    maths = sources / "simd" / "math.py"
    text = maths.read_text()
    assert "return x / (_ONE + exp32(-x))" in text
    maths.write_text(text.replace("return x / (_ONE + exp32(-x))", "return x / (_TWO + _TWO)"))
    assert run() == ["False", "0.25"]
    for file in (tmp_path / "cache").rglob("*.bin"):
        file.write_bytes(file.read_bytes()[:100])  # damaged files are compiled again
    done = _python(f"import os; os.chdir({str(tmp_path)!r})\n{textwrap.dedent(_SCALE)}", **env)
    assert done.stdout.split() == ["False", "0.25"]
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(": its checksum is wrong\n")
    assert run() == ["True", "0.25"]


def test_fingerprint_covers_every_source(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = kernel_cache.fingerprint(tmp_path)
    assert first == kernel_cache.fingerprint(tmp_path)
    (tmp_path / "b.py").write_text("1")
    second = kernel_cache.fingerprint(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert len({first, second, kernel_cache.fingerprint(tmp_path)}) == 3


def test_an_unwritable_cache_warns_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _python(_SCALE, GRAPHLLM_CACHE=str(blocked), PYTHONPATH=str(PACKAGE.parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "0.7310585975646973"]
    assert done.stderr == f"graphllm: cache not used: {blocked}: Not a directory\n"


@pytest.mark.parametrize("kib", [64, 256])
def test_kernels_have_large_stacks(kib):
    """Kernels keep hundreds of KiB there; the process would crash. Other threads have what they
    had, and run no kernels themselves if it is little."""
    code = f"""
        import threading
        import numpy as np
        from graphllm import ops
        from graphllm.backends import Options
        from graphllm.graph.tensor import Var, feed, weight
        from graphllm.runtime.executor import Executor
        from graphllm.weights import Arrays

        threading.stack_size({kib} << 10)
        w = np.eye(512, dtype=np.float32)
        x = feed("x", (Var("T", 0, 300), 512), "f32")
        executor = Executor(Arrays({{"w": w}}), ("cpu",), Options(threads=2))
        plan = executor.compile({{"y": ops.linear(x, weight("w", (512, 512), "f32"))}})
        value = np.ones((256, 512), np.float32)

        def run():
            for _ in range(20):
                assert np.array_equal(executor.run(plan, {{"x": value}})["y"], value)
            done.append(threading.current_thread())

        done = []
        run()
        small = threading.Thread(target=run)
        small.start()
        small.join()
        assert done == [threading.main_thread(), small]
        assert threading.stack_size(0) == {kib} << 10
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_stacks_of_threads():
    """The size is that of each thread, not the default of new ones."""
    found = {}
    before = threading.stack_size()
    try:
        for kib in (256, 1024, 4096):
            threading.stack_size(kib << 10)
            thread = threading.Thread(
                target=lambda kib=kib: found.update({kib: thread_pool._CALLER.runs_kernels})
            )
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert found == {256: False, 1024: True, 4096: True} and thread_pool._CALLER.runs_kernels
