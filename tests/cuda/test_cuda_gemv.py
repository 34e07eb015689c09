"""Shapes of gemv.cu for one token are within the limits of the kernel."""

from __future__ import annotations

import pytest
from linear_cases import INTEGER_BLOCKS

from graphllm.backends.cuda.kernels import gemv_shapes
from graphllm.formats import WEIGHT_FORMATS
from graphllm.graph.dtype import dtype


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_shapes_fit_the_kernel(name):
    for integer in (False, True)[: 1 + (name in INTEGER_BLOCKS)]:
        for k in (32, 96, 256, 800, 4096, 8192, 8224, 14336):
            for gated in (False, True):
                shape = gemv_shapes.shape(name, integer, k, gated)
                assert not shape.staged or (integer and dtype(name).block in (32, 256))
                assert not (shape.split and gated)
                assert shape.warps % 2 == 0 and (shape.warps >= 4 or not shape.split)
                assert shape.resident * shape.warps * 32 <= 2048
                grouped = shape.lanes < 32
                assert not grouped or (dtype(name).block <= 32 and not shape.split)
                assert shape.rows * (1 + gated) <= shape.lanes


def test_several_tokens_use_no_options_for_one():
    for name in WEIGHT_FORMATS:
        shape = gemv_shapes.shape(name, name in INTEGER_BLOCKS, 4096, False, tokens=4)
        assert not (shape.ahead or shape.staged or shape.split) and shape.resident == 1
