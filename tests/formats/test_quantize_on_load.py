"""Weights quantised on load are bit-equal to `formats.quantization.quantise` for any tile size."""

from __future__ import annotations

import gc
import re

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from graphllm import ops
from graphllm.backends import Options
from graphllm.checkpoints import quantize_on_load
from graphllm.checkpoints.quantize_on_load import KINDS, QuantizedWeights
from graphllm.errors import ModelFileError, RequestError
from graphllm.formats import BLOCK_FORMATS, ROW_FORMATS
from graphllm.formats.quantization import Blocks, check_scales, dequantise, quantise
from graphllm.graph.dtype import DTYPES, F32, dtype
from graphllm.graph.tensor import feed, weight
from graphllm.quantize.encode import Encoder
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays
from graphllm.weights.safetensors import Safetensors

STORED = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


class LoggedArrays(Arrays):
    """Weights that log what is read and released."""

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


MANY = ("f32", "f16", "bf16", "q8_0", "q6_k")  # from every float type; the others from bf16 only


@pytest.mark.parametrize("tile", [1, 600, 1 << 18])
@pytest.mark.parametrize(
    ("kind", "stored"), [(k, s) for k in KINDS for s in STORED if k in MANY or s == "bf16"]
)
def test_bits_equal_quantise(monkeypatch, kind: str, stored: str, tile: int) -> None:
    monkeypatch.setattr(quantize_on_load, "_TILE", tile)
    x = values(7, 512).astype(STORED[stored])
    source = Arrays({"x": x})
    found = QuantizedWeights(source, kind)
    meta, raw = found.meta("x"), found.raw("x")
    assert meta is not None and (meta.shape, meta.dtype.name) == ((7, 512), kind)
    wanted = quantise(dequantise(source.raw("x"), DTYPES[stored]), DTYPES[kind])
    assert raw.dtype == np.uint8 and (raw == wanted).all()
    assert kind == stored or not raw.flags.writeable
    assert found.notes() == []


def extreme(name: str) -> np.ndarray:
    """float32 [48, 1056], finite: rows of 33 blocks of 32, or [33, 1536]."""
    rng, shape = np.random.default_rng(1), (48, 1056)
    normal = rng.standard_normal(shape)
    x: np.ndarray = {
        "sizes": lambda: normal * 10.0 ** rng.integers(-30, 6, (48, 1)),
        "near zero": lambda: normal * 10.0 ** rng.integers(-46, -33, shape),
        "scales near zero": lambda: normal * 10.0 ** rng.uniform(-9, -4, (48, 1)),
        "ties": lambda: rng.choice([-1, -0.5, 0, 0.25, 0.5, 1], shape),
        "zeros": lambda: rng.choice([0.0, -0.0], shape),
        "one sign": lambda: np.abs(normal) * rng.choice([-1, 1], (48, 1)),
        "largest": lambda: rng.choice([-8e6, 8e6], shape),
        "wide rows": lambda: normal * 10.0 ** rng.uniform(-8, 4, shape),
    }[name]()
    return x.astype(np.float32)


def _has_bad_scales(raw: np.ndarray, kind: str) -> bool:
    try:
        check_scales(raw, DTYPES[kind])
    except ModelFileError:
        return True
    return False


