"""The levels of GRAPHLLM_DEBUG: each prints its own lines and those of the lower levels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
from remote_memory import remote  # noqa: F401
from tiny_models import llama_weights, write_llama

import graphllm
from graphllm.backends.cpu.runtime.cores import usable_cores
from graphllm.backends.cpu.runtime.jit import Kernel, args, i64s
from graphllm.backends.cuda.kernels import elementwise
from graphllm.backends.cuda.runtime.device import CudaDevice
from graphllm.backends.cuda.runtime.work import Launch
from graphllm.engine.request import Sampling

STEP = re.compile(
    r"^(\w+) +([\d.]+) us +([\d.]+) GB/s +([\d.]+) GFLOP/s  "
    r"(\w+)( \w+)? +T=(\d+) +(\S+\[.*\])(  \S+)?$"
)
THREADS = min(2, usable_cores())  # more threads than cores are reported at every level


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", llama_weights())


def generated(model, device: str = "cpu", **options) -> list[int]:
    """Generate five tokens after a prompt of three."""
    llm = graphllm.load(model, device=device, threads=THREADS, context=64, **options)
    return list(islice(llm.engine.generate([3, 1, 4], Sampling(temperature=0, seed=0), []), 5))


def said(capsys, monkeypatch, level: int | str, model) -> list[str]:
    """Return the debug lines of a generation."""
    monkeypatch.setenv("GRAPHLLM_DEBUG", str(level))
    generated(model)
    out, err = capsys.readouterr()
    assert not out
    return err.splitlines()


@pytest.mark.parametrize("level", ["", "0", "no"])
def test_nothing_is_said_unasked(level, tiny, capsys, monkeypatch):
    assert said(capsys, monkeypatch, level, tiny) == []


def test_one_backends_plans_and_memory(tiny, capsys, monkeypatch):
    lines = said(capsys, monkeypatch, 1, tiny)
    assert [line for line in lines if line.startswith("backend cpu: ")]
    assert [line for line in lines if re.fullmatch(r"\d+ steps in 1 segments", line)]
    memory = [line for line in lines if line.startswith("memory host: ")]
    kinds = r"weights ([\d.]+), inputs and state ([\d.]+), intermediates ([\d.]+)"
    whole, *parts = re.fullmatch(rf"memory host: ([\d.]+) MB: {kinds}", memory[-1]).groups()
    assert float(whole) == pytest.approx(sum(map(float, parts)), abs=0.2)
    assert not [line for line in lines if STEP.match(line) or line.startswith("graph, ")]


def test_two_a_line_for_every_step(tiny, capsys, monkeypatch):
    """For the prompt and four tokens: the last of five ids needs no further step."""
    plain = generated(tiny)
    lines = said(capsys, monkeypatch, 2, tiny)
    steps = [match for match in map(STEP.match, lines) if match]
    llm = graphllm.load(tiny, device="cpu", threads=THREADS, context=64)
    prompt, token = (plan.steps for plan in llm.engine.generation_plans())
    runs = [match for match in steps if match[5] == "sample"]
    assert [match[7] for match in runs][:2] == ["3", "1"] and len(runs) >= 5
    assert len(steps) == len(prompt) + (len(runs) - 1) * len(token)
    assert [match[5] for match in steps[: len(prompt)]] == [step.node.op for step in prompt]
    assert all(float(match[2]) > 0 for match in steps)
    assert {match[1] for match in steps} == {"cpu"} and "[3," in steps[0][8]
    assert "memory host: " in "\n".join(lines) and "graph, " not in "\n".join(lines)
    capsys.readouterr()
    assert generated(tiny) == plain  # the same run


def test_two_runs_of_several_backends(remote, tiny, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("GRAPHLLM_DEBUG", "2")
    generated(tiny, "remote", gpu_layers=2)
    steps = [match for match in map(STEP.match, capsys.readouterr().err.splitlines()) if match]
    assert {"remote", "reference"} == {match[1] for match in steps}
    assert "copy" in {match[5] for match in steps}


def test_three_the_graph_between_passes(tiny, capsys, monkeypatch):
    lines = said(capsys, monkeypatch, 3, tiny)
    stages = "\n".join(lines).split("\ngraph, ")[1:]
    titles = [stage.split(":\n")[0] for stage in stages]
    nodes = [len(re.findall(r"^%\d+ = ", stage, re.MULTILINE)) for stage in stages]
    assert titles[:4] == [
        "as built", "equal nodes merged", "narrowed",
        "lowered",
    ]  # fmt: skip
    fused = next(i for i, title in enumerate(titles) if title == "gated fused")
    assert nodes[0] >= nodes[1] >= nodes[2] and 0 < nodes[fused] < nodes[fused - 1]
    assert any(STEP.match(line) for line in lines) and "define " not in "\n".join(lines)


def kernel(key: str) -> Kernel:
    def double(p, thread, threads):
        (at,) = args(p, 1)
        i64s(at)[0] = 2 * i64s(at)[0]

    return Kernel(double, key=(key,))


def test_four_the_source_of_kernels(capsys, monkeypatch, tmp_path):
    """Also of kernels that are cached on disk."""
    for level, shown, how in ((1, False, "compiled"), (1, False, "loaded"), (4, True, "compiled")):
        monkeypatch.setenv("GRAPHLLM_DEBUG", str(level))
        assert kernel(str(tmp_path)).address
        err = capsys.readouterr().err
        assert ("define " in err) == shown and f"double: {how}, " in err


def test_four_the_source_of_cuda_kernels(capsys, monkeypatch):
    made = elementwise.module("elementwise")
    loaded = []
    device = object.__new__(CudaDevice)
    device.gpu = SimpleNamespace(
        is_loaded=lambda module, mostly_shared: False,
        is_cached=lambda module: True,
        load=lambda module, mostly_shared: loaded.append(module),
        arch="sm_80",
    )
    for level in (3, 4):
        monkeypatch.setenv("GRAPHLLM_DEBUG", str(level))
        device._load([Launch(made[name], (1,), (1,), ()) for name in ("silu", "add")])
        err = capsys.readouterr().err
        assert err == (f"elementwise.cu:\n{made.text}\n" if level == 4 else "")
    assert loaded == [made, made]


def test_errors_have_a_traceback():
    for level, shown in (("", False), ("1", True)):
        done = subprocess.run(
            [sys.executable, "-m", "graphllm", "inspect", "none.gguf"], capture_output=True,
            text=True, env={**os.environ, "GRAPHLLM_DEBUG": level},
        )  # fmt: skip
        assert done.returncode == 1 and ("Traceback" in done.stderr) == shown
        assert "none.gguf" in done.stderr
