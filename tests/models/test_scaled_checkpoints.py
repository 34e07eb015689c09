"""W8A8 and FP8 directories: compressed-tensors, and FP8 with blocks as DeepSeek and Qwen store it.

Oracles: the definition of the weights, and transformers running the same directory.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from cuda_cases import need_gpu

import graphllm
from graphllm.checkpoints import published
from graphllm.checkpoints.checkpoint import open_checkpoint
from graphllm.errors import ConfigError, ModelFileError
from graphllm.formats.quantization import dequantise
from graphllm.weights.safetensors import Safetensors

torch = pytest.importorskip("torch")
writer = pytest.importorskip("scaled_checkpoints")
config, fp8_config, save_file = writer.config, writer.fp8_config, writer.save_file
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 120, 12)]
CASES = [
    ("int", "channel", "w8a8"), ("int", "tensor", "w8a8"), ("float", "channel", "fp8"),
    ("float", "tensor", "fp8"), ("float", "block", "fp8_128"), ("fp8", "block", "fp8_128"),
]  # fmt: skip


def stated(kind: str, strategy: str, **keys: Any) -> dict[str, Any]:
    return fp8_config(**keys) if kind == "fp8" else config(kind == "float", strategy, **keys)


def tensors(kind: str, strategy: str, values: np.ndarray, module: str = "a") -> dict[str, Any]:
    scale = "weight_scale_inv" if kind == "fp8" else "weight_scale"
    return writer.tensors(module, values, kind != "int", strategy, scale)


def read(folder: Path, keys: dict[str, Any], stored: dict[str, Any]) -> published.PackedTensors:
    """Write the tensors as a file, and open it with the configuration."""
    save_file(stored, folder / "model.safetensors")
    wrap = published.scheme(keys["quant_method"], "config.json: quantization_config", keys)
    return wrap(Safetensors(folder))


def values_of(rows: int = 300, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize(("kind", "strategy", "form"), CASES)
def test_weights(kind, strategy, form, tmp_path, monkeypatch):
    """Several tiles, of which the last is smaller; 300 rows leave a smaller last block."""
    monkeypatch.setattr("graphllm.checkpoints.published.scaled_linear._STEP", 64 * 256)
    values = values_of()
    file = read(tmp_path, stated(kind, strategy), tensors(kind, strategy, values))
    info = file.readable("a.weight")
    assert (info.shape, info.dtype.name, list(file.tensors)) == (values.shape, form, ["a.weight"])
    raw = file.raw("a.weight")
    assert raw.nbytes == info.nbytes and not raw.flags.writeable and not file.notes()
    q, scales = writer.scaled(values, kind != "int", strategy)
    tall, wide = {"tensor": (300, 256), "channel": (1, 256), "block": (128, 128)}[strategy]
    want = writer.expanded(scales, tall, wide)[:300] * q.astype(np.float32)
    assert np.array_equal(dequantise(raw, info.dtype), want)


def test_scales_of_half_precision_and_other_shapes(tmp_path):
    values, keys = values_of(), config(False, "channel")
    stored = tensors("int", "channel", values)
    stored["a.weight_scale"] = stored["a.weight_scale"].bfloat16().reshape(-1)
    raw = read(tmp_path, keys, stored).raw("a.weight")
    scales = stored["a.weight_scale"].float().numpy().reshape(-1, 1)
    assert np.array_equal(raw[:, -4:].view("<f4"), scales)


# ------------------------------------------------------------------------------------------ models

SIZES = {
    "": {"hidden_size": 384, "intermediate_size": 256, "head_dim": 64},
    "deepseek_v3": {
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128,
        "kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 64, "qk_nope_head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


def random_pair(folder: Path, name: str, kind: str, strategy: str) -> tuple[Path, Path]:
    """Write a random model twice: quantised, and in float32."""
    plain = folder / "plain"
    keys = {**hf_models.config_of(hf_models.SPECS[name], 0), **SIZES.get(name, SIZES[""])}
    hf_models.oracle(keys, name).save_pretrained(plain)
    keys = stated(kind, strategy)
    writer.write(plain, folder / kind, keys, lambda m, v: tensors(kind, strategy, v, m))
    return folder / kind, plain


def nmse(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(have - want).sum() / np.square(want).sum())


def typical_nmse(have: np.ndarray, want: np.ndarray) -> float:
    """The median over tokens [..., vocab]: a rounding that differs changes all that follow it."""
    return float(np.median(np.square(have - want).sum(-1) / np.square(want).sum(-1)))


def logits(folder: Path, device: str = "cpu", linear: str = "auto", prompts=(IDS,)) -> np.ndarray:
    """float32 [N, T, vocab] of prompts of one length."""
    llm = graphllm.load(folder, device=device, kv_type="f32", context=32, linear=linear)
    return np.stack([llm.logits([int(i) for i in each]) for each in prompts])


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "kind", "strategy"),
    [("llama", "int", "channel"), ("qwen3", "float", "channel"), ("llama", "float", "block")],
)
def test_logits_are_those_of_transformers(name, kind, strategy, tmp_path):
    """Activations are quantised: a rounding that differs changes all that follow it, so int8 has
    the NMSE of its rounding."""
    from transformers import AutoModelForCausalLM

    folder, _ = random_pair(tmp_path, name, kind, strategy)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = oracle(torch.tensor([IDS])).logits.detach().numpy()
    assert nmse(logits(folder), want) <= 1e-3


# Prompts so short that most have no activation whose rounding differs from that of the oracle.
PROMPTS = np.random.default_rng(4).integers(3, 120, (12, 3))
SCHEMES = [("int", "channel"), ("float", "channel"), ("fp8", "block")]
MIXTURES = [*product(("mixtral", "deepseek_v3"), SCHEMES)]


def mixture(folder: Path, name: str, kind: str, strategy: str) -> tuple[Path, Any, Any]:
    """Write a random mixture; return its directory and the oracle's logits of `PROMPTS`, with float
    activations and with quantised ones."""
    quantised, plain = random_pair(folder, name, kind, strategy)
    scheme = config(kind != "int", strategy)["config_groups"]["group_0"]
    oracle = pytest.importorskip("fake_quantised")
    return quantised, *oracle.logits(quantised, plain, scheme, PROMPTS)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "scheme"), MIXTURES)
def test_mixtures(name, scheme, tmp_path):
    """Those of transformers with the functions of compressed-tensors, on both host backends."""
    folder, floats, quantised = mixture(tmp_path, name, *scheme)
    for device, linear in (("reference", "auto"), ("cpu", "float")):
        assert nmse(logits(folder, device, linear, PROMPTS), floats) <= 1e-9
    assert typical_nmse(floats, quantised) > 1e-4  # an oracle that leaves activations alone
    assert typical_nmse(logits(folder, prompts=PROMPTS), quantised) <= 1e-9
    form = {"int": "w8a8", "float": "fp8", "fp8": "fp8_128"}[scheme[0]]
    formats = {t.dtype.name for t in open_checkpoint(folder, data=False).tensors.values()}
    assert formats == {form, "f32"}


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "scheme"), MIXTURES)
def test_mixtures_on_the_gpu(name, scheme, tmp_path):
    """As on the CPU. Tensor cores round sums of e4m3, and roundings of activations follow."""
    need_gpu()
    folder, floats, quantised = mixture(tmp_path, name, *scheme)
    assert typical_nmse(logits(folder, "cuda", "float", PROMPTS), floats) <= 1e-5
    limit = 1e-3 if scheme[0] == "int" else 0.5 * typical_nmse(floats, quantised)
    assert typical_nmse(logits(folder, "cuda", prompts=PROMPTS), quantised) <= limit


# --------------------------------------------------------------------------------------- bad input

INPUT = r"config_groups\['group_0'\].input_activations"


def changed(part: str, floats: bool = False, by: str = "channel", **keys: Any) -> dict:
    made = config(floats, by)
    group = made["config_groups"]["group_0"]
    group[part] = {**group[part], **keys} if keys else None
    return made


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (changed("input_activations"), "missing key 'input_activations'"),
        (
            changed("input_activations", dynamic=False),
            f"{INPUT}: dynamic = False is not .*input scales",
        ),
        (changed("input_activations", strategy="tensor"), f"{INPUT}: strategy = 'tensor'"),
        (changed("input_activations", symmetric=False), f"{INPUT}: symmetric = False"),
        (changed("input_activations", num_bits=4), f"{INPUT}: num_bits = 4"),
        (changed("input_activations", type="float"), f"{INPUT}: type = 'float'"),
        (changed("input_activations", True, "block", group_size=64), f"{INPUT}: group_size = 64"),
        (changed("weights", strategy="block"), "strategy = 'block'"),
        (changed("weights", True, "block", block_structure=[64, 64]), "block_structure = "),
        (changed("weights", symmetric=False), "symmetric = False"),
        (changed("weights", dynamic=True), "dynamic = True"),
        (changed("weights", spin=1), "unknown key 'spin'"),
        (config(False, "channel", format="naive"), "format = 'naive'"),
        (fp8_config(activation_scheme="static"), "activation_scheme = 'static' is .*input sca"),
        (fp8_config(weight_block_size=[64, 128]), "weight_block_size = "),
        (fp8_config(weight_block_size=None), "missing key 'weight_block_size'"),
        (fp8_config(fmt="e5m2"), "fmt = 'e5m2'"),
        (fp8_config(scale_fmt="ue8m0"), "scale_fmt = 'ue8m0'"),
        (fp8_config(spin=1), "unknown key 'spin'"),
    ],
)
def test_refused_configurations(keys, message):
    with pytest.raises(ConfigError, match=rf"^config.json: quantization_config.*{message}"):
        published.scheme(keys["quant_method"], "config.json: quantization_config", keys)


WRONG = [
    ("weight_scale", lambda t: t[:-1], r"'a.weight_scale': has shape \[299, 1\], not \[300, 1\]"),
    ("weight_scale", lambda t: t.int(), "'a.weight_scale': is i32, not f32 or f16 or bf16"),
    (
        "weight",
        lambda t: t[:, :100].contiguous(),
        "'a.weight': is a weight of 300 x 100, whose",
    ),
    ("weight", lambda t: t[0].contiguous(), "'a.weight': has shape .*, which is no matrix"),
    ("weight", lambda t: t.float(), "'a.weight': is f32, not f8_e4m3"),
    ("weight", None, "'a.weight': missing"),
]
WRONG_VALUES = [
    (
        "weight_scale",
        lambda t: t * 0,
        r"'a.weight_scale': element \[0, 0\] is 0.0: a scale",
    ),
    ("weight_scale", lambda t: -t, "a scale must be finite and positive"),
    ("weight_scale", lambda t: t * np.nan, r"element \[0, 0\] is NaN: a scale must be finite"),
    ("weight", "nan", "'a.weight': row 7 has a NaN"),
]


@pytest.mark.parametrize(("part", "change", "message"), WRONG + WRONG_VALUES)
def test_wrong_tensors(tmp_path, part, change, message):
    """Shapes and dtypes are checked by the header alone, values when the weight is read."""
    stored = tensors("float", "channel", values_of())
    if change is None:
        del stored["a.weight"]
    elif change == "nan":
        stored["a.weight"].view(torch.uint8)[7, 3] = 0xFF
    else:
        stored[f"a.{part}"] = change(stored[f"a.{part}"])
    keys = config(True, "channel")
    if (part, change, message) in WRONG_VALUES:
        file = read(tmp_path, keys, stored)
        with pytest.raises(ModelFileError, match=message):
            file.raw("a.weight")
    else:
        with pytest.raises(ModelFileError, match=message):
            read(tmp_path, keys, stored)


def test_configuration_and_tensors_must_agree(tmp_path):
    stored = tensors("int", "channel", values_of())
    for keys, message in (
        (config(False, "channel", ignore=["re:a"]), "quantization_config ignores the module"),
        (config(True, "channel"), "'a.weight': is i8, not f8_e4m3"),
    ):
        with pytest.raises(ModelFileError, match=message):
            read(tmp_path, keys, stored)
    stored = tensors("fp8", "block", values_of())
    with pytest.raises(ModelFileError, match="modules_to_not_convert names the module 'a'"):
        read(tmp_path, fp8_config(modules_to_not_convert=["a"]), stored)
    with pytest.raises(ModelFileError, match="no packed weights"):
        read(tmp_path, fp8_config(), {"a.weight": torch.zeros(3, 4)})
