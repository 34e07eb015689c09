"""bitsandbytes directories of 4 bits (nf4), read without conversion to floats.

Oracles: bitsandbytes itself (recorded), and the published formula. Models are in
test_published_checkpoints.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import packed_checkpoints as writer
import pytest
from packed_checkpoints import nf4_config

from graphllm.checkpoints import published
from graphllm.errors import ConfigError, GraphllmError, ModelFileError
from graphllm.formats.quantization import dequantise
from graphllm.weights.safetensors import Safetensors

GOLDEN = Path(__file__).parents[1] / "golden" / "bitsandbytes_nf4.npz"
STATE = "a.weight.quant_state.bitsandbytes__nf4"


def read(folder: Path, tensors: writer.Tensors, data: bool = True, **keys: object):
    """Write the tensors as a file, and open it with a configuration."""
    writer.write(folder / "model.safetensors", tensors)
    source = "config.json: quantization_config"
    return published.scheme("bitsandbytes", source, nf4_config(**keys))(Safetensors(folder, data))


def normal(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def weight_of(file: published.PackedTensors, module: str = "a") -> np.ndarray:
    info = file.readable(f"{module}.weight")
    raw = file.raw(f"{module}.weight")
    assert info.dtype.name == "nf4" and raw.nbytes == info.nbytes and not raw.flags.writeable
    return dequantise(raw, info.dtype)


def check(have: np.ndarray, want: np.ndarray) -> None:
    """Values and scales are rounded to float16."""
    np.testing.assert_allclose(have, want, rtol=2 * 2.0**-11, atol=0)


def test_weights_are_those_of_bitsandbytes(tmp_path):
    recorded = np.load(GOLDEN)
    stored = {k: recorded[k] for k in recorded.files if "." in k}
    file = read(tmp_path, stored)
    assert {name: info.shape for name, info in file.tensors.items()} == {
        "plain.weight": (6, 64), "nested.weight": (20, 832)
    }  # fmt: skip
    for module in ("plain", "nested"):
        have = weight_of(file, module)
        check(have[:6], recorded[f"{module}_rows"])
        largest = np.abs(have).reshape(-1, 64).max(axis=1)
        blocks = largest > 0  # not that of zeros, which double quantisation makes a small number
        assert (~blocks).sum() == 1 and (have[1, :64] == 0).all()
        check(largest[blocks], np.abs(recorded[f"{module}_absmax"])[blocks])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("columns", [32, 96, 352])
def test_blocks_run_over_the_flattened_weight(tmp_path, monkeypatch, columns, nested):
    """Rows that are no multiple of 64 share blocks; several tiles, and a block that is not whole.
    Headers and states are read without data."""
    monkeypatch.setattr("graphllm.checkpoints.published.bitsandbytes._TILE", 4 * columns)
    tensors, want = writer.nf4("a", normal(53, columns), nested)
    assert read(tmp_path, tensors, data=False).readable("a.weight").shape == (53, columns)
    check(weight_of(read(tmp_path, tensors)), want)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"load_in_8bit": True}, "load_in_8bit = True is not supported: only False"),
        ({"load_in_4bit": False}, "load_in_4bit = False is not supported: only True"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type = 'fp4' is not supported"),
        ({"bnb_4bit_quant_type": None}, "bnb_4bit_quant_type = 'fp4' is not supported"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage = 'bfloat16'"),
        ({"spin": 1}, "unknown key 'spin'"),
    ],
)
def test_refused_configurations(keys, message):
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config: {message}"):
        published.scheme("bitsandbytes", "config.json: quantization_config", nf4_config(**keys))


def state(**keys: object):
    text = writer.nf4_state((24, 96), **keys)
    return STATE, lambda _: text


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a.weight", None, "'a.weight': missing"),
        ("a.weight", lambda t: t[:-1], r"'a.weight': has shape \[1151, 1\], not \[1152, 1\]"),
        ("a.weight.absmax", None, "'a.weight.absmax': missing"),
        ("a.weight.absmax", lambda t: t[1:], r"'a.weight.absmax': has shape \[35\], not \[36\]"),
        ("a.weight.absmax", lambda t: t.astype(np.uint8), "'a.weight.absmax': is u8, not f32"),
        ("a.weight.absmax", lambda t: -t, r"block 0 is -.*: a magnitude must be finite and not n"),
        ("a.weight.absmax", lambda t: t * np.nan, "'a.weight.absmax': block 0 is NaN"),
        ("a.weight.absmax", lambda t: t + np.float32(1e6), "beyond the range of f16"),
        ("a.weight.quant_map", lambda t: t[::-1], "'a.weight.quant_map': has other values than n"),
        (STATE, lambda t: t[:-1], f"'{STATE}': not valid JSON"),
        (STATE, lambda t: np.zeros(1 << 21, np.uint8), f"'{STATE}': cut off, or too long"),
        (*state(shape=[24, 2304]), r"'a.weight': has shape \[1152, 1\], not \[27648, 1\]"),
        (*state(shape=[48, 48]), "is a weight of 48 x 48, whose rows are not whole blocks of 32"),
        (*state(shape=[24, -96]), rf"'{STATE}': shape = \[24, -96\] is not supported"),
        (*state(blocksize=48), "blocksize = 48 is not supported: only 32, 64"),
        (*state(quant_type="fp4"), "quant_type = 'fp4' is not supported: only 'nf4'"),
        (*state(spin=1), f"'{STATE}': unknown key 'spin'"),
    ],
)  # fmt: skip
def test_wrong_tensors(tmp_path, name, change, message):
    tensors, _ = writer.nf4("a", normal(24, 96), nested=False)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    with pytest.raises(GraphllmError, match=message):
        read(tmp_path, tensors).raw("a.weight")


def test_wrong_nested_values(tmp_path):
    tensors, _ = writer.nf4("a", normal(24, 96))
    tensors["a.weight.nested_absmax"][0] = np.inf
    with pytest.raises(ModelFileError, match=r"'a.weight.absmax': block 0 is .*nested values"):
        read(tmp_path, tensors).raw("a.weight")
    del tensors["a.weight.nested_quant_map"]
    with pytest.raises(ModelFileError, match=r"'a.weight.nested_quant_map': missing"):
        read(tmp_path, tensors)


def test_modules_that_are_skipped_must_not_be_packed(tmp_path):
    tensors, _ = writer.nf4("b.a", normal(24, 96))
    for skipped in ("b", "a", "b.a"):
        with pytest.raises(ModelFileError, match=r"'b.a.weight': quantised, but llm_int8_skip_mod"):
            read(tmp_path, tensors, llm_int8_skip_modules=[skipped])
    read(tmp_path, tensors, llm_int8_skip_modules=["lm_head", "b.a.c"])
