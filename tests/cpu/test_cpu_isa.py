"""CPU kernels compiled for other processors: samples of every op, and equal bits in linear.

Run as a script, with kernels for the processor that Numba's variables name, it prints the target,
digests of the results of each integer format, and the errors of all samples. The tests do so in
separate processes, as code for another processor may crash. With the argument "all" it runs all
samples; otherwise those that `samples` selects for the target, which change daily (rotation.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import probe_kernel_cases
import pytest
from linear_cases import INTEGER, digests
from llvmlite import binding, ir
from op_runs import KERNELS, block_formats, run_all
from rotation import rotated

from graphllm.backends import Options, find
from graphllm.backends.cpu.formats import BLOCK_FORMATS, FORMATS
from graphllm.backends.cpu.formats.encoder import BlockEncoder
from graphllm.backends.cpu.kernels import (
    linear_float,
    linear_integer,
    linear_one_token,
    linear_rows,
    quantize,
)
from graphllm.backends.cpu.runtime.isa import CPU_FEATURES, CPU_NAME, ISA, isa
from graphllm.backends.cpu.simd.emitter import Emitter
from graphllm.backends.cpu.simd.stored_rows import StoredRows
from graphllm.formats import ROW_FORMATS

# The feature that the processor needs, and the description of the target.
TARGETS = {
    "haswell": ("avx2", "haswell (avx2, f16c, 256-bit vectors)"),
    "skylake-avx512": ("avx512", "skylake-avx512 (avx2, avx512, f16c, 512-bit vectors)"),
    "ivybridge": ("f16c", "ivybridge (f16c, 128-bit vectors)"),  # generic code only
    "sapphirerapids": (
        "amx",
        "sapphirerapids (avx2, avx512, vnni, amx-int8, f16c, 512-bit vectors)",
    ),
    # What a processor with AMX does not run itself.
    "icelake-server": ("amx", "icelake-server (avx2, avx512, vnni, f16c, 512-bit vectors)"),
    "alderlake": ("avx_vnni", "alderlake (avx2, avx-vnni, f16c, 256-bit vectors)"),
}
# Ops that multiply bytes, which depends on the target. All other kernels for AVX-512 are those
# that test_ops_generated.py runs, as a processor that can run this target compiles for AVX-512, and
# those for AVX-VNNI are the ones for AVX2. AMX-INT8 only multiplies bytes.
PRODUCTS = ("linear", "expert_linear", "head_linear")
PRODUCTS_ALONE = ("skylake-avx512", "alderlake", "sapphirerapids", "icelake-server")
PARTS = 8  # of the block formats and of the ops that do not multiply bytes
KEPT = 8  # kernel folders that are kept, one for each target and version of the sources


@pytest.fixture(scope="session")
def kernels(request, tmp_path_factory):
    """A separate kernel cache, kept between sessions if pytest has a cache folder."""
    kept = getattr(request.config, "cache", None)
    folder = Path(kept.mkdir("kernels")) if kept else tmp_path_factory.mktemp("kernels")
    yield folder
    versions = sorted(folder.glob("kernels/*"), key=lambda path: path.stat().st_mtime)
    for old in versions[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def start(target: str, kernels: Path, *command: str | Path) -> subprocess.Popen[str]:
    """Start Python, with kernels compiled for ``target``."""
    env = {**os.environ, CPU_NAME: target, CPU_FEATURES: "", "GRAPHLLM_CACHE": str(kernels)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], env=env, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a process; returns the lines that it printed."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out.splitlines()


def run(target: str, kernels: Path, *command: str | Path) -> list[str]:
    return finish(start(target, kernels, *command))


@pytest.fixture(scope="session")
def targets(kernels, request):
    """Processes for the selected targets, started together, as compiling takes minutes."""
    name = test_every_op_and_the_same_bits.__name__
    items = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    chosen = {item.callspec.params["target"] for item in items}
    able = [name for name in TARGETS if name in chosen and getattr(isa(), TARGETS[name][0])]
    running = {name: start(name, kernels, Path(__file__), name) for name in able}
    yield running
    for process in running.values():
        process.kill()


def need(feature: str) -> None:
    if not getattr(isa(), feature):
        pytest.skip(f"this processor has no {feature}")


@pytest.mark.parametrize("target", TARGETS)
def test_every_sample_runs_in_some_days(target):
    """On each target; and the ops that multiply bytes run every day."""
    own = KERNELS if target not in PRODUCTS_ALONE else PRODUCTS
    ran: dict[str, set[str]] = {name: set() for name in own}
    for day in range(PARTS):
        some = dict(samples(target, day))
        for name, formats in some.items():
            ran[name] |= {*formats}
        assert {*PRODUCTS} <= some.keys()
    assert ran == {name: {*block_formats(name)} for name in own}


@pytest.mark.parametrize("target", TARGETS)
def test_every_op_and_the_same_bits(target, targets):
    feature, description = TARGETS[target]
    need(feature)
    said, *lines = finish(targets[target])
    assert said == description
    formats = dealt(target)
    assert lines[: len(formats)] == digests(formats)
    wrong = lines[len(formats) :]
    assert not wrong, "\n".join([f"{len(wrong)} samples are wrong", *wrong[:8]])


def test_refused_amx_is_off_and_reported(monkeypatch):
    """As where a kernel or an emulator does not grant the tile registers."""
    need("x86")
    runtime = sys.modules[isa.__module__]
    refuse = "the operating system refuses it (Invalid argument)"
    monkeypatch.setattr(runtime, "target", lambda: ("sapphirerapids", ""))
    monkeypatch.setattr(runtime, "isa", isa.__wrapped__)
    monkeypatch.setattr(runtime, "_amx_refusal", lambda: "")
    assert runtime.isa().amx and runtime.amx_note() == ""
    monkeypatch.setattr(runtime, "_amx_refusal", lambda: refuse)
    assert not runtime.isa().amx and runtime.isa().vnni
    assert find("cpu").available()[1].endswith(f"; AMX is off: {refuse}")


def test_without_float16_in_hardware_there_is_no_cpu_backend(kernels):
    """linear does not need it, as it converts float16 in software."""
    need("x86")
    ask = "from graphllm.backends import find; print(*find('cpu').available())"
    said = run("x86-64-v2", kernels, "-c", ask)
    assert said == ["False x86-64-v2 does not convert float16 in hardware"]
    program = "from linear_cases import digests"
    some = ("q8_0", "q5_1", "q4_k")
    assert run("x86-64-v2", kernels, "-c", f"{program}; print(*digests({some}), sep='\\n')") == (
        digests(some)
    )


# --------------------------------------------------------------------------------------- AArch64

ARM = ISA(
    "generic", x86=False, avx2=False, avx512=False, vnni=False, f16c=True, width=16, neon=True
)
ARMS = {"generic": ARM, "neoverse-n1": replace(ARM, dotprod=True)}


def assembly(
    name: str, emit: Callable[..., Any], values: int, *literals: int | str, cpu: str = "generic"
) -> str:
    """Assembly of ``emit(Emitter, *literals, *values)`` for a 64-bit Arm processor."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    module = ir.Module(name)
    module.triple = triple
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * values), name)
    builder = ir.IRBuilder(function.append_basic_block())
    emit(Emitter(builder, ARMS[cpu]), *literals, *function.args)
    builder.ret_void()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=2)
    return machine.emit_assembly(binding.parse_assembly(str(module)))


