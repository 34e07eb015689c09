"""Every CUDA kernel compiles for several GPU generations, without a GPU or driver, and none of them
uses local memory. A run compiles a part of the modules, see tests/support/tiers.py.

Needs CuPy and NVRTC (extra "nvrtc"); with GRAPHLLM_REQUIRE=nvrtc their absence is a failure.

As a script it compiles the modules of some sources, or all, for all generations that may use them:
`python tests/cuda/test_cuda_compile.py gemv.cu` (with tests/support on PYTHONPATH).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_requirements import needs_tensor_cores
from rotation import rotated

from graphllm.backends import cuda, find
from graphllm.backends.cuda import MIN_CAPABILITY
from graphllm.backends.cuda.runtime import source
from graphllm.errors import GraphllmError

assert find("cuda").kernels  # registers all sources, also where this file is a script
ARCHS = ("sm_75", "sm_80", "sm_90a")
# For the last of these only.
NEWEST = "gemv_ring.cu", "gemm_bytes.cu", "gemm_halves.cu", "gated_e4m3.cu", "e4m3_copy.cu"


def allowed(made: source.Module, arch: str) -> int:
    """Bytes of local memory that a kernel may have.

    `finish` with bitmaps of allowed ids lacks two registers, `gated_e4m3` with two units is faster
    than without local memory in smaller blocks, and so are sums of experts in q6_k.
    """
    if {("FORMAT", "Q6_K"), ("FLOATS", "1"), ("SUMMED", "1")} <= set(made.defines):
        return 184
    return {("sampling.cu", "sm_75"): 24, ("gated_e4m3.cu", "sm_90a"): 24}.get((made.file, arch), 0)


def targets(made: source.Module) -> tuple[str, ...]:
    """The generations for which a plan may use the module; see test_cuda_plans.py.

    Tensor core kernels need capability 8.0, and small batches of more than 16 tokens 9.0, but for
    bytes, whose kernels below have fewer stages. So do heads of 256, see cuda-attention.md. The
    expert GEMV multiplies half activations only below.
    """
    macros = dict(made.defines)
    if made.file.startswith("small_batch") and int(macros["TOKENS"]) > 16:
        fewer = (macros["TOKENS"], macros["STAGES"]) == ("32", "4") and "EIGHT_BITS" in macros
        return ARCHS[1:2] if fewer else ARCHS[2:]
    wide = made.file == "attention_decode.cu" and macros["DEPTH"] == "256"
    if macros.get("WGMMA") == "1" or made.file in NEWEST or wide:
        return ARCHS[2:]
    if needs_tensor_cores(made):
        return ARCHS[1:]
    alone = made.file == "experts_gemv.cu" and macros["HALVES"] != "0"
    return ARCHS[:1] if alone else ARCHS


def dealt(modules: list[source.Module]) -> list[tuple[source.Module, str]]:
    """The modules and generations that the tests compile.

    The modules of a source differ in their macros. They are dealt out to the generations by a hash,
    so that each is compiled once. Then each generation gets what it lacks: modules with every value
    of every macro of every source that it may use.
    """
    pairs, seen = [], set()
    hashed = [targets(m)[zlib.crc32(str(m).encode()) % len(targets(m))] for m in modules]
    for own, others in ((True, ()), (False, ARCHS)):
        for made, first in zip(modules, hashed):
            for arch in (first,) if own else [a for a in others if a in targets(made)]:
                values = {(made.file, arch, define) for define in made.defines or [None]}
                if own or not values <= seen:
                    pairs.append((made, arch))
                    seen |= values
    return pairs


PAIRS = dealt(list(source.MODULES))


def compiled_logs(pairs: list[tuple[source.Module, str]]) -> Iterator[str | GraphllmError]:
    """The assembler's log of each module and generation, or the error."""

    def compiled(pair):
        try:
            return source.compile_module(*pair).log
        except GraphllmError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(compiled, pairs)


def spills(log: str | GraphllmError) -> dict[str, int]:
    """Bytes of local memory of the kernels that use any."""
    assert not isinstance(log, GraphllmError), log
    used = source.resource_usage(log)
    assert used
    return {name: local for name, (_, local) in used.items() if local}


@pytest.fixture(scope="module")
def logs(request):
    """The log of each selected module and generation, or the error."""
    name = test_compiles_without_spills.__name__
    chosen = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    pairs = [(item.callspec.params["module"], item.callspec.params["arch"]) for item in chosen]

    return dict(zip(pairs, compiled_logs(pairs)))


@pytest.mark.nvrtc
@pytest.mark.parametrize("module, arch", PAIRS, ids=str)
def test_compiles_without_spills(module, arch, logs):
    used = spills(logs[module, arch])
    assert max(used.values(), default=0) <= allowed(module, arch), used


def test_modules_are_dealt_out_to_the_generations():
    """Each is compiled, and each generation compiles every value of every macro."""
    assert {made for made, _ in PAIRS} == set(source.MODULES) and len(set(PAIRS)) == len(PAIRS)
    for arch in ARCHS:
        may = [made for made in source.MODULES if arch in targets(made)]
        does = [made for made, each in PAIRS if each == arch]
        assert {made.file for made in does} == {made.file for made in may}
        values = [{(m.file, define) for m in some for define in m.defines} for some in (may, does)]
        assert values[0] == values[1]


def sampled_timed_builds() -> list[source.Module]:
    """Timed builds of the first and the last module of each file with kernels of plan steps."""
    files: dict[str, list[source.Module]] = {}
    for made in source.MODULES:
        if "RECORD_TIMESTAMPS" in made.text:
            files.setdefault(made.file, []).append(made)
    assert len(files) > 15
    some = {each: None for modules in files.values() for each in (modules[0], modules[-1])}
    return [source.timed_build(made) for made in some]


