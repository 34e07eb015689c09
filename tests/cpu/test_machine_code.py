"""The loader of compiled kernels, and processes that run without importing the compiler."""

from __future__ import annotations

import ctypes
import inspect
import os
import random
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny

from graphllm.backends.cpu.kernels import fused_attention, routing, sampling
from graphllm.backends.cpu.kernels.elementwise import _SILU
from graphllm.backends.cpu.runtime import compiler, lazy_numba
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.backends.cpu.runtime.jit import HEADER_WORDS
from graphllm.backends.cpu.runtime.kernel_cache import load_machine_code
from graphllm.backends.cpu.runtime.machine_code import MachineCode, symbol_address
from graphllm.backends.cpu.runtime.step_interpreter import run_with_caller, worker

pytestmark = pytest.mark.skipif(
    not isa().x86 or sys.platform != "linux", reason="LLVM loads kernels on this system"
)
C_LIBRARY = {"memset", "memcpy", "memmove", "syscall", "sched_yield", "clock_gettime", "pow"}


@pytest.fixture(scope="module")
def silu() -> compiler.Compiled:
    lazy_numba.activate()
    return compiler.compile_kernel("silu", _SILU.function)


def computed(address: int) -> bytes:
    """Return what silu's kernel at ``address`` computes."""
    x = np.linspace(-9, 9, 96, dtype=np.float32)
    y, rows = np.zeros_like(x), np.ones(1, np.int64)
    words = [x.ctypes.data, x.nbytes, y.ctypes.data, rows.ctypes.data, x.size, 0]
    block = np.array([0] * HEADER_WORDS + words, np.int64)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)
    run(block.ctypes.data + 8 * HEADER_WORDS, 0, 1)
    return y.tobytes()


def test_the_loader_of_llvm_gives_the_same(silu):
    address, functions = load_machine_code(silu.code, silu.symbol)
    found = computed(address)
    assert np.frombuffer(found, np.float32)[-1] == pytest.approx(9, rel=1e-3)
    assert computed(compiler.load_object(silu.code, silu.symbol)) == found
    assert address in {each.address for each in functions}


@pytest.mark.parametrize(
    "kernel",
    [fused_attention._rope_write, sampling._sample, routing._top_k, run_with_caller, worker],
)
def test_a_kernel_contains_all_functions_that_it_calls(kernel):
    """So it rounds alike in the process that compiles it and in those that load it."""
    lazy_numba.activate()
    made = compiler.compile_kernel(kernel.name, kernel.function)
    symbols = MachineCode(made.code)._symbols
    defined = [s.name for s in symbols if s.section and s.info == 0x12]  # global functions
    assert defined == [made.symbol]
    assert {s.name for s in symbols[1:] if not s.section} <= C_LIBRARY


def test_code_is_never_writable_and_executable(silu):
    address, _ = load_machine_code(silu.code, silu.symbol)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= address < end:
            assert access.startswith("r-x")
            return
    raise AssertionError("the code is not mapped")


def test_damaged_files_are_errors(silu):
    """Whatever is damaged, loading ends with an error or with code that is not run here."""
    rng, code = random.Random(1), silu.code
    table = struct.unpack_from("<Q", code, 0x28)[0]
    errors = 0
    for case in range(400):
        bad = bytearray(code)
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.choice(
                (rng.randrange(64), rng.randrange(table, len(code)), rng.randrange(len(code)))
            )
            bad[at] = rng.randrange(256)
        if case % 4 == 0:
            del bad[rng.randrange(len(bad)) :]
        try:
            load_machine_code(bytes(bad), silu.symbol)
        except (ValueError, OSError):
            errors += 1
    assert errors > 150


def test_errors_say_what_is_wrong(silu):
    def refused(code: bytes, text: str, symbol: str = silu.symbol) -> None:
        with pytest.raises(ValueError, match=text):
            load_machine_code(code, symbol)

    refused(b"", "no object file")
    refused(silu.code[:-1], "truncated|outside the file")
    refused(silu.code, "does not define nothing", "nothing")
    with pytest.raises(ValueError, match="calls no_such_function"):
        symbol_address("no_such_function")
    code, replaced = bytearray(silu.code), 0
    for number, section in enumerate(MachineCode(silu.code)._sections):
        if section.kind == 4 and section.nbytes and b"text" in name_of(silu.code, number):
            struct.pack_into("<I", code, section.offset + 8, 99)
            replaced += 1
    assert replaced
    refused(bytes(code), "type 99 are not supported")


def name_of(code: bytes, number: int) -> bytes:
    sections = MachineCode(code)._sections
    names = sections[struct.unpack_from("<H", code, 0x3E)[0]].offset + sections[number].name
    return code[names : code.index(b"\0", names)]


# ------------------------------------------------------------------------------ warm processes


def test_no_default_argument_stands_for_a_type_of_the_compiler():
    """It would never be replaced, so a comparison with the type would fail."""
    lazy_numba.activate()
    checked = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("graphllm.backends.cpu"):
            continue
        assert not [key for key, value in vars(module).items() if type(value) is lazy_numba.Lazy]
        for scope in (vars(module), *map(vars, filter(inspect.isclass, vars(module).values()))):
            for function in filter(inspect.isfunction, scope.values()):
                defaults = [
                    *(function.__defaults__ or ()),
                    *(function.__kwdefaults__ or {}).values(),
                ]
                assert not [d for d in defaults if type(d) is lazy_numba.Lazy], function
                checked += 1
    assert checked > 500


WARM = """
    import sys
    from graphllm.cli import main
    sys.argv = ["graphllm", *{arguments!r}]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    print(*(name for name in ("numba", "llvmlite") if name in sys.modules), file=sys.stderr)
    """


def imported(arguments: list[str], cache: Path) -> str:
    """Run a command in a process; return which compilers it imported."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WARM.format(arguments=arguments))],
        env={**os.environ, "GRAPHLLM_CACHE": str(cache)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_warm_process_imports_no_compiler(tmp_path):
    path = str(tiny.write_tiny(tmp_path / "m.gguf", "llama"))
    cache = tmp_path / "cache"
    asked = ["run", path, "-p", "a", "-n", "2", "-t", "2", "--device", "cpu"]
    assert imported(asked, cache) == "numba llvmlite"
    assert imported(asked, cache) == ""
    assert imported(["--help"], cache) == ""
