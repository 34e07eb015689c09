"""CPU kernels in a user's file: correct for all layouts, selected, and never stale.

Run as a script it prints the errors of all samples, for the processor that Numba's variables name.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from llvmlite import ir
from numba import float32, njit
from numba.extending import intrinsic
from op_runs import run_all

from graphllm import ops
from graphllm.backends import Options, cpu
from graphllm.backends.cpu.runtime.argument_block import argument_reader, argument_words
from graphllm.backends.cpu.runtime.isa import CPU_FEATURES, CPU_NAME, isa
from graphllm.backends.cpu.runtime.jit import HEADER_WORDS, f32s, kernel
from graphllm.backends.cpu.runtime.kernel_key import code_key
from graphllm.backends.cpu.simd.math import exp32
from graphllm.errors import GraphError, GraphllmError
from graphllm.graph.tensor import feed
from graphllm.model import spec
from graphllm.ops import Arg, Cost, Sample, grid, op, require, same
from graphllm.runtime.executor import Executor

ROWS = (0, 1, 7, 300)
LAYOUTS = ("contiguous", "strided", "permuted")


def _price(out, *sources, env, **attrs):
    return Cost(flops=4 * out.size, bytes=2 * out.nbytes)


def _blended(a, b, *, share):
    require(b.shape in (a.shape, a.shape[-1:]), "b is another shape")
    return same(a)


def declare() -> None:
    """Declare ops of one and two operands, with and without attributes, and their kernels."""

    def one(rows, layout, beta):
        return Sample((Arg(("T", 5, 420), layout=layout),), {"beta": beta}, {"T": rows})

    def two(rows, layout):
        x = Arg(("T", 3000), layout="contiguous" if layout == "permuted" else layout)
        return Sample((x, x), {"share": 0.3}, {"T": rows})

    def row(rows, layout):
        x = Arg(("T", 3, 2100), layout=layout)
        return Sample((x, Arg((2100,))), {"share": 0.7}, {"T": rows})

    @op("tests_swish", infer=lambda x, *, beta: same(x), cost=_price, tol={"f32": 2e-6},
        samples=grid(one, rows=ROWS, layout=LAYOUTS, beta=(1.0, 0.5)))  # fmt: skip
    def tests_swish(x, *, beta):
        return x / (1 + np.exp(-beta * x))

    cases = [case for make in (two, row) for case in grid(make, rows=ROWS, layout=LAYOUTS)]

    @op("tests_blend", infer=_blended, cost=_price, tol={"f32": 1e-6}, samples=cases)
    def tests_blend(a, b, *, share):
        return np.float32(share) * a + np.float32(1 - share) * b

    @cpu.elementwise("tests_swish")
    def swish(x, beta):
        return x / (float32(1) + exp32(-beta * x))

    @cpu.elementwise("tests_blend")
    def blend(a, b, share):
        return share * a + (float32(1) - share) * b


class SumArgs(NamedTuple):
    """Argument block of `weighted_sum`."""

    x: int
    out: int
    count: int
    factor: float


read_sum = argument_reader(SumArgs)


@kernel
def weighted_sum(p, thread, threads):
    a = read_sum(p)
    total = float32(0)
    for i in range(a.count):
        total += a.factor * f32s(a.x)[i]
    f32s(a.out)[0] = total


def test_a_kernel_with_an_argument_block():
    x, out = np.arange(5, dtype=np.float32), np.zeros(1, np.float32)
    words = argument_words(SumArgs(x.ctypes.data, out.ctypes.data, 5, 0.5))
    block = np.array([0] * HEADER_WORDS + words, np.int64)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(weighted_sum.address)
    run(block.ctypes.data + 8 * HEADER_WORDS, 0, 1)
    assert out[0] == 5


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setattr("graphllm.graph.op._REGISTRY", dict(ops.registry()))
    monkeypatch.setattr(cpu.BACKEND, "_kernels", dict(cpu.BACKEND.kernels))
    declare()


def wrong() -> list[str]:
    """Errors of all samples, including samples that the kernel did not run."""
    return [
        f"{name}: {line}"
        for name in ("tests_swish", "tests_blend")
        for line in run_all(name, ("cpu",), Options())  # no other backend can run them
    ]


def test_every_sample(declared):
    assert not wrong()


def test_every_sample_on_avx2():
    if not isa().avx2:
        pytest.skip("this processor has no avx2")
    env = {**os.environ, CPU_NAME: "haswell", CPU_FEATURES: ""}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "haswell (avx2, f16c, 256-bit vectors)\n"


# -------------------------------------------------------------------------------------- never stale

FILE = """
import numpy as np
from numba import float32
from graphllm.backends import cpu
from graphllm.ops import Cost, op, same

FACTOR = {factor}

def cost(out, x, env):
    return Cost(out.size, out.nbytes)

@op("tests_scaled", infer=same, cost=cost, tol={{}}, samples=())
def tests_scaled(x):
    return x

@cpu.elementwise("tests_scaled")
def scaled(x):
    return {body}