@pytest.mark.parametrize(
    "name",
    ["sizes", "near zero", "scales near zero", "ties", "zeros", "one sign", "largest",
     "wide rows"],
)  # fmt: skip
def test_extreme_values(name: str) -> None:
    for kind in BLOCK_FORMATS:
        x = extreme(name).reshape(-1, 1056 if DTYPES[kind].block == 32 else 1536)
        found = QuantizedWeights(Arrays({"x": x, "one": x[:1]}), kind)
        wanted = quantise(x, DTYPES[kind])
        if _has_bad_scales(wanted, kind):
            with pytest.raises(ModelFileError, match=f"beyond the range of {kind}"):
                found.raw("x")
            continue
        assert (found.raw("x") == wanted).all(), kind
        assert (found.raw("one") == wanted[:1]).all(), kind


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_threads_and_alignment_do_not_change_the_bits(kind: str) -> None:
    """Several chunks of a matrix, and unaligned bytes."""
    x = values(80, 2048).astype(ml_dtypes.bfloat16)
    room = np.zeros(x.nbytes + 1, np.uint8)
    room[1:] = x.view(np.uint8).reshape(-1)

    class Source(Arrays):
        def raw(self, name: str) -> np.ndarray:
            return room[1:].reshape(80, -1)

    wanted = quantise(x.astype(np.float32), DTYPES[kind])
    for threads in (1, 2, 3):
        options = Options(threads=threads)
        assert (QuantizedWeights(Source({"x": x}), kind, options=options).raw("x") == wanted).all()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_bits_equal_the_gguf_package(kind: str) -> None:
    x = values(300, 1024)
    wanted = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    assert (QuantizedWeights(Arrays({"x": x}), kind).raw("x") == wanted).all()


def test_weights_of_the_same_format_are_not_copied() -> None:
    x = values(4, 64)
    assert np.shares_memory(QuantizedWeights(Arrays({"x": x}), "f32").raw("x"), x)


def test_three_axes_are_quantised_along_the_last() -> None:
    x = values(3, 5, 64)
    found = QuantizedWeights(Arrays({"experts": x}), "q8_0")
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

    found = QuantizedWeights(Source({"x": np.zeros(shape, np.float32)}), kind)
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
    found = QuantizedWeights(source, "q4_0", keep=lambda name: name.startswith("router"))
    assert list(found.names()) == list(arrays)
    for name in arrays:
        assert found.meta(name) == source.meta(name)
        assert np.shares_memory(found.raw(name), source.raw(name))
    assert found.meta("missing") is None
    assert found.notes() == ["1 matrices are as stored, not q4_0: they have a block format already"]


@pytest.mark.parametrize(
    ("kind", "fallback"),
    [("q2_k", "iq4_nl"), ("q3_k", "iq4_nl"), ("iq4_xs", "iq4_nl"), ("q4_k", "q5_0"),
     ("q5_k", "q5_1"), ("q6_k", "q8_0")],
)  # fmt: skip
def test_rows_that_are_not_whole_blocks(kind: str, fallback: str) -> None:
    x, short = values(2, 96), values(2, 60)
    source = Arrays({"whole": values(2, 256), "x": x, "y": x, "short": short})
    found = QuantizedWeights(source, kind)
    kinds = {name: found.meta(name).dtype.name for name in found.names()}  # type: ignore[union-attr]
    assert kinds == {"whole": kind, "x": fallback, "y": fallback, "short": "f32"}
    assert (found.raw("x") == quantise(x, DTYPES[fallback])).all()
    assert (found.raw("short").view(np.float32) == short).all()
    assert found.notes() == [
        f"2 matrices are {fallback} in place of {kind}: their rows are not whole blocks of 256",
        f"1 matrices are as stored, not {kind}: their rows are not whole blocks of 256",
    ]
    assert QuantizedWeights(Arrays({"short": short}), "q8_0").notes() == [
        "1 matrices are as stored, not q8_0: their rows are not whole blocks of 32"
    ]


def test_every_format_is_accepted() -> None:
    assert set(KINDS) == {"f32", "f16", "bf16", *BLOCK_FORMATS, *ROW_FORMATS}
    with pytest.raises(RequestError, match=re.escape("'q4_k_m' of weights; known: f32, f16, bf16")):
        QuantizedWeights(Arrays({}), "q4_k_m")


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
def test_values_out_of_range(monkeypatch, kind, value, words, tile) -> None:
    monkeypatch.setattr(quantize_on_load, "_TILE", tile)
    x = values(40, 256)
    x[37, 5] = value
    with pytest.raises(ModelFileError, match=f"tensor 'x': row 37 has a value that is {words}"):
        QuantizedWeights(Arrays({"x": x}), kind).raw("x")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_1", "q2_k", "q4_k", "q6_k", "iq4_xs"])
