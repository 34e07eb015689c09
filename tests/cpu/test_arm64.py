"""The CPU backend on 64-bit Arm: kernels compiled for Arm, run by a Python under qemu-user.

`tests/support/arm64_root.sh FOLDER` makes that Python, and GRAPHLLM_TEST_ARM=FOLDER names it. A
run takes a part of the ops and formats, another one each day; see tests/support/rotation.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from linear_cases import BLOCKS, digests
from op_runs import KERNELS, block_formats
from rotation import rotated

import graphllm

pytestmark = pytest.mark.arm64
PROGRAM = Path(__file__).parents[1] / "support" / "arm64.py"
PARTS = 8
# Without and with dot products of bytes.
PROCESSORS = {
    "generic": "generic (neon, 128-bit vectors)",
    "neoverse-n1": "neoverse-n1 (neon, dotprod, 128-bit vectors)",
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder for kernels, with the package in ``package``."""
    folder = tmp_path_factory.mktemp("arm64")
    package = folder / "package" / "graphllm"
    package.mkdir(parents=True)
    (models,) = graphllm.models.__path__  # elsewhere in an editable installation
    for path in [*Path(graphllm.__file__).parent.iterdir(), Path(models)]:
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    return folder


def run(processor: str, kernels: Path, *action: str) -> list[str]:
    """Compile the kernels of an action, run it on the emulated processor; returns its lines."""
    paths = [str(kernels / "package"), os.environ["PYTHONPATH"]]
    env = {
        **os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "",
        "GRAPHLLM_CACHE": str(kernels / processor), "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    python = str(Path(os.environ["GRAPHLLM_TEST_ARM"]) / "python")
    for step, program in (("compile", sys.executable), ("run", python)):
        done = subprocess.run(
            [program, str(PROGRAM), step, *action],
            env=env, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def some_samples(processor: str) -> list[str]:
    shift = PARTS // 2 * list(PROCESSORS).index(processor)
    pairs = [(op, form) for op in KERNELS for form in block_formats(op)]
    return [f"{op}:{form}" for op, form in rotated(pairs, PARTS, shift)]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_op(processor, kernels):
    described, *wrong = run(processor, kernels, "samples", *some_samples(processor))
    assert described == PROCESSORS[processor]
    assert not wrong, "\n".join([f"{len(wrong)} samples are wrong", *wrong[:8]])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_linears_give_the_same_bits(processor, kernels):
    formats = rotated(BLOCKS, PARTS, 2 * list(PROCESSORS).index(processor))
    assert run(processor, kernels, "linears", *formats) == list(digests(formats))


@pytest.mark.realmodel
def test_the_demo_gives_the_same_tokens(demo_path, kernels):
    prompt, count = "The capital of France is", 4
    llm = graphllm.load(demo_path, device="cpu", context=64)
    expected = llm.generate(prompt, max_tokens=count, temperature=0).ids
    found = run("neoverse-n1", kernels, "greedy", str(demo_path), prompt, str(count))
    assert found[-1] == str(expected)
