"""Weights converted while they are loaded: the bits of `quant.quantise`, whatever the tiles."""

from __future__ import annotations

import gc
import re

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from graphllm import ops
from graphllm.dtype import DTYPES
from graphllm.errors import ModelFileError, RequestError
from graphllm.executor import Executor
from graphllm.quant import FORMATS, Blocks, dequantise, quantise
from graphllm.tensor import feed, weight
from graphllm.weights import Arrays, requantise
from graphllm.weights.requantise import KINDS, Quantised
from graphllm.weights.safetensors import Safetensors

STORED = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


class Watched(Arrays):
    """Notes which weights were asked for and released."""

    def __init__(self, arrays) -> None:
        super().__init__(arrays)
        self.log: list[tuple[str, str]] = []

    def raw(self, name: str) -> np.ndarray:
        self.log.append(("raw", name))
        return super().raw(name)

    def release(self, name: str) -> None:
        self.log.append(("release", name))


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(np.float32)


@pytest.mark.parametrize("tile", [1, 600, 1 << 18])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_quantise(monkeypatch, kind: str, stored: str, tile: int) -> None:
    monkeypatch.setattr(requantise, "_TILE", tile)
    x = values(7, 512).astype(STORED[stored])
    source = Arrays({"x": x})
    found = Quantised(source, kind)
    meta, raw = found.meta("x"), found.raw("x")
    assert meta is not None and (meta.shape, meta.dtype.name) == ((7, 512), kind)
    wanted = quantise(dequantise(source.raw("x"), DTYPES[stored]), DTYPES[kind])
    assert raw.dtype == np.uint8 and (raw == wanted).all()
    assert kind == stored or not raw.flags.writeable
    assert found.notes() == []


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_the_bits_are_those_of_the_gguf_package(kind: str) -> None:
    x = values(300, 1024)
    wanted = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    assert (Quantised(Arrays({"x": x}), kind).raw("x") == wanted).all()


def test_what_the_same_format_has_is_not_copied() -> None:
    x = values(4, 64)
    assert np.shares_memory(Quantised(Arrays({"x": x}), "f32").raw("x"), x)


def test_three_axes_are_rows_of_the_last() -> None:
    x = values(3, 5, 64)
    found = Quantised(Arrays({"experts": x}), "q8_0")
    meta = found.meta("experts")
    assert meta is not None and (meta.shape, meta.dtype.name) == ((3, 5, 64), "q8_0")
    assert (found.raw("experts") == quantise(x.reshape(15, 64), DTYPES["q8_0"])).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_no_elements(tmp_path, kind: str, shape: tuple[int, int]) -> None:
    safetensors.numpy.save_file({"x": np.zeros(shape, np.float32)}, tmp_path / "x.safetensors")
    file = Safetensors(tmp_path / "x.safetensors")

    class Source(Arrays):
        def raw(self, name: str) -> np.ndarray:
            return file.raw(name)

    found = Quantised(Source({"x": np.zeros(shape, np.float32)}), kind)
    assert found.raw("x").shape == (shape[0], DTYPES[kind].row_nbytes(shape[1]))


def test_other_weights_stay_as_they_are() -> None:
    blocks = Blocks(quantise(values(3, 64), DTYPES["q5_1"]), DTYPES["q5_1"], 64)
    arrays = {
        "norm.weight": values(64),
        "experts.bias": values(4, 64),
        "experts.down_proj_bias": values(4, 64),
        "ids": np.arange(64, dtype=np.int32).reshape(2, 32),
        "blocks.weight": blocks,
        "router.weight": values(4, 64),
        "four": values(1, 1, 2, 64),
    }
    source = Arrays(arrays)
    found = Quantised(source, "q4_0", keep=lambda name: name.startswith("router"))
    assert list(found.names()) == list(arrays)
    for name in arrays:
        assert found.meta(name) == source.meta(name)
        assert np.shares_memory(found.raw(name), source.raw(name))
    assert found.meta("missing") is None
    assert found.notes() == ["1 matrices are as stored, not q4_0: they are in blocks already"]


