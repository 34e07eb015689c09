"""Every sample of every op on the reference and the CPU, through an executor with buffer guards.

Rows beyond the live ones must stay unchanged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from op_runs import (
    OPS,
    block_formats,
    check_costs,
    check_sample_sizes,
    grouped,
    report,
    run_all,
)

from graphllm import backends
from graphllm.backends import Kernel, Options

REFUSALS = Path(__file__).parents[1] / "golden" / "cpu_refusals.txt"


@pytest.mark.parametrize("name", OPS)
def test_reference(name):
    wrong = run_all(name, ("reference",), Options())
    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "name", [name for name in OPS if "" in block_formats(name) and name != "attention"]
)
def test_cpu(name):
    """The samples without block formats."""
    wrong = run_all(name, ("cpu", "reference"), Options(), formats=("",))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("kv", ["f16", "f32", "q8_0"])
def test_cpu_attention(kv):
    """The samples with keys of one type, which share kernels."""
    wrong = run_all(
        "attention", ("cpu", "reference"), Options(), select=lambda g: g.args[1].dtype.name == kv
    )
    assert not wrong, report(wrong)


@pytest.mark.parametrize(
    "name, form", [(name, form) for name in OPS for form in block_formats(name) if form]
)
def test_cpu_block_formats(name, form):
    wrong = run_all(name, ("cpu", "reference"), Options(), formats=(form,))
    assert not wrong, report(wrong)


@pytest.mark.parametrize("form", block_formats("linear"))
@pytest.mark.parametrize("linear, cap", [("float", 2e-5), ("integer", np.inf)])
def test_cpu_linear_options(linear, cap, form):
    """Without quantised activations only the order of summation may differ."""
    wrong = run_all("linear", ("cpu", "reference"), Options(linear=linear), cap, formats=(form,))
    assert not wrong, report(wrong)


def test_cpu_refusals():
    """The contiguous samples that cpu cannot run are exactly those of the committed list."""
    cpu = backends.find("cpu")
    refused = set()
    for name in OPS:
        for group in grouped(name):
            choice = cpu.select(group.node, Options()) if group.contiguous else None
            if choice is not None and not isinstance(choice, Kernel):
                refused.add(f"{name}: {choice}")
    lines = (line.strip() for line in REFUSALS.read_text().splitlines())
    assert refused == {line for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize("name", OPS)
def test_cost(name):
    check_costs(name)


@pytest.mark.parametrize("name", OPS)
def test_samples_cover_the_edges(name):
    check_sample_sizes(name)
