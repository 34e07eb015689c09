"""Runs of every op on its declared samples, checked against the NumPy body."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import numpy as np
from cases import SPARE, Case, Group, groups, mismatch

from graphllm import ops
from graphllm.backends import Options
from graphllm.compiler.placement import CALL
from graphllm.graph.tensor import Meta
from graphllm.ops.kv_cache import row_nbytes
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

OPS = sorted(n for n, op in ops.registry().items() if not op.fusion)  # test_fusion has those
# Ops that have kernels on all backends: others run on the reference only, or (pool) on GPUs, since
# the host pools hidden states with NumPy.
KERNELS = [n for n in OPS if ops.get(n).role != CALL and n != "pool"]
SENTINEL = 77


@cache
def grouped(name: str) -> list[Group]:
    return groups(ops.get(name))


def block_format(group: Group) -> str:
    """The block format of the group's weights; "" if it has none."""
    kinds = (arg.dtype for arg in group.args if arg is not None and arg.leaf == "weight")
    return next((kind.name for kind in kinds if kind.block > 1), "")


def block_formats(name: str) -> list[str]:
    """The block formats in the op's samples, "" for samples without one."""
    return list(dict.fromkeys(map(block_format, grouped(name))))


def run_all(
    name: str, order: tuple[str, ...], options: Options, cap: float = np.inf,
    floor: float = 0.0, formats: Collection[str] | None = None,
    select: Callable[[Group], bool] = lambda group: True,
) -> list[str]:  # fmt: skip
    """Run the op's samples and return a line for each failure.

    ``cap``, ``floor``: upper and lower bound of the tolerance. ``formats``: the `block_format` of
    the groups to run; None: all. ``select``: whether to run a group.
    """
    groups = [g for g in grouped(name) if formats is None or block_format(g) in formats]
    groups = list(filter(select, groups))
    assert groups, f"no sample of {name} has one of the formats {formats}"
    for group in groups:
        assert group.cases  # makes the weights as well
    weights = {k: v for group in groups for k, v in group.weights.items()}
    executor = GuardedExecutor(Arrays(weights), order, options)
    wrong = []
    for group in groups:
        plan = executor.compile({"y": group.node})
        for case in group.cases:
            executor.bind(plan)
            tolerance = max(floor, min(case.tolerance, cap))
            problem = run_one(executor, plan, group, case, tolerance)
            if problem:
                wrong.append(f"{case.sample.label}: {problem}")
    return wrong


def run_one(executor: Executor, plan, group: Group, case: Case, tolerance: float) -> str:
    """Run one sample; return what is wrong, or an empty string."""
    leaves = {leaf.name: leaf.meta.bound() for leaf in plan.leaves.values() if leaf.op == "state"}
    for name, meta in leaves.items():  # value of rows beyond the live ones
        executor.set_state(name, sentinels(meta))
    want, states = case.known
    meta = group.node.meta.at(case.sample.env)
    if meta.dtype.numpy is not None and (meta.shape, meta.dtype.numpy) != (want.shape, want.dtype):
        return f"the rule says {meta}, the body gives {want.dtype}{list(want.shape)}"
    blocks = {n for n, meta in leaves.items() if meta.dtype.numpy is None}  # rows that no feed has
    for name in blocks:
        executor.set_state(name, case.feeds[name])
    feeds = {name: data for name, data in case.feeds.items() if name not in blocks}
    got = executor.run(plan, feeds, case.sample.env)["y"]
    problem = mismatch(got, want, tolerance)
    if problem:
        return problem
    for name, want in states.items():
        got = executor.get_state(name)
        own = got[: len(want), ..., : want.shape[-1]] if want.ndim > 1 else got[: len(want)]
        problem = mismatch(
            own, want, tolerance
        )  # a "leading" operand has the first columns of wider rows
        if problem:
            return f"state {name}: {problem}"
        if (got[len(want) :] != SENTINEL).any():
            return f"state {name}: rows beyond the live ones were written"
    return ""


def sentinels(meta: Meta) -> np.ndarray:
    """Fill rows with sentinel values; bytes for a block format."""
    if meta.dtype.numpy is not None:
        return np.full(meta.shape, SENTINEL, meta.dtype.numpy)
    return np.full((meta.rows, row_nbytes(meta)), SENTINEL, np.uint8)


def report(wrong: list[str]) -> str:
    return "\n".join([f"{len(wrong)} samples are wrong", *wrong[:8]])


def check_costs(name: str) -> None:
    """Costs are finite, and zero bytes are moved for empty operands."""
    for group in grouped(name):
        for case in group.cases:
            cost = ops.get(name).node_cost(group.node, case.sample.env)
            assert cost.flops >= 0 and np.isfinite(cost.flops), case.sample.label
            assert cost.bytes >= 0 and np.isfinite(cost.bytes), case.sample.label
            if not any(case.sample.env.values()):
                assert cost.flops == 0, case.sample.label


def check_sample_sizes(name: str) -> None:
    """Every op has samples with no rows, one row, several rows, and padding rows."""
    least = {min(s.env.values()) for s in ops.get(name).samples}
    assert {0, 1} <= least and max(least) > 1 and SPARE > 0