@pytest.mark.parametrize(
    ("kind", "stand_in"),
    [("q2_k", "iq4_nl"), ("q3_k", "iq4_nl"), ("iq4_xs", "iq4_nl"), ("q4_k", "q5_0"),
     ("q5_k", "q5_1"), ("q6_k", "q8_0")],
)  # fmt: skip
def test_rows_that_are_not_whole_blocks(kind: str, stand_in: str) -> None:
    x, short = values(2, 96), values(2, 60)
    source = Arrays({"whole": values(2, 256), "x": x, "y": x, "short": short})
    found = Quantised(source, kind)
    kinds = {name: found.meta(name).dtype.name for name in found.names()}  # type: ignore[union-attr]
    assert kinds == {"whole": kind, "x": stand_in, "y": stand_in, "short": "f32"}
    assert (found.raw("x") == quantise(x, DTYPES[stand_in])).all()
    assert (found.raw("short").view(np.float32) == short).all()
    assert found.notes() == [
        f"2 matrices are {stand_in} in place of {kind}: their rows are not whole blocks of 256",
        f"1 matrices are as stored, not {kind}: their rows are not whole blocks of 256",
    ]
    assert Quantised(Arrays({"short": short}), "q8_0").notes() == [
        "1 matrices are as stored, not q8_0: their rows are not whole blocks of 32"
    ]


def test_every_format_can_be_asked_for() -> None:
    assert set(KINDS) == {"f32", "f16", "bf16", *FORMATS}
    with pytest.raises(RequestError, match=re.escape("'q4_k_m' of weights; known: f32, f16, bf16")):
        Quantised(Arrays({}), "q4_k_m")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("q8_0", np.nan, "infinite or NaN"),
        ("q4_k", np.inf, "infinite or NaN"),
        ("bf16", -np.inf, "infinite or NaN"),
        ("f16", 70_000.0, "beyond the range of f16"),
        ("bf16", np.finfo(np.float32).max, "beyond the range of bf16"),
    ],
)
@pytest.mark.parametrize("tile", [1, 1000, 1 << 18])
def test_values_that_the_format_cannot_hold(monkeypatch, kind, value, words, tile) -> None:
    monkeypatch.setattr(requantise, "_TILE", tile)
    x = values(40, 256)
    x[37, 5] = value
    with pytest.raises(ModelFileError, match=f"tensor 'x': row 37 has a value that is {words}"):
        Quantised(Arrays({"x": x}), kind).raw("x")


def test_the_source_is_released_and_what_was_made_is_shared() -> None:
    source = Watched({"x": values(4, 64), "v": values(4)})
    found = Quantised(source, "q8_0")
    held = found.raw("x").reshape(-1)  # a view is enough
    assert source.log == [("raw", "x"), ("release", "x")]
    assert np.shares_memory(found.raw("x"), held) and source.log.count(("raw", "x")) == 1
    del held
    gc.collect()
    found.raw("x")
    assert source.log.count(("raw", "x")) == 2
    found.raw("v")
    assert ("release", "v") not in source.log
    found.release("v")
    assert source.log[-1] == ("release", "v")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_linear_runs_on_them(backend: str) -> None:
    w, x = values(48, 64), values(3, 64, seed=1)
    blocks = Blocks(quantise(w, DTYPES["q8_0"]), DTYPES["q8_0"], 64)
    results = []
    for source in (Quantised(Arrays({"w": w}), "q8_0"), Arrays({"w": blocks})):
        node = ops.linear(feed("x", (3, 64), "f32"), weight("w", (48, 64), "q8_0"))
        executor = Executor(source, backends=(backend, "reference"))
        results.append(executor.run(executor.compile({"y": node}), {"x": x})["y"])
    np.testing.assert_array_equal(*results)
