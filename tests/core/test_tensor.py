"""Meta and views: the same shapes, strides and bytes as NumPy's views of the same array."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm import ops
from graphllm.errors import GraphError
from graphllm.graph.tensor import Meta, Tensor, Var, current_scope, feed, scope, weight

T = Var("T", 1, 16)


def as_numpy(node: Tensor, data: np.ndarray) -> np.ndarray:
    """Return the NumPy view of ``data`` that corresponds to ``node``, a view of a leaf."""
    meta = node.meta.at({"T": data.shape[0]})
    return np.ndarray(meta.shape, data.dtype, data.data, meta.offset, meta.strides)


@pytest.mark.parametrize("rows", [1, 5])
def test_views_match_numpy(rows):
    data = np.arange(rows * 24, dtype=np.float32).reshape(rows, 24)
    x = feed("x", (T, 24), "f32")
    cases = [
        (x.heads(4), data.reshape(rows, 4, 6)),
        (x.slice(1, 6, 18), data[:, 6:18]),
        (x.slice(1, 6, 18).heads(3), data[:, 6:18].reshape(rows, 3, 4)),
        (x.heads(4).permute(0, 2, 1), data.reshape(rows, 4, 6).transpose(0, 2, 1)),
        (x.heads(4).slice(2, 0, 3), data.reshape(rows, 4, 6)[:, :, :3]),
        (x.heads(4).flatten(), data),
        (x.heads(4).slice(1, 1, 3).flatten(), data[:, 6:18]),
        (x.reshape(T, 2, 3, 4).permute(0, 3, 1, 2).reshape(T, 4, 6),
         data.reshape(rows, 2, 3, 4).transpose(0, 3, 1, 2).reshape(rows, 4, 6)),
        (x.reshape(T, 1, 24).expand(T, 3, 24), np.broadcast_to(data[:, None], (rows, 3, 24))),
    ]  # fmt: skip
    for node, want in cases:
        assert node.is_view and node.base is x
        np.testing.assert_array_equal(as_numpy(node, data), want)


def test_a_reshape_that_strides_cannot_express_inserts_a_copy():
    x = feed("x", (T, 4, 6), "f32").permute(0, 2, 1)
    node = x.reshape(T, 24)
    assert node.is_view and node.base.op == ops.role("layout").name


def test_contiguity():
    x = feed("x", (T, 8), "f32")
    assert x.meta.contiguous and x.meta.inner_contiguous
    part = x.slice(1, 2, 6)
    assert not part.meta.contiguous and part.meta.inner_contiguous
    turned = x.heads(2).permute(0, 2, 1)
    assert not turned.meta.inner_contiguous


def test_block_formats_count_blocks():
    w = weight("w", (6, 96), "q8_0")
    assert w.meta.strides == (3 * 34, 34) and w.meta.nbytes == 6 * 3 * 34
    part = w.slice(1, 32, 96)
    assert part.meta.offset == 34 and part.meta.strides == w.meta.strides
    with pytest.raises(GraphError, match="cuts a q8_0 block"):
        w.slice(1, 16, 96)
    with pytest.raises(GraphError, match="whole q4_k blocks"):
        Meta.of((2, 100), "q4_k")


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.reshape(T, 5),
        lambda x: x.heads(5),
        lambda x: x.slice(1, 4, 30),
        lambda x: x.slice(0, 0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.expand(T, 7),
        lambda x: Meta.of((3, T), "f32"),
        lambda x: Meta.of((3,), "f33"),
    ],
)
def test_impossible_views_are_errors(build):
    with pytest.raises(GraphError):
        build(feed("x", (T, 24), "f32"))


def test_scopes_and_origin():
    with scope("model"), scope("layers.3"):
        assert current_scope() == "model.layers.3"
        x = feed("x", (T, 24), "f32")
    assert x.scope == "model.layers.3"
    assert x.origin.startswith(__file__)
    with pytest.raises(GraphError, match=r"scale\(f32\[T,24\]\): needs the attribute"):
        ops.scale(x)
    with pytest.raises(GraphError, match=r"layers\.0: rms_norm\("), scope("layers.0"):
        ops.rms_norm(x, weight("w", (5,), "f32"), eps=1e-6)


Q = feed("q", (T, 24), "f32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Q.heads(5), "heads(f32[T,24]): 24 columns do not split into 5 heads"),
        (lambda: Q.reshape(T, 5, 5), "reshape(f32[T,24]): number of elements differs"),
        (lambda: Q.reshape(12, 2), "reshape(f32[T,24]): a varying axis 0 must stay"),
        (lambda: Q.permute(0, 2), "permute(f32[T,24]): (0, 2) is not a permutation of 2 axes"),
        (lambda: Q.permute(1, 0), "permute(f32[T,24]): a varying axis 0 cannot move"),
        (lambda: Q.slice(1, 20, 25), "slice(f32[T,24]): 20:25 is not within axis 1 of 24"),
        (lambda: Q.slice(2, 0, 1), "slice(f32[T,24]): there is no axis 2"),
        (lambda: Q.expand(T, 48), "expand(f32[T,24]): only axes of one element can repeat"),
        (lambda: ops.add(Q, 3.0), "add(f32[T,24], a float): 3.0 is not a Tensor"),
        (lambda: ops.add(Q), "add(f32[T,24]): takes a, b; got 1 operands"),
        (lambda: ops.silu(Q, eps=1), "silu(f32[T,24]): has no attribute eps"),
    ],
)
def test_an_error_names_line_scope_and_shapes(make, message):
    with pytest.raises(GraphError) as caught, scope("model.layers.3"):
        make()
    line = make.__code__.co_firstlineno
    where, _, text = str(caught.value).partition(": model.layers.3: ")
    assert where.endswith(f"test_tensor.py:{line}") and text.startswith(message)