@pytest.mark.nvrtc
@pytest.mark.parametrize("made", sampled_timed_builds(), ids=str)
def test_timed_builds_compile_without_spills(made):
    used = spills(source.compile_module(made, "sm_90a").log)
    assert max(used.values(), default=0) <= allowed(made, "sm_90a"), used


@pytest.mark.nvrtc
def test_only_timed_builds_read_the_clock():
    """In the PTX of one module of each file. To time blocks as well, kernels read it twice more.

    A run compiles a third of the files, another one each day.
    """
    for made in rotated(sampled_timed_builds()[::2], 3):
        plain = source.Module(made.file, made.defines[:-1])
        assert source.timed_build(plain) == made
        builds = plain, made, source.block_timed_build(plain)
        texts = [source.compile_module(each, "compute_90").code for each in builds]
        reads = [text.count(b"globaltimer") for text in texts]
        kernels = texts[0].count(b".entry")
        assert reads[0] == 0 < reads[1] and reads[2] >= reads[1] + 2 * kernels, made


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "file", ["gemv.cu", "gemv_ring.cu", "attention_decode.cu", "norm_router.cu", "gemm.cu"]
)
def test_builds_that_time_blocks_compile_without_spills(file):
    made = next(each for each in source.MODULES if each.file == file)
    assert not spills(source.compile_module(source.block_timed_build(made), "sm_90a").log)


def test_every_kernel_of_a_step_can_be_timed():
    of_no_step = ("support", "weight_packing", "e4m3_copy")  # the last two pack weights at load
    for path in sorted(source.SOURCES.glob("*.cu")):
        if path.stem in of_no_step or path.stem.startswith("roofline"):
            continue
        text = path.read_text("utf-8")
        kernels = len(re.findall("__global__", text))
        assert kernels == len(re.findall(r" TIMESTAMPS\)", text)), path.name
        assert kernels == len(re.findall(r"^ +RECORD_TIMESTAMPS\b", text, re.M)), path.name


@pytest.mark.nvrtc
def test_compiler_errors_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SOURCES", tmp_path)
    (tmp_path / "common.cuh").write_text("typedef int i32;\n")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f(i32* x) { *x = y; }\n')
    monkeypatch.setattr(source, "_headers", lambda: {"common.cuh": "typedef int i32;\n"})
    with pytest.raises(GraphllmError, match=r'broken\.cu\(1\): error: identifier "y"'):
        source.compile_module(source.Module("broken.cu"), "sm_80")


@pytest.mark.nvrtc
def test_code_is_cached_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path))
    made = source.module("support")
    code = source.load_or_compile(made, "sm_80")
    (file,) = (tmp_path / "cuda").iterdir()
    assert source.is_cached(made, "sm_80") and not source.is_cached(made, "sm_90a")
    monkeypatch.setattr(source, "compile_module", None)  # compiling now is an error
    assert source.load_or_compile(made, "sm_80") == code
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TypeError):
        source.load_or_compile(made, "sm_80")


def test_the_reason_is_one_line():
    ok, reason = cuda._probe()
    assert reason and "\n" not in reason
    if importlib.util.find_spec("cupy") is None:
        assert not ok and "pip install" in reason


def test_hidden_gpus_are_not_reported(monkeypatch):
    installed = importlib.util.find_spec("cupy") is not None
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not cuda._wanted()
    for shown in (None, "1"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert cuda._wanted() == installed


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "driver, count, capability, words",
    [
        (0, 0, (9, 0), "no NVIDIA driver"),
        (11080, 1, (9, 0), r"the driver knows CUDA 11\.8, CuPy needs 1\d\.0"),
        (99000, 0, (9, 0), "no GPU is visible"),
        (99000, 1, (7, 0), r"Old GPU has compute capability 7\.0, below 7\.5"),
        (99000, 1, (12, 1), r"Old GPU, 80 GB, compute capability 12\.1, .*NVRTC 1\d.*, CuPy 1"),
    ],
)
def test_reasons_for_no_gpu(monkeypatch, driver, count, capability, words):
    from cupy.cuda import runtime

    from graphllm.backends.cuda.runtime import detect

    found = dict(zip(("major", "minor"), capability), name=b"Old GPU", totalGlobalMem=80e9)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: driver)
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: count)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: found)
    monkeypatch.setattr(detect, "_driver_is_installed", lambda: True)
    ok, reason = detect.probe.__wrapped__(MIN_CAPABILITY)
    assert re.match(words, reason) and ok == (
        capability > MIN_CAPABILITY and count == 1 and driver > 12000
    )


@pytest.mark.nvrtc
def test_doctor_reports_the_reason_in_one_line():
    """No GPU is visible to the process, with CuPy installed and with or without a driver."""
    done = subprocess.run(
        [sys.executable, "-m", "graphllm", "doctor"], capture_output=True, text=True, check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("cuda "))
    assert re.match(r"cuda +not usable: (no NVIDIA driver is installed|no usable GPU: .+)$", line)
    assert not done.stderr


def test_importing_the_backend_imports_no_cupy():
    code = "import sys, graphllm.backends.cuda; print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def main(files: list[str]) -> int:
    """Compile the modules of ``files``, or all, for all generations; return how many fail."""
    pairs = [(m, a) for m in source.MODULES for a in targets(m) if m.file in files or not files]
    failures = 0
    for (made, arch), log in zip(pairs, compiled_logs(pairs)):
        problem = log if isinstance(log, GraphllmError) else spills(log)
        if isinstance(problem, GraphllmError) or max(problem.values(), default=0) > allowed(
            made, arch
        ):
            failures += 1
            print(f"{made} for {arch}: {problem}")
    print(f"{len(pairs) - failures} of {len(pairs)} compile without local memory")
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) != 0)
