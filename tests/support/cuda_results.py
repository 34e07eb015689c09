"""Comparison of results on CUDA."""

from __future__ import annotations

import numpy as np
from cases import mismatch
from fusion_cases import named, values
from op_runs import sentinels

from graphllm import ops
from graphllm.graph.fused_op import results
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays


def unequal(node, cases, weights, tolerance: float) -> list[str]:
    """A fused node on the GPU, with buffer guards, against its decomposition on the
    reference. ``cases``: label -> feeds. States begin as sevens."""
    op = ops.get(node.op)
    one, many = named(results(node)), named(op(*node.src, **node.attrs))
    gpu = GuardedExecutor(Arrays(weights), ("cuda",))
    reference = Executor(Arrays(weights), ("reference",))
    plans, wrong = (gpu.compile(one), reference.compile(many)), []
    for label, (feeds, env) in cases.items():
        found = []
        for executor, plan in zip((gpu, reference), plans):
            executor.bind(plan)
            for leaf in plan.leaves.values():
                if leaf.op == "state":
                    executor.set_state(leaf.name, np.full_like(sentinels(leaf.meta.bound()), 7))
            found.append(executor.run(plan, feeds, env))
        for key, result in one.items():
            (a, step), (b, _) = (values(f[key], result) for f in found)
            problem = mismatch(a, b, max(tolerance, step))
            wrong += [f"{label} {key}: {problem}"] if problem else []
    return wrong
