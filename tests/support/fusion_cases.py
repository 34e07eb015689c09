"""What the tests of fused ops on all backends share."""

from __future__ import annotations

import numpy as np

from graphllm.compiler import fusion
from graphllm.formats import activations
from graphllm.graph.tensor import Tensor

FUSED = sorted(fusion.rules())
# Rules that only save launch overhead, which is negligible on the CPU. They are tested in
# test_cuda.py and, without a GPU, in test_cuda_plans.py.
NOT_ON_CPU = {"combine_add", "expert_clamped", "expert_gated", "expert_linear_add",
              "linear_add_norm_gated", "linear_add_norm_linears", "linear_add_quantise",
              "linear_quantise", "linears_quantise", "moe_add", "norm_router",
              "packed_attention_quantise", "rope_attention", "rope_attention_quantise",
              "route"}  # fmt: skip
# Rules for weights that are rotated, as encoders' are if the first backend works in host memory.
NOT_ON_CUDA = {"hadamard_quantise", "layer_norm_hadamard"}


def named(results) -> dict[str, Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return {f"y{i}": result for i, result in enumerate(results)}


def values(array: np.ndarray, node: Tensor) -> tuple[np.ndarray, float]:
    """Return a result as floats, and the maximum difference of two roundings of one value."""
    if node.dtype not in activations.ACTIVATIONS:
        return array, 0.0
    k = int(node.shape[-1])
    found = activations.dequantise_act(array.reshape(-1, node.dtype.row_nbytes(k)), node.dtype, k)
    steps = 14 if node.dtype.name.startswith("f8") else 100  # e4m3: 416, then 448
    return found, float(np.nan_to_num(np.abs(found)).max(initial=0.0)) / steps


IDS = [1, 5, 300, 17, 9, 9, 250, 3, 44, 101, 7]


def nmse(have: np.ndarray, want: np.ndarray) -> float:
    have, want = have.astype(np.float64), want.astype(np.float64)
    return float(np.mean((have - want) ** 2) / np.mean(want**2))