"""


def scaled() -> float:
    plan = (executor := Executor(backends=["cpu"])).compile(
        {"y": ops.tests_scaled(feed("x", (4,), "f32"))}
    )
    return float(executor.run(plan, {"x": np.ones(4, np.float32)})["y"][0])


def test_running_a_file_again_replaces_its_kernel(declared, tmp_path):
    path, found = tmp_path / "mine.py", []
    for factor, body in (
        (2, "x * float32(3)"),
        (2, "x * float32(4)"),
        (2, "x * FACTOR"),
        (5, "x * FACTOR"),
    ):
        path.write_text(FILE.format(factor=factor, body=body))
        spec.import_file(path)
        found.append(scaled())
    assert found == [3, 4, 2, 5]
    assert len(cpu.BACKEND.kernels["tests_scaled"]) == 1


PROCESS = """
    import sys
    from pathlib import Path
    sys.path[:0] = [{tests!r}, {folder!r}]
    from graphllm.model import spec
    import test_user_kernels
    spec.import_file({folder!r} + "/mine.py")
    print(test_user_kernels.scaled())
    """


def test_kernels_of_other_sources_are_not_loaded(tmp_path):
    """The key of a kernel covers functions in other files that it calls, but not comments."""
    mine = FILE.format(factor=1, body="helper.f(x) + g(x)")
    mine = f"import helper\nfrom helper import g\n{mine}"
    text = "from numba import njit\nA = {}\n@njit\ndef g(x):\n    return x * A\n"
    text += "@njit\ndef f(x):\n    return x + {}\n"

    def run(*numbers: object) -> tuple[float, int]:
        (tmp_path / "helper.py").write_text(text.format(*numbers))
        code = PROCESS.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
        env = {
            **os.environ,
            "GRAPHLLM_CACHE": str(tmp_path / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return float(done.stdout), len(list(tmp_path.glob("cache/kernels/*/*elementwise*")))

    (tmp_path / "mine.py").write_text(mine)
    assert run(2, 1) == (4, 1)
    (tmp_path / "mine.py").write_text(f"# a comment\n{mine}")
    assert run(2, 1) == (4, 1)
    assert run(3, 1) == (5, 2)
    assert run(3, 7) == (11, 3)


def test_cache_keys_of_kernels():
    """They cover bytecode, constants, defaults, closures, globals and called functions."""
    scope: dict[str, object] = {"np": np, "njit": njit, "float32": float32}

    def key(text: str, file: str = "a.py", **values: object) -> str:
        own = {**scope, **values}
        exec(compile(textwrap.dedent(text), file, "exec"), own)
        return code_key(own["f"])  # type: ignore[arg-type]

    plain = "def f(x): return x + 1"
    assert key(plain) == key(f"\n\n# moved\n{plain}", "b.py") != key("def f(x): return x + 2")
    assert key(plain) != key("def f(x): return x - 1")
    assert key("def f(x, a=1): return x + a") != key("def f(x, a=2): return x + a")
    reads = "def f(x): return x + A"
    assert (
        len({key(reads, A=a) for a in (1, 1.0, 2, (1, 2), np.float32(1), np.zeros(2), np.ones(2))})
        == 7
    )
    calls = "@njit\ndef g(x): return x * {}\ndef f(x): return g(x)"
    assert key(calls.format(2)) == key(calls.format(2)) != key(calls.format(3))
    assert key(calls.format(2)) != key(calls.format(2).replace("@njit", "@njit(fastmath=True)"))
    closes = "def made(a):\n    def f(x): return x * a\n    return f\nf = made({})"
    assert key(closes.format(2)) != key(closes.format(3))
    itself = "def g(x): return f(x) + {}\ndef f(x): return g(x)"
    assert key(itself.format(1)) == key(itself.format(1)) != key(itself.format(2))
    builds = """
        @intrinsic
        def g(typingctx, x):
            def generate(context, builder, sig, values):
                return builder.add(values[0], ir.Constant(WORD, {}))
            return x(x), generate
        def f(x):
            return g(x)
        """
    scope |= {"intrinsic": intrinsic, "ir": ir, "WORD": ir.IntType(64)}
    assert key(builds.format(2)) == key(builds.format(2)) != key(builds.format(3))
    assert key(builds.format(2)) != key(builds.format(2), WORD=ir.IntType(32))
    assert key("def f(x): return np.exp(x)") != key("def f(x): return np.log(x)")
    assert code_key(elementwise := cpu.elementwise) == "", elementwise  # the sources are hashed
    with pytest.raises(GraphllmError, match=r"a.py:1: f reads a dict; a kernel may read numbers"):
        key(reads, A={})


# ------------------------------------------------------------------------------------------- errors


def test_unsupported_functions_are_rejected(declared):
    def swish(x, gamma):
        return x

    with pytest.raises(GraphError, match=r"the parameters are \(x, gamma\), not \(x, beta\)"):
        cpu.elementwise("tests_swish")(swish)
    with pytest.raises(GraphError, match="unknown op 'tests_nothing'"):
        cpu.elementwise("tests_nothing")(swish)
    with pytest.raises(
        GraphError, match=r"test_user_kernels\.py:\d+: .* cpu has a kernel for silu"
    ):
        cpu.elementwise("silu")(lambda x: x)
    with pytest.raises(GraphError, match="must have one or two operands, and write to none"):
        cpu.elementwise("linear")(swish)


def test_a_compilation_error_is_one_line(declared):
    @cpu.elementwise("tests_swish")
    def swish(x, beta):
        return x.nothing

    executor = Executor(backends=["cpu"])
    where = r"test_user_kernels\.py:\d+: cpu\.elementwise\('tests_sw"
    with pytest.raises(GraphllmError, match=where) as e:
        plan = executor.compile({"y": ops.tests_swish(feed("x", (4,), "f32"), beta=1.0)})
        executor.run(plan, {"x": np.ones(4, np.float32)})
    assert "\n" not in str(e.value) and "nothing" in str(e.value)


def test_other_dtypes_and_attributes_go_to_the_next_backend(declared):
    kernel = cpu.BACKEND.select(ops.tests_swish(feed("x", (4, 8), "f16"), beta=1.0), Options())
    assert kernel == "x is f16, not f32"
    kernel = cpu.BACKEND.select(ops.tests_swish(feed("x", (4, 8), "f32"), beta="one"), Options())
    assert kernel == "the attribute beta is not a number"


if __name__ == "__main__":
    declare()
    print(isa())
    print("".join(f"{line}\n" for line in wrong()), end="")