@pytest.mark.parametrize("cpu", ARMS)
@pytest.mark.parametrize("name", FORMATS)
def test_microkernels_compile_for_arm(name, cpu):
    """To Arm vector instructions, without calls of library functions."""
    form = FORMATS[name]
    in_place = int(form.in_place_tokens(ARM) > 0)

    def pack(e, name, source, stride, rows, target):
        FORMATS[name].pack(StoredRows(e, source, stride, rows), target)

    codes = [assembly("pack_block", pack, 4, name, cpu=cpu)]
    if name in ROW_FORMATS:
        codes.append(assembly("unpack", linear_rows.unpack, 4, form.code, cpu=cpu))
        codes.append(assembly("fused_float", linear_rows.fused_float, 5, form.code, cpu=cpu))
        if name == "w8a8":
            codes.append(assembly("fused", linear_rows.fused, 4, form.code, cpu=cpu))
            codes.append(assembly("tile", linear_rows.tile, 6, form.code, 1, 4, cpu=cpu))
            assert all(("sdot" in code) == ARMS[cpu].dotprod for code in codes[3:])
        assert not [line for code in codes for line in calls(code)]
        return
    codes.insert(0, assembly("unpack_float", linear_float.unpack, 3, form.code, cpu=cpu))
    if form.block == 1:
        codes.append(assembly("fused_float", linear_float.fused, 4, form.code, cpu=cpu))
    elif name in INTEGER:
        codes.append(assembly("unpack", linear_integer.unpack, 3, form.code, cpu=cpu))
        codes.append(assembly("fused", linear_one_token.fused, 6, form.code, cpu=cpu))
        literals = (form.code, in_place, 1, 4)
        codes.append(assembly("tile", linear_integer.tile, 11, *literals, cpu=cpu))
        assert all(".16b" in code or ".4s" in code for code in codes[2:])
        assert all(("sdot" in code) == ARMS[cpu].dotprod for code in codes[3:])
    assert not [line for code in codes for line in calls(code)]


