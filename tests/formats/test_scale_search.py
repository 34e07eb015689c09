"""The search for scales: the kernel against the NumPy formula, and errors against llama.cpp's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from graphllm.backends.cpu.runtime import scale_search as kernels
from graphllm.formats import BLOCK_FORMATS, scale_search
from graphllm.graph.dtype import DTYPES
from graphllm.quantize.encode import encode_blocks

SEARCHED = [name for name, form in BLOCK_FORMATS.items() if form.weighted_search]


def delicate_rows(columns: int) -> np.ndarray:
    """Rows of zeros, of one sign, of ties, and of very small and very large values."""
    x = np.random.default_rng(0).standard_normal((11, columns)).astype(np.float32)
    x[1], x[2], x[3], x[4], x[5] = 0, x[2] * 1e-30, x[3] * 1e20, np.abs(x[4]), -np.abs(x[5])
    x[6, ::7], x[7], x[8] = 0, np.round(x[7] * 4), 0.5
    return x


@pytest.mark.parametrize("name", SEARCHED)
def test_the_kernel_has_the_bits_of_the_formula(name: str) -> None:
    form, x = BLOCK_FORMATS[name], delicate_rows(768)
    importance = np.random.default_rng(1).random(768).astype(np.float32)
    importance[3:40] = 0
    for weights, search in ((None, form.search), (importance, form.weighted_search)):
        if search is None:
            continue
        runs = x.reshape(-1, form.dtype.block // search.run, search.run)
        spread = None if weights is None else np.broadcast_to(weights, x.shape).reshape(runs.shape)
        want = scale_search.search_scales(runs, spread, search)
        got = kernels.search_scales(x, weights, search, form.dtype.block)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        if search.minimum:
            assert (got[1] <= 0).all()


# Root mean square errors that ggml 0.25.3 (`ggml_quantize_chunk` of llama-cpp-python 0.3.36) leaves
# on the numbers of the test, without and with importance; the second is weighted by it.
@pytest.mark.parametrize(
    ("name", "plain", "weighted"),
    [
        ("q4_0", 0.08600, 0.07544), ("q4_1", 0.07808, 0.06109), ("q5_0", 0.04265, 0.03772),
        ("q5_1", 0.03784, 0.02959), ("q8_0", 0.00537, 0.00537), ("q2_k", 0.29640, 0.21939),
        ("q3_k", 0.15036, 0.12773), ("q4_k", 0.07119, 0.06215), ("q5_k", 0.03607, 0.03185),
        ("q6_k", 0.01767, 0.01554), ("iq4_nl", 0.07633, 0.06856), ("iq4_xs", 0.07696, 0.06935),
        ("mxfp4", 0.11464, 0.11502),
    ],
)  # fmt: skip
def test_errors_are_those_of_llama_cpp(name: str, plain: float, weighted: float) -> None:
    rng = np.random.default_rng(19)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    importance = (rng.random(1024) ** 4 + 0.01).astype(np.float32)
    for weights, limit in ((None, plain), (importance, weighted)):
        raw = encode_blocks(x, DTYPES[name], weights)
        back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
        factor = np.ones(1024) if weights is None else weights
        error = float(np.sqrt((factor * (back - x) ** 2).mean() / factor.mean()))
        assert 0.9 * limit < error < 1.01 * limit


@pytest.mark.parametrize("name", SEARCHED)
def test_any_finite_values_make_finite_blocks(name: str) -> None:
    x = delicate_rows(512)
    x[3] /= 1e20
    for importance in (None, np.zeros(512, np.float32)):
        raw = encode_blocks(x, DTYPES[name], importance)
        back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
        assert np.isfinite(back).all() and not back[1].any()
        assert np.corrcoef(back[0], x[0])[0, 1] > 0.9
    assert encode_blocks(x[:0], DTYPES[name], None).shape == (0, DTYPES[name].row_nbytes(512))