@pytest.mark.parametrize("importance", [False, True])
def test_scales_out_of_range(kind, importance) -> None:
    """Finite values whose scale is infinite in float16, when loading and when quantizing a file."""
    x = values(40, 256)
    x[37, 5] = 1e9
    words = f"tensor 'x': row 37 has a value that is beyond the range of {kind}"
    with pytest.raises(ModelFileError, match=words):
        QuantizedWeights(Arrays({"x": x}), kind).raw("x")
    own = np.ones(256, np.float32) if importance else None
    encoded = Encoder(1).encode("x", Blocks(x.view(np.uint8), F32, 256), dtype(kind), own)
    with pytest.raises(ModelFileError, match=words):
        list(encoded)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(backend: str, value: float) -> None:
    x = values(9, 1280)
    for kind in KINDS:
        for column in (0, 777, 1279):
            bad = x.copy()
            bad[5, column] = value
            source = Arrays({"x": bad.astype(ml_dtypes.bfloat16 if kind != "bf16" else np.float16)})
            with pytest.raises(ModelFileError, match="tensor 'x': row 5 has a value that is infin"):
                QuantizedWeights(source, kind, backends=(backend,)).raw("x")


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_scales_beyond_float16(kind: str) -> None:
    """They stop the load; mxfp4 has exponents up to 2^126."""
    x = values(20, 256)
    x[17, 200] = 3e38
    node = ops.linear(feed("x", (1, 256), "f32"), weight("w", (20, 256), kind))
    executor = Executor(QuantizedWeights(Arrays({"w": x}), kind), backends=("cpu", "reference"))
    plan = executor.compile({"y": node})
    if kind == "mxfp4":
        executor.bind(plan)
        return
    with pytest.raises(ModelFileError, match=f"'w': row 17 .* beyond the range of {kind}"):
        executor.bind(plan)


def test_converting_backend() -> None:
    """The first capable backend in host memory converts; a later one leaves a note."""
    x = values(4, 64)
    for kind, op in (("q8_0", "quantise"), ("f16", "cast")):
        first = QuantizedWeights(Arrays({"x": x}), kind, backends=("cuda", "cpu", "reference"))
        second = QuantizedWeights(
            Arrays({"x": x}), kind, backends=("cuda", "cpu", "reference"),
            options=Options(no_kernels=(f"cpu:{op}",)),
        )  # fmt: skip
        assert (first.raw("x") == second.raw("x")).all()
        assert first.notes() == []
        said = f"matrices are converted on reference: switched off (cpu:{op})"
        assert second.notes() == [said]
    alone = QuantizedWeights(Arrays({"x": x}), "q8_0", backends=("reference",))
    assert (alone.raw("x") == quantise(x, DTYPES["q8_0"])).all() and alone.notes() == []


def test_the_source_is_released_and_the_result_is_shared() -> None:
    source = LoggedArrays({"x": values(4, 64), "v": values(4)})
    found = QuantizedWeights(source, "q8_0")
    held = found.raw("x").reshape(-1)  # a view keeps the result alive
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
def test_a_linear_runs_on_quantised_weights(backend: str) -> None:
    w, x = values(48, 64), values(3, 64, seed=1)
    blocks = Blocks(quantise(w, DTYPES["q8_0"]), DTYPES["q8_0"], 64)
    results = []
    for source in (QuantizedWeights(Arrays({"w": w}), "q8_0"), Arrays({"w": blocks})):
        node = ops.linear(feed("x", (3, 64), "f32"), weight("w", (48, 64), "q8_0"))
        executor = Executor(source, backends=(backend, "reference"))
        results.append(executor.run(executor.compile({"y": node}), {"x": x})["y"])
    np.testing.assert_array_equal(*results)