def test_the_rest_compiles_for_arm():
    codes = [assembly("tile_float", linear_float.tile, 10, 1, 4)]
    codes += [assembly("quantise", quantize._quantise, 4, block) for block in (32, 256)]
    assert "fmla" in codes[0]
    assert not [line for code in codes for line in calls(code)]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_quantisers_compile_for_arm(name):
    def encode(e, x, y):
        e = BlockEncoder(e.b, ARM)
        FORMATS[name].encode(e, [e.load_f32(x, 64 * i) for i in range(16)], y)

    code = assembly("encode", encode, 2)
    assert ".4s" in code and not calls(code)


def calls(code: str) -> list[str]:
    return re.findall(r"^\s+blr?\s.*$", code, re.MULTILINE)


def dealt(target: str, days: int = 0, formats: Sequence[str] = INTEGER) -> tuple[str, ...]:
    """Those of some formats to run on a target in some days or, if it is "all", everywhere."""
    if target == "all":
        return tuple(formats)
    return tuple(rotated(formats, PARTS, days + list(TARGETS).index(target)))


def samples(target: str, days: int = 0) -> Iterator[tuple[str, list[str]]]:
    """(op, block formats) to run on a target in some days or, if it is "all", everywhere."""
    floats = [name for name in (*BLOCK_FORMATS, *ROW_FORMATS) if name not in INTEGER]
    own = dealt(target, days) + dealt(target, days, floats)
    for name in PRODUCTS:
        yield name, [form for form in block_formats(name) if form in ("", *own)]
    others = [name for name in KERNELS if name not in PRODUCTS]
    if target in PRODUCTS_ALONE:
        others = []
    elif target != "all":
        others = rotated(others, PARTS, days + PARTS // 2 * (target == "ivybridge"))
    for name in others:
        yield name, block_formats(name)


def main(target: str) -> None:
    print(isa())
    print("\n".join(digests(dealt(target))))
    for name, formats in samples(target):
        for line in run_all(name, ("cpu",), Options(), formats=formats):
            print(f"{name}: {line}")
    if target not in PRODUCTS_ALONE:
        formats = dict(samples(target))["linear"]
        for line in run_all("linear", ("cpu",), Options(linear="float"), 2e-5, formats=formats):
            print(f"linear, float: {line}")
    for line in probe_kernel_cases.wrong():
        print(line)


if __name__ == "__main__":
    main(sys.argv[1])
