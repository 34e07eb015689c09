"""linear and quantise_act on the CPU: against float64, and batches against single tokens."""

from __future__ import annotations

import linear_cases
import numpy as np
import pytest
from linear_cases import (
    BLOCKS,
    CASES,
    COLUMNS,
    INTEGER,
    MOST,
    SCALES,
    Product,
    activation,
    any_bits,
)

from graphllm import ops
from graphllm.backends.cpu.formats import FORMATS
from graphllm.backends.cpu.kernels.weight_packing import pack, packed_bytes
from graphllm.errors import ModelFileError
from graphllm.formats import ROW_FORMATS, activations, quantization
from graphllm.graph.dtype import DType, dtype
from graphllm.graph.tensor import Meta, feed, scope, weight

TOKENS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 31, 37, MOST)
ROWS = (1, 15, 16, 33, 640)
PLAIN = ("f32", "f16", "bf16")
FOREIGN = DType("iq2_xxs", 256, 66)  # a format that nothing here reads


def compare(product: Product, raw: np.ndarray, kind: DType, x: np.ndarray, bias: bool) -> None:
    """Compare `MOST` tokens with float64, and results of fewer tokens with these."""
    got = product(x)
    w = quantization.dequantise(raw, kind).astype(np.float64)
    a = x.astype(np.float64)
    if len(product.steps) > 1:  # the integer kernel's operands
        stored, form = product.activations()
        assert np.array_equal(stored, activations.quantise_act(x, form))
        a = activations.dequantise_act(stored, form, product.k).astype(np.float64)
    offsets = product.bias.astype(np.float64) if bias else np.zeros(1)
    size = np.abs(a) @ np.abs(w).T + np.abs(offsets)
    np.testing.assert_array_less(np.abs(got - (a @ w.T + offsets)), 1e-6 * size + 1e-30)
    for tokens in TOKENS:
        assert np.array_equal(product(x[:tokens]), got[:tokens]), f"{tokens} tokens"
    assert np.array_equal(product(x[3:4]), got[3:4]), "alone"


@pytest.mark.parametrize("name, linear", CASES)
def test_linear(name, linear):
    kind = dtype(name)
    for k in COLUMNS[kind.block]:
        for n in ROWS:
            raw = any_bits(kind, n, k)
            compare(Product(raw, kind, k, linear), raw, kind, activation(k), bias=False)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_sums_fit(name):
    """All bits of q and of the scales are equal, and all activations are as large as possible."""
    kind, k = dtype(name), 512
    raw, x = any_bits(kind, 33, k), activation(k)
    blocks, scales = raw.reshape(33, -1, kind.nbytes), slice(*SCALES[name])
    kept = blocks[..., scales].copy()
    blocks[::2], blocks[1::2] = 0, 255
    blocks[:16, :, : kind.nbytes // 2] ^= 255  # the halves differ
    blocks[..., scales] = kept
    x[0], x[1], x[2], x[2, ::2] = 1, -1, 1, -1
    compare(Product(raw, kind, k), raw, kind, x, bias=False)


@pytest.mark.parametrize("name, linear", [("f16", "float"), ("q8_0", "auto"), ("q6_k", "float")])
def test_bias_and_strided_rows(name, linear):
    kind, k = dtype(name), 512
    raw = any_bits(kind, 33, k)
    product = Product(raw, kind, k, linear, bias=True, padding=5)
    compare(product, raw, kind, activation(k), bias=True)


@pytest.mark.parametrize("name, linear", [("f32", "float"), *((n, "auto") for n in INTEGER)])
def test_threads_change_nothing(name, linear):
    kind, k = dtype(name), 512
    raw, x = any_bits(kind, 640, k), activation(k)
    results = [Product(raw, kind, k, linear, threads=t)(x) for t in (1, 2, 3)]
    assert all(np.array_equal(r, results[0]) for r in results)


@pytest.mark.parametrize(
    "name, k",
    [("q8_0", 320), ("q4_k", 512), ("q6_k", 512), ("w8a8", 672), ("fp8", 352), ("f16", 96)],
)
def test_more_tokens_than_a_pass(name, k, monkeypatch):
    """The bits of a token are the same in every pass over a group. Passes are chunks of their own
    here, as the groups are few."""
    monkeypatch.setattr(linear_cases, "MOST", 517)
    kind = dtype(name)
    raw, x = any_bits(kind, 33, k), activation(k, 517)
    product = Product(raw, kind, k)
    got = product(x)
    for t in (0, 75, 76, 127, 128, 149, 150, 255, 256, 287, 288, 299, 511, 512, 516):
        assert np.array_equal(product(x[t : t + 1])[0], got[t]), t
    assert np.array_equal(product(x[:300]), got[:300])


@pytest.mark.parametrize("name, k", [("q8_0", 9248), ("q5_1", 2592), ("q6_k", 8448)])
def test_more_columns_than_a_pass_of_few_tokens(name, k):
    """On AVX2, the records of few tokens have space for 2,560 to 8,192 columns."""
    kind = dtype(name)
    raw, x = any_bits(kind, 33, k), activation(k, 12)
    product = Product(raw, kind, k)
    got = product(x)
    alone = np.concatenate([product(x[t : t + 1]) for t in range(12)])
    assert np.array_equal(got, alone)
    for tokens in (2, 4, 7, 9):
        assert np.array_equal(product(x[:tokens]), alone[:tokens]), f"{tokens} tokens"


@pytest.mark.parametrize("name", FORMATS)
def test_pack_pads_with_the_last_row(name):
    kind = dtype(name)
    k = 2 * kind.block
    meta = Meta.of((5, k), kind)
    packed = pack(any_bits(kind, 5, k), meta)
    assert packed.nbytes == packed_bytes(meta)
    assert name in ROW_FORMATS or packed.nbytes == 16 * kind.row_nbytes(k)
    assert packed.ctypes.data % 64 == 0
    rows = any_bits(kind, 5, k)
    full = np.concatenate([rows, np.repeat(rows[-1:], 11, axis=0)])
    assert np.array_equal(packed, pack(full, Meta.of((16, k), kind)))


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_infinite_and_nan_scales_of_rows_stop_the_load(name):
    """Each scale of a row, on both host backends."""
    kind, k = dtype(name), 256
    for bad in (np.inf, -np.inf, np.nan):
        raw = any_bits(kind, 20, k)
        scales = ROW_FORMATS[name].split(raw)[1]
        scales[17, -1] = scales[18, 0] = bad
        for check in (
            quantization.check_scales,
            lambda raw, kind: pack(raw, Meta.of((20, k), kind)),
        ):
            with pytest.raises(
                ModelFileError, match=f"^row 17 has an infinite or NaN {name} scale"
            ):
                check(raw, kind)


def test_other_formats_are_refused():
    """The error is raised when the graph is built, and names scope, format and known formats."""
    says = "^model.layers.0.mlp.up_proj: weights in iq2_xxs are not supported, only in f32.*mxfp4,"
    with scope("model.layers.0.mlp.up_proj"):
        w = weight("model.layers.0.mlp.up_proj.weight", (8, 256), FOREIGN)
        with pytest.raises(ModelFileError, match=says):
            ops.linear(feed("x", (3, 256), "f32"), w)
        with pytest.raises(ModelFileError, match=says):
            ops.embedding(feed("ids", (3,), "i32"), w)


# ----------------------------------------------------------------------------------- other targets
