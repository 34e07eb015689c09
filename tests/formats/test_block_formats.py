"""Every block format on the CPU, on random and on extreme blocks, against the `gguf` package.

The oracle multiplies the dequantised blocks by activations in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
from block_cases import EXTREMES, KINDS, MOST, ROWS, dequantised, make_blocks
from linear_cases import BLOCKS, SCALES

import graphllm
from graphllm import ops
from graphllm.backends import Options
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.errors import ModelFileError
from graphllm.formats import BLOCK_FORMATS, gguf_formats, quantization
from graphllm.formats import activations as activation_formats
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype
from graphllm.graph.tensor import Tensor, Var, feed, weight
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

T = Var("T", 0, MOST)


def run(made: Tensor, weights: dict[str, Blocks], feeds: dict[str, np.ndarray], linear: str):
    """Run ``made`` on the CPU backend for `MOST` tokens and for one; return the former."""
    executor = GuardedExecutor(Arrays(weights), ("cpu",), Options(linear))
    plan = executor.compile({"y": made})
    assert {step.backend.name for step in plan.steps} == {"cpu"}
    results = []
    for tokens in (MOST, 1):
        executor.bind(plan)
        some = {name: values[:tokens] for name, values in feeds.items()}
        results.append(executor.run(plan, some, {"T": tokens})["y"].copy())
    assert np.array_equal(results[1], results[0][:1], equal_nan=True)
    return results[0]


def activations(k: int, size: float) -> np.ndarray:
    """[MOST, k]: random rows, one with the largest sums, one of zeros, one with an outlier."""
    x = np.random.default_rng(k).standard_normal((MOST, k))
    x[1], x[2], x[3, k // 2] = np.where(x[1] < 0, -1, 1), 0, 5
    return (x * size).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_linear(name, kind):
    """Float kernels, integer kernels, and integer kernels on given int8 activations."""
    form, tol = dtype(name), ops.get("linear").tol
    act = BLOCK_FORMATS[name].activation
    for blocks in (1, 3):
        k, raw = blocks * form.block, make_blocks(form, kind, blocks)
        size = 1.0 if kind == "random" else EXTREMES[kind][2]
        x, w = activations(k, size), dequantised(form, raw)
        xs, ws = feed("x", (T, k), "f32"), weight("w", (ROWS, k), form)
        node = ops.linear(xs, ws)
        runs = [(node, "float", x, tol["f32"]), (node, "integer", x, tol[name if act else "f32"])]
        if act:  # not of formats that only floats are multiplied with
            exact = activation_formats.quantise_act(x, act)
            exact = activation_formats.dequantise_act(exact, act, k)
            given = ops.linear(ops.quantise_act(xs, dtype=act.name), ws)
            runs.append((given, "integer", exact, tol[act.name]))
        for node, linear, values, allowed in runs:
            got = run(node, {"w": Blocks(raw, form, k)}, {"x": x}, linear)
            a = values.astype(np.float64)
            want = a @ w.T
            # The tolerance assumes results of size one; here their size is this.
            ones = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(w, axis=1) / np.sqrt(k)
            limit = allowed * np.maximum(ones, np.abs(want)) + np.finfo(np.float32).tiny
            assert np.isfinite(got).all()
            np.testing.assert_array_less(np.abs(got - want), limit, f"{blocks} blocks, {linear}")
            assert kind == "zero" or (np.abs(want) > 10 * limit).any()  # or nothing is compared


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BLOCKS)
def test_embedding(name, kind):
    """Bit-equal to the oracle."""
    form = dtype(name)
    raw = make_blocks(form, kind, 3)
    k = 3 * form.block
    ids = np.array([ROWS - 1, 0, 1, 7, 7], np.int32)
    node = ops.embedding(feed("ids", (T,), "i32"), weight("w", (ROWS, k), form))
    got = run(node, {"w": Blocks(raw, form, k)}, {"ids": ids}, "auto")
    assert np.array_equal(got, dequantised(form, raw)[ids].astype(np.float32))


@pytest.mark.parametrize("name", BLOCKS)
def test_infinite_and_nan_scales_stop_the_load(name):
    """An error names the tensor and the row, for every scale of a block and every such value."""
    form, (first, end) = dtype(name), SCALES[name]
    k, size = 3 * form.block, min(2, end - first)
    x = feed("x", (T, k), "f32")
    node = ops.linear(x, weight("mlp.up.weight", (ROWS, k), form))
    for bits in (0x7C00, 0xFC00, 0x7C01, 0xFFFF) if size == 2 else (0xFF,):
        for at in range(first, end, size):
            raw = make_blocks(form, "random", 3)
            place = 2 * form.nbytes + at
            raw[18, place : place + size] = np.array([bits], "<u2").view(np.uint8)[:size]
            for backend, linear in (("cpu", "float"), ("cpu", "integer"), ("reference", "auto")):
                weights = Arrays({"mlp.up.weight": Blocks(raw, form, k)})
                executor = Executor(weights, (backend,), Options(linear))
                says = f"^tensor 'mlp.up.weight': row 18 has an infinite or NaN {name} scale$"
                with pytest.raises(ModelFileError, match=says):
                    executor.bind(executor.compile({"y": node}))


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_are_checked_in_chunks(name, monkeypatch):
    """The first bad row is named, in whichever chunk it is; valid rows pass."""
    form = dtype(name)
    raw = make_blocks(form, "largest", 3)[2:]
    monkeypatch.setattr(quantization, "_CHECKED", 4 * raw.shape[1])
    quantization.check_scales(raw, form)
    last = BLOCK_FORMATS[name].scale_spans()[-1]
    for row in (17, 9, 8):
        at = form.nbytes + last[0]
        raw[row, at : at + last[1]] = 255
        with pytest.raises(ModelFileError, match=f"^row {row} has an infinite or NaN {name} scale"):
            quantization.check_scales(raw, form)
    quantization.check_scales(raw[:0], form)
    quantization.check_scales(np.full((2, 8), 255, np.uint8), dtype("f16"))


@pytest.fixture
def wide(monkeypatch):
    """Tiny models with rows of 256, which are whole blocks of every format."""
    sizes = {"DIM": 256, "HEADS": 8, "KV": 2, "WIDTH": 32, "HIDDEN": 256, "LAYERS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(tiny, name, value)


@pytest.mark.parametrize("name", gguf_formats())
def test_a_model_file(name, wide, tmp_path):
    """A model whose matrices all have the format: equal to the reference, every op on the CPU."""
    path = tiny.write_llama(tmp_path / "x.gguf", tiny.llama_weights(), kind=name)
    ids = [1, 5, 77, 300, 2]
    want = graphllm.load(path, device="reference", kv_type="f32").logits(ids)
    got = graphllm.load(path, linear="float", kv_type="f32", strict=True).logits(ids)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    rough = graphllm.load(path, strict=True).logits(ids)
    assert np.corrcoef(rough.ravel(), want.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("name", ["q4_k", "mxfp4"])
def test_a_nan_scale_in_a_file_stops_the_load(name, wide, tmp_path):
    path = tiny.write_llama(tmp_path / "x.gguf", tiny.llama_weights(), kind=name)
    with GgufCheckpoint(path) as file:
        info = file.info("blk.1.ffn_up.weight")
    with open(path, "r+b") as raw:
        raw.seek(info.offset + 7 * info.dtype.row_nbytes(256))
        raw.write(b"\xff\xff")
    says = (
        f"^tensor 'model.layers.1.mlp.up_proj.weight': row 7 has an infinite or NaN {name} scale$"
    )
    for device in ("cpu", "reference"):
        with pytest.raises(ModelFileError, match=says):
            graphllm.load(path, device=device)
