"""NumPy formulas of block formats against the `gguf` package, and of quantised activations."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from graphllm.errors import GraphError
from graphllm.formats import A8_32, A8_256, gguf_formats
from graphllm.formats.activations import dequantise_act, quantise_act, split_act
from graphllm.formats.k_quants import Q4_K
from graphllm.formats.legacy import Q8_0
from graphllm.formats.quantization import Blocks, dequantise, quantise
from graphllm.graph.dtype import DTYPES, F32, DType

UNDECLARED = DType("iq2_xxs", 256, 66)  # a format that is not declared


def random_bytes(dtype: DType, rows: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (rows, blocks * dtype.nbytes), dtype=np.uint8)


@pytest.mark.parametrize("name", [*gguf_formats(), "bf16", "f16", "f32"])
def test_dequantise_is_bit_equal(name: str) -> None:
    dtype = DTYPES[name]
    raw = random_bytes(dtype, 67, 6)
    data = raw.view(dtype.numpy) if name in ("f16", "f32") else raw
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    want = want.astype(np.float32)
    got = dequantise(raw, dtype)
    assert got.dtype == np.float32 and got.shape == (67, 6 * dtype.block)
    real = ~np.isnan(want)
    assert (np.isnan(got) == ~real).all()
    assert (got.view(np.uint32)[real] == want.view(np.uint32)[real]).all()


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "bf16", "i8"])
def test_dequantise_any_shape_and_strides(name: str) -> None:
    dtype = DTYPES[name]
    raw = random_bytes(dtype, 12, 4)
    flat = dequantise(raw, dtype)
    shaped = dequantise(raw.reshape(3, 4, -1), dtype)
    np.testing.assert_array_equal(shaped.reshape(flat.shape), flat)
    np.testing.assert_array_equal(dequantise(raw[::3], dtype), flat[::3])
    assert dequantise(raw[:0], dtype).shape == (0, 4 * dtype.block)


def test_dequantise_refuses() -> None:
    with pytest.raises(GraphError, match="not whole q8_0 blocks"):
        dequantise(np.zeros((2, 35), np.uint8), Q8_0)
    with pytest.raises(GraphError, match="not whole"):
        dequantise(np.zeros((2, 34), np.int8), Q8_0)
    with pytest.raises(GraphError, match="no dequantise formula for iq2_xxs"):
        dequantise(np.zeros((2, 66), np.uint8), UNDECLARED)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"])
def test_quantise_is_bit_equal(name: str) -> None:
    x = np.random.default_rng(2).standard_normal((9, 320)).astype(np.float32)
    x[1] = 0
    x[2, :32] = 1e-30
    x[3] = np.round(x[3] * 4)
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(quantise(x, DTYPES[name]), want)


# Largest error and least correlation. The error is half a step of the largest sub-block for values
# of +-4, plus a little for rounded scales; a whole step where the range of q is not symmetric.
@pytest.mark.parametrize(
    ("name", "limit", "correlation"),
    [
        ("q8_0", 0.02, 0.99), ("q4_0", 0.55, 0.99), ("q4_1", 0.28, 0.99), ("q5_0", 0.3, 0.99),
        ("q5_1", 0.14, 0.99), ("q2_k", 1.2, 0.96), ("q3_k", 1.0, 0.99), ("q4_k", 0.3, 0.99),
        ("q5_k", 0.16, 0.99), ("q6_k", 0.15, 0.99), ("iq4_nl", 0.45, 0.99), ("iq4_xs", 0.5, 0.99),
        ("nf4", 0.62, 0.99), ("mxfp4", 1.0, 0.99), ("bf16", 0.016, 0.99),
    ],
)  # fmt: skip
def test_quantise_is_close(name: str, limit: float, correlation: float) -> None:
    rng = np.random.default_rng(3)
    x = np.clip(rng.standard_normal((16, 512)), -4, 4).astype(np.float32)
    x[0], x[1], x[2] = 0, 3, -np.abs(x[2])
    back = dequantise(quantise(x, DTYPES[name]), DTYPES[name])
    assert np.abs(back - x).max() < limit
    assert (back[0] == 0).all()
    assert np.corrcoef(back.ravel(), x.ravel())[0, 1] > correlation


def test_quantise_refuses() -> None:
    with pytest.raises(GraphError, match="finite"):
        quantise(np.full((1, 32), np.nan, np.float32), Q8_0)
    with pytest.raises(GraphError, match="whole"):
        quantise(np.zeros((1, 33), np.float32), Q8_0)
    with pytest.raises(GraphError, match="no quantiser for iq2_xxs"):
        quantise(np.zeros((1, 256), np.float32), UNDECLARED)


@pytest.mark.parametrize("dtype", [Q4_K, F32])
def test_blocks(dtype: DType) -> None:
    x = np.random.default_rng(4).standard_normal((33, 512)).astype(np.float32)
    blocks = Blocks(quantise(x, dtype), dtype, 512)
    whole = blocks.dequantise()
    assert blocks.shape == whole.shape == (33, 512) and len(blocks) == 33
    rows = np.array([5, 0, 32, 5])
    np.testing.assert_array_equal(blocks[rows].dequantise(), whole[rows])
    np.testing.assert_array_equal(blocks[3:20:2].dequantise(), whole[3:20:2])
    assert blocks[3:20].raw.base is not None  # a slice is a view
    tiles = list(blocks.tiles(max_bytes=4 * 512 * 10))
    assert [(start, len(tile)) for start, tile in tiles] == [(0, 10), (10, 10), (20, 10), (30, 3)]
    np.testing.assert_array_equal(np.concatenate([tile for _, tile in tiles]), whole)
    assert [len(tile) for _, tile in blocks.tiles(max_bytes=1)] == [1] * 33
    with pytest.raises(GraphError, match="elements a row need"):
        Blocks(blocks.raw, dtype, 256)


@pytest.mark.parametrize("dtype", [A8_32, A8_256])
def test_activations_follow_the_definition(dtype: DType) -> None:
    """Compare with a scalar loop written from the docstring."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((5, 512)) * 10.0 ** rng.integers(-6, 6, (5, 1))).astype(np.float32)
    x[2, :256] = np.round(x[2, :256])
    q, d, sums = split_act(quantise_act(x, dtype), dtype, 512)
    for row in range(5):
        for block in range(512 // dtype.block):
            part = x[row, block * dtype.block : (block + 1) * dtype.block]
            amax = np.abs(part).max()
            assert d[row, block] == np.float32(amax / np.float32(127))
            inverse = np.float32(127) / amax if amax else np.float32(0)
            for i, value in enumerate(part):
                want = np.rint(np.float32(value * inverse))
                assert q[row, block * dtype.block + i] == want
    per_sum = 512 // sums.shape[1]
    assert (per_sum, sums.dtype) == ((32, np.int32) if dtype == A8_32 else (16, np.int16))
    np.testing.assert_array_equal(sums, q.reshape(5, -1, per_sum).sum(-1, dtype=np.int64))


@pytest.mark.parametrize("dtype", [A8_32, A8_256])
def test_activations_edges(dtype: DType) -> None:
    x = np.zeros((6, 256), np.float32)
    x[1], x[2] = 1.0, -(2.0**-101)
    x[3, 7], x[4, 7] = np.nan, -np.inf
    x[5] = 1e38
    raw = quantise_act(x, dtype)
    assert raw.shape == (6, dtype.row_nbytes(256)) and raw.dtype == np.uint8
    q, d, _ = split_act(raw, dtype, 256)
    back = dequantise_act(raw, dtype, 256)
    assert (back[[0, 2]] == 0).all() and (d[[0, 2]] == 0).all()
    assert (q[1] == 127).all() and (q[5] == 127).all()
    assert np.abs(back[1] - 1).max() < 1e-6 and np.isfinite(back[5]).all()
    assert np.isnan(back[3:5, : min(dtype.block, 32)]).all() and (q[3:5] == 0).all()
    assert quantise_act(x[:0], dtype).shape == (0, dtype.row_nbytes(256))


def test_activations_error_is_half_a_step() -> None:
    x = np.random.default_rng(6).standard_normal((4, 1024)).astype(np.float32)
    for dtype in (A8_32, A8_256):
        raw = quantise_act(x, dtype)
        _, d, _ = split_act(raw, dtype, 1024)
        step = np.repeat(d, dtype.block, axis=1)
        assert (np.abs(dequantise_act(raw, dtype, 1024) - x) <= 0.501 * step).all()
        with pytest.raises(GraphError):
            split_act(raw[:, :-1], dtype, 1024)
        with pytest.raises(GraphError, match="not whole"):
            quantise_act(x[:, :33], dtype)
    with pytest.raises(GraphError, match="not an activation format"):
        quantise_act(x, Q8_0)
