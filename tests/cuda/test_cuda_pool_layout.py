"""Quantised pools on the GPU: slots have the elements of all heads, then all scales."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm import formats  # noqa: F401  (declares the block formats)
from graphllm.backends.cuda.runtime import pool_layout
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Meta

HEADS, WIDTH = 3, 96


def row(kind: str) -> tuple[list[int], list[int]]:
    """Bytes of a slot elsewhere: those of elements, and those of scales."""
    if kind == "fp8":
        each, scale = WIDTH + 4, range(WIDTH, WIDTH + 4)
    else:
        each, scale = dtype(kind).nbytes, range(2)
    places = range(HEADS * dtype(kind).row_nbytes(WIDTH))
    return [i for i in places if i % each not in scale], [i for i in places if i % each in scale]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "fp8"])
@pytest.mark.parametrize("slots", [0, 1, 5])
def test_elements_come_before_scales(kind, slots):
    elements, scales = row(kind)
    meta = Meta.of((slots, HEADS, WIDTH), kind)
    stored = np.random.default_rng(slots).integers(
        0, 256, (slots, len(elements) + len(scales)), np.uint8
    )
    got = pool_layout.to_gpu(meta, stored)
    np.testing.assert_array_equal(got, stored[:, elements + scales])
    np.testing.assert_array_equal(pool_layout.from_gpu(meta, got), stored)
    assert pool_layout.scales_offset(meta) == len(elements)


def test_other_states_keep_their_layout():
    assert pool_layout.scales_are_apart(Meta.of((5, HEADS, WIDTH), "q8_0"))
    others = (((5, HEADS, WIDTH), "f16"), ((5, WIDTH), "q8_0"), ((5, HEADS, 256), "q4_k"))
    for shape, kind in others:
        assert not pool_layout.scales_are_apart(Meta.of(shape, kind))
