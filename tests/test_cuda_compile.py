"""Every CUDA kernel in use compiles, for every GPU generation named here, without a GPU or driver;
and none of them keeps anything in local memory, but those listed."""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphllm.backends import cuda
from graphllm.backends.cuda import source
from graphllm.errors import GraphllmError

ARCHS = ("sm_80", "sm_90a")
LOCAL: dict[str, int] = {}  # bytes of local memory that a kernel may use, by name

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="NVRTC comes with CuPy's extra [ctk]"
)


@pytest.fixture(scope="module")
def logs():
    """What the assembler says of each module for each generation, or the error."""
    wanted = [(module, arch) for arch in ARCHS for module in source.MODULES]

    def compiled(module, arch):
        try:
            return source.compile_module(module, arch).log
        except GraphllmError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(lambda pair: compiled(*pair), wanted)))


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", source.MODULES, ids=str)
def test_compiles_without_spills(module, arch, logs):
    log = logs[module, arch]
    assert not isinstance(log, GraphllmError), log
    used = source.resources(log)
    assert used
    spilled = {name: local for name, (_, local) in used.items() if local > LOCAL.get(name, 0)}
    assert not spilled


@needs_nvrtc
def test_errors_of_the_compiler_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_FOLDER", tmp_path)
    (tmp_path / "common.cuh").write_text("typedef int i32;\n")
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void f(i32* x) { *x = y; }\n')
    monkeypatch.setattr(source, "_headers", lambda: {"common.cuh": "typedef int i32;\n"})
    with pytest.raises(GraphllmError, match=r'broken\.cu\(1\): error: identifier "y"'):
        source.compile_module(source.Module("broken.cu"), "sm_80")


@needs_nvrtc
def test_code_is_kept_on_disk_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path))
    made = source.module("support")
    code = source.image(made, "sm_80")
    (file,) = (tmp_path / "cuda").iterdir()
    assert source.kept(made, "sm_80") and not source.kept(made, "sm_90a")
    monkeypatch.setattr(source, "compile_module", None)  # whoever compiles now, fails
    assert source.image(made, "sm_80") == code
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TypeError):
        source.image(made, "sm_80")


def test_what_is_missing_is_said_in_one_line():
    ok, reason = cuda._probe()
    assert reason and "\n" not in reason
    if importlib.util.find_spec("cupy") is None:
        assert not ok and "pip install" in reason


def test_who_hides_all_gpus_is_not_told(monkeypatch):
    installed = importlib.util.find_spec("cupy") is not None
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not cuda._wanted()
    for shown in (None, "1"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert cuda._wanted() == installed


@needs_nvrtc
@pytest.mark.parametrize(
    "driver, count, capability, words",
    [
        (0, 0, (9, 0), "no NVIDIA driver"),
        (11080, 1, (9, 0), r"the driver knows CUDA 11\.8, CuPy needs 1\d\.0"),
        (99000, 0, (9, 0), "no GPU is visible"),
        (99000, 1, (7, 0), r"Old GPU has compute capability 7\.0, below 7\.5"),
        (99000, 1, (12, 1), r"Old GPU, 80 GB, compute capability 12\.1, .*NVRTC"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, driver, count, capability, words):
    from cupy.cuda import runtime

    from graphllm.backends.cuda import LEAST
    from graphllm.backends.cuda.probe import probe

    found = dict(zip(("major", "minor"), capability), name=b"Old GPU", totalGlobalMem=80e9)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: driver)
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: count)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda index: found)
    ok, reason = probe.__wrapped__(LEAST)
    assert re.match(words, reason) and ok == (capability > LEAST and count == 1 and driver > 12000)


def test_importing_the_backend_imports_no_cupy():
    import subprocess
    import sys

    code = "import sys, graphllm.backends.cuda; print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
