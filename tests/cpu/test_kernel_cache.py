"""Compiled kernels in the cache directory: damaged or exchanged files are not used.

As a script it runs the campaign of damaged kernels: `python tests/cpu/test_kernel_cache.py 1000`
(with tests/support on PYTHONPATH).
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cache_files import NOT_USED, anothers, open_to_all

from graphllm import cache
from graphllm.backends.cpu.kernels.elementwise import _SCALE, _SIGMOID, _SILU
from graphllm.backends.cpu.runtime.jit import HEADER_WORDS, Kernel

COUNT = 60  # cases of the campaign when run as a test

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
    at = rng.randrange(len(code))
    texts = (
        b"", b"\n", b"{}", b"{}\n", b"\n" + code, b"a\n" + code, b"\xff\n" + code, line + b"\n",
        line, code, line + b"\n" + code[:at], line + b"\n" + rng.randbytes(len(code)),
        line + b"\n" + code[:64] + rng.randbytes(len(code)), line + b"\n" + bytes(len(code)),
        line[:-1] + b"\n" + code, line + b"\n" + code[:5] + code[6:], line + b"\n\x7fELF",
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
        kernel._address = 0
        if kernel._cache.load() is not None:
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
        kernel._address = 0
        data[f"{name} gives"] = computed(kernel.address)
        assert kernel._cache.load() is not None  # undamaged, so it is loaded
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
