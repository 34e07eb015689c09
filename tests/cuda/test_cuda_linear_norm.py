"""Linears around the norm of one token, which share its computation: plans, and results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import groups
from cuda_cases import need_gpu
from cuda_results import unequal
from op_runs import report
from paper_cuda import paper_fixture, plan_on_paper  # noqa: F401

from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.cuda.kernels import linear_norm
from graphllm.checkpoints.model_shapes import SHAPES

OPS = ("linear_add_norm_gated", "linear_add_norm_linears")


def kernels_on_paper(device, shape, kind: str, tokens: int = 1) -> list[tuple[str, list[str]]]:
    """Ops of a plan on a GPU with 132 multiprocessors, each with the kernels that it launches."""
    device.gpu.processors = 132
    own = plan_on_paper(device, shape, kind, tokens)
    return [(op, [w.function.name for w in launched]) for op, launched in own]


MISTRAL = SHAPES["mistral-7b"]


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_only_the_first_and_the_last_norm_have_launches(kind, paper):
    """Two norms of each layer, and the last one."""
    steps = kernels_on_paper(paper((9, 0)), MISTRAL, kind)
    launched = [name for _, names in steps for name in names]
    assert sum("norm" in name for name in launched) == 2
    assert [op for op, _ in steps if "norm" in op and op in OPS] == [OPS[0], OPS[1], OPS[0]]
    for op, names in steps:
        if op in OPS:
            after = ["quantise_32"] if op == OPS[0] else []
            assert names == ["gemv", "gemv", *after]


@pytest.mark.parametrize(
    "kind, tokens, options",
    [("q4_0", 2, Options()), ("q4_0", 512, Options()), ("q4_0", 1, Options(deterministic=True)),
     ("q4_0", 1, Options(linear="float")), ("q4_k_m", 1, Options()), ("f16", 1, Options())],
)  # fmt: skip
def test_plans_with_launches_for_all_norms(kind, tokens, options, paper):
    """Of several tokens, if results must not depend on their number, of other activations than int8
    in blocks of 32."""
    steps = kernels_on_paper(paper((9, 0), options), MISTRAL, kind, tokens)
    assert steps and not {op for op, _ in steps} & {*OPS}


@pytest.mark.parametrize("width, fits", [(2048, False), (4096, True), (5120, False), (8192, True)])
def test_blocks_of_the_linear_before_the_norm_fill_the_gpu(width, fits, paper):
    """64, 128, 160 and 256 blocks on 132 multiprocessors: else the norm has a launch."""
    shape = replace(MISTRAL, dim=width, heads=width // 128, intermediate_size=8192)
    steps = kernels_on_paper(paper((9, 0)), shape, "q4_0")
    names = [names for op, names in steps if op in OPS]
    assert len(names) == 3
    assert all(("norm_quantise_1" in each) == (not fits) for each in names)


@pytest.mark.cuda
@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("name", OPS)
def test_samples_with_and_without_a_launch_of_the_norm(name, least, monkeypatch):
    need_gpu()
    monkeypatch.setattr(linear_norm, "_MIN_OCCUPANCY", least)
    wrong = []
    for group in groups(ops.get(name)):
        cases = {c.sample.label: (c.feeds, c.sample.env) for c in group.cases}
        wrong += unequal(group.node, cases, group.weights, max(c.tolerance for c in group.cases))
    assert not wrong, report(wrong)
