"""GPTQ, AWQ and compressed-tensors directories, read without conversion to floats.

The oracle is their definition, scale * (q - zero), in float32.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import hf_models
import ml_dtypes
import numpy as np
import packed_checkpoints as writer
import pytest
from cuda_cases import need_gpu
from packed_checkpoints import (
    awq_config,
    compressed_config,
    gptq_config,
    integers_of,
    nf4_config,
    weights_config,
)

import graphllm
from graphllm.checkpoints import published
from graphllm.checkpoints.checkpoint import open_checkpoint
from graphllm.checkpoints.published import packed_linear
from graphllm.errors import ConfigError, ModelFileError
from graphllm.formats.quantization import dequantise
from graphllm.graph.tensor import Meta
from graphllm.weights import NamedWeights, WeightRule
from graphllm.weights.safetensors import Safetensors
from graphllm.weights.weight_rules import STACK

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 120, 12)]


def read(folder: Path, config: dict, tensors: writer.Tensors) -> published.PackedTensors:
    """Write the tensors as a file, and open it with the configuration."""
    folder.mkdir(exist_ok=True)
    writer.write(folder / "model.safetensors", tensors)
    wrap = published.scheme(config["quant_method"], "config.json: quantization_config", config)
    return wrap(Safetensors(folder))


def random_linear(
    bits: int, group: int, symmetric: bool, rows: int = 136, columns: int = 416,
    seed: int | None = None,
) -> writer.Packed:  # fmt: skip
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return integers_of(values, bits, group, symmetric, seed)


def check(file: published.PackedTensors, want: writer.Packed, form: str, atol: float) -> None:
    """Compare the weight with the definition; ``atol`` is in steps."""
    info = file.readable("a.weight")
    assert (info.shape, info.dtype.name) == (want.codes.shape, form)
    assert list(file.tensors) == ["a.weight"]
    raw = file.raw("a.weight")
    assert raw.nbytes == info.nbytes and not raw.flags.writeable
    error = np.abs(dequantise(raw, info.dtype) - want.dequantise())
    scale = want.scales.astype(np.float32)[:, want.at]
    assert (error <= atol * scale).all()


# Rounding of -zero * scale to float16, in steps: half an ulp, relative 2^-11, of at most 15 steps.
OFFSET = 16 * 2.0**-11


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("bits", "group", "sym", "form"),
    [(4, 32, True, "q4_0"), (4, 128, False, "q4_1"), (4, -1, False, "q4_1"), (8, 64, True, "q8_0")],
)
def test_gptq(tmp_path, monkeypatch, bits, group, sym, form, version):
    """Several tiles, of which the last is smaller; 128 and 64 leave a smaller last group."""
    monkeypatch.setattr(packed_linear, "_TILE", 1)
    monkeypatch.setattr(packed_linear, "_MIN_ROWS", 64)
    want = random_linear(bits, group, sym)
    name = {1: "gptq", 2: "gptq_v2"}[version]
    config = gptq_config(bits, group, sym, checkpoint_format=name)
    file = read(tmp_path, config, writer.gptq("a", want, bits, version))
    check(file, want, form, 0 if sym else OFFSET)


def test_gptq_in_the_order_of_activations(tmp_path):
    """With one group per row, or static ones, groups are neighbouring columns all the same."""
    for group in (-1, 64):
        want = random_linear(4, group, True)
        stored = writer.gptq("a", want, 4)
        config = gptq_config(4, group, desc_act=True, static_groups=True)
        check(read(tmp_path, config, stored), want, "q4_0", 0)
    del stored["a.g_idx"]
    with pytest.raises(ModelFileError, match=r"'a.g_idx': missing"):
        read(tmp_path, config, stored)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize("kind", ["gptq", "compressed"])
def test_groups_of_scattered_columns(tmp_path, monkeypatch, kind, bits, symmetric):
    """The weight has its columns by groups, and `columns` is their order; or, if the model cannot
    reorder the input, float16 in the stored order. The last group is smaller."""
    monkeypatch.setattr(packed_linear, "_TILE", 1)
    monkeypatch.setattr(packed_linear, "_MIN_ROWS", 64)
    want = random_linear(bits, 64, symmetric, seed=1)
    if kind == "gptq":
        config = gptq_config(bits, 64, symmetric, desc_act=True)
        tensors = writer.gptq("a", want, bits)
    else:
        config = compressed_config(weights_config(bits, 64, symmetric, actorder="group"))
        tensors = writer.compressed("a", want, bits, symmetric, ordered=True)
    file = read(tmp_path, config, tensors)
    weights = NamedWeights(file, (), strict=False)
    assert sorted(weights.names()) == ["a.columns", "a.weight"]
    order = weights.raw("a.columns").view(np.int32)[0]
    assert weights.meta("a.columns") == Meta.of((416,), "i32")
    meta = weights.meta("a.weight")
    found = dequantise(weights.raw("a.weight"), meta.dtype)
    limit = want.scales.astype(np.float32)[:, want.at[order]] * (0 if symmetric else OFFSET)
    assert (np.abs(found - want.dequantise()[:, order]) <= limit).all()
    assert meta.dtype.quantised and not file.notes()
    file = read(tmp_path, config, tensors)
    stack = (WeightRule("b.weight", "a.weight", STACK),)
    weights = NamedWeights(file, stack, strict=True)
    assert [*weights.names()] == ["b.weight"] and weights.meta("b.weight").dtype.name == "f16"
    values = weights.raw("b.weight").view(np.float16)
    assert np.array_equal(values, want.dequantise().astype(np.float16))
    assert file.notes()[0].startswith("1 matrices are f16: their groups are scattered columns")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t * 0, "has 416 columns of group 0, not 64"),
        (lambda t: t + 1, "has 0 columns of group 0, not 64"),
        (lambda t: t[:-1], r"has shape \[415\], not \[416\]"),
        (None, "missing"),
    ],
)
def test_wrong_orders(tmp_path, change, message):
    tensors = writer.gptq("a", random_linear(4, 64, True, seed=1), 4)
    index = tensors.pop("a.g_idx")
    if change:
        tensors["a.g_idx"] = change(index)
    with pytest.raises(ModelFileError, match=f"tensor 'a.g_idx': {message}"):
        read(tmp_path, gptq_config(4, 64, desc_act=True), tensors)


@pytest.mark.parametrize(("group", "zero_point"), [(32, True), (-1, True), (128, False)])
def test_awq(tmp_path, monkeypatch, group, zero_point):
    monkeypatch.setattr(packed_linear, "_TILE", 1)
    monkeypatch.setattr(packed_linear, "_MIN_ROWS", 64)
    want = random_linear(4, group, not zero_point)
    file = read(tmp_path, awq_config(group, zero_point), writer.awq("a", want))
    check(file, want, "q4_1" if zero_point else "q4_0", OFFSET if zero_point else 0)


CASES = [
    (4, 32, True, "q4_0"), (4, 128, False, "q4_1"), (4, -1, False, "q4_1"), (8, 64, True, "q8_0"),
    (8, -1, True, "q8_0"),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "symmetric", "form"), CASES)
def test_compressed_tensors(tmp_path, monkeypatch, bits, group, symmetric, form):
    """137 rows leave a padded word of zero points. The bfloat16 scales of these are exact."""
    monkeypatch.setattr(packed_linear, "_TILE", 1)
    monkeypatch.setattr(packed_linear, "_MIN_ROWS", 64)
    want = random_linear(bits, group, symmetric, rows=137)
    want.scales = want.scales.astype(ml_dtypes.bfloat16)
    config = compressed_config(weights_config(bits, group, symmetric))
    stored = writer.compressed("a", want, bits, symmetric)
    check(read(tmp_path, config, stored), want, form, 0 if symmetric else OFFSET)
    if not symmetric:  # as old versions stored them
        stored["a.weight_zero_point"] = (want.zeros.astype(int) - 8).astype(np.int8)
        check(read(tmp_path, config, stored), want, form, OFFSET)
        stored["a.weight_zero_point"][5, 0] = 8
        with pytest.raises(ModelFileError, match="row 5, group 0 is 8: no integer of 4 bits"):
            read(tmp_path, config, stored).raw("a.weight")


@pytest.mark.parity
@pytest.mark.parametrize(("bits", "group", "symmetric", "form"), CASES)
def test_the_package_compressed_tensors_stores_the_same(bits, group, symmetric, form, tmp_path):
    """Its own compressor writes the file, and its decompressed weight is the oracle."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    want = random_linear(bits, group, symmetric, 48, 256)
    keys = weights_config(bits, group, symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=keys)
    middle = 2 ** (bits - 1)
    state = {
        "weight": torch.from_numpy(want.dequantise()),
        "weight_scale": torch.from_numpy(want.scales.astype(np.float32)),
        "weight_zero_point": torch.from_numpy((want.zeros.astype(int) - middle).astype(np.int8)),
    }
    packed = PackedQuantizationCompressor.compress(state, scheme)
    plain = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].numpy()
    np.testing.assert_array_equal(plain, want.dequantise())
    file = read(tmp_path, compressed_config(keys), {f"a.{k}": v.numpy() for k, v in packed.items()})
    check(file, want, form, 0 if symmetric else OFFSET)


def test_groups_of_modules(tmp_path):
    """A path precedes an expression, and that the class."""
    config = compressed_config(weights_config(4), weights_config(8, -1), weights_config(4, 64))
    config["sparsity_config"] = {"format": "dense", "global_sparsity": 0.1, "targets": []}
    lists = (["Linear"], ["re:.*down_proj$"], ["b.down_proj"])
    for group, targets in zip(config["config_groups"].values(), lists, strict=True):
        group["targets"] = targets
    tensors = {}
    for name, bits, size in (("a", 4, 32), ("a.down_proj", 8, -1), ("b.down_proj", 4, 64)):
        linear = random_linear(bits, size, True)
        tensors |= writer.compressed(name, linear, bits, True)
    file = read(tmp_path, config, tensors)
    found = {name: info.dtype.name for name, info in file.tensors.items()}
    assert found == {
        "a.weight": "q4_0", "a.down_proj.weight": "q8_0", "b.down_proj.weight": "q4_0"
    }  # fmt: skip
    config["config_groups"]["group_0"]["targets"] = ["c"]
    with pytest.raises(ModelFileError, match=r"'a.weight_packed': no target .* module 'a'"):
        read(tmp_path, config, tensors)
    config["ignore"] = ["re:.*.*.*!"]
    longer = {name.replace("a.", f"{'a' * 126}.", 1): value for name, value in tensors.items()}
    with pytest.raises(ModelFileError, match=r"too many for an expression with 3 repetitions"):
        read(tmp_path, config, longer)
    config["ignore"] = ["re:b[.]"]
    config["config_groups"]["group_0"]["targets"] = ["re:a$"]
    with pytest.raises(
        ModelFileError, match=r"'b.down_proj.weight_packed': quantised, but .*ignores"
    ):
        read(tmp_path, config, tensors)


# ------------------------------------------------------------------------------------------ models

SIZES = {
    "": {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16},
    "phi3": {"hidden_size": 96, "intermediate_size": 160},
    "deepseek_v3": {
        "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 64,
        "kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 16, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
    },
}  # fmt: skip


def compressed(
    bits: int, group: int, symmetric: bool, **keys: Any
) -> tuple[dict, writer.Quantiser]:
    config = compressed_config(weights_config(bits, group, symmetric, **keys))

    def pack(module: str, linear: writer.Packed) -> writer.Tensors:
        return writer.compressed(module, linear, bits, symmetric, bool(keys))

    # By the number of rows: queries have another order than keys and values.
    order = (lambda module, values: len(values)) if keys else (lambda module, values: None)
    return config, writer.integers(bits, group, symmetric, pack, order)


KINDS = {
    "gptq": (gptq_config(4, 32), writer.integers(4, 32, True, lambda n, p: writer.gptq(n, p, 4))),
    "gptq-8": (
        gptq_config(8, -1), writer.integers(8, -1, True, lambda n, p: writer.gptq(n, p, 8)),
    ),
    "gptq-ordered": (
        gptq_config(4, 32, desc_act=True),
        writer.integers(
            4, 32, True, lambda n, p: writer.gptq(n, p, 4), lambda n, v: v.shape[1] + ("o_p" in n)
        ),
    ),
    "compressed": compressed(4, 64, True),
    "compressed-ordered": compressed(4, 32, True, actorder="group"),
    "compressed-asymmetric": compressed(4, -1, False),
    "awq": (awq_config(64), writer.integers(4, 64, False, writer.awq)),
    "nf4": (nf4_config(), writer.nf4),
}  # fmt: skip
EXACT = ("gptq", "gptq-8", "compressed")  # others round offsets or values to float16
GATHERS = {"gptq-ordered": 4, "compressed-ordered": 5}  # of a layer, without experts and MLA


def nmse(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(have - want).sum() / np.square(want).sum())


def typical_nmse(have: np.ndarray, want: np.ndarray) -> float:
    """The median over the tokens: a rounding may give a token other experts."""
    return float(np.median(np.square(have - want).sum(1) / np.square(want).sum(1)))


def random_pair(folder: Path, name: str, kind: str) -> tuple[Path, Path]:
    """Write a random model twice, packed and with the same weights as float32."""
    spec = hf_models.SPECS[name]
    keys = {**hf_models.config_of(spec, 0), **SIZES.get(name, SIZES[""])}
    plain = folder / "plain"
    hf_models.oracle(keys, name).save_pretrained(plain)
    writer.write_pair(folder / "packed", plain, *KINDS[kind])
    return folder / "packed", plain


MODELS = [
    *product(("llama", "qwen3", "mixtral", "deepseek_v3"), KINDS),
    ("phi3", "awq"),
]


@pytest.mark.parity
@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_logits(tmp_path, name, kind):
    """Separate, stacked (experts) and fused (qkv, gate_up) linears, on both host backends."""
    packed, plain = random_pair(tmp_path, name, kind)
    want = None
    for device in ("reference", "cpu"):
        options = {"device": device, "kv_type": "f32", "context": 32, "linear": "float"}
        want = graphllm.load(plain, **options).logits(IDS) if want is None else want
        llm = graphllm.load(packed, **options)
        have = llm.logits(IDS)
        exact = kind in EXACT or (kind in GATHERS and name in ("llama", "qwen3"))
        assert nmse(have, want) <= (1e-9 if exact else 1e-4)
        found = llm.placement()[device].get("gather_columns", 0)
        if name in ("llama", "qwen3"):  # of queries, keys and values one if they agree
            assert (
                found == GATHERS.get(kind, 0) * hf_models.SPECS[name].tiny[0]["num_hidden_layers"]
            )
    have = graphllm.load(packed, device="cpu", kv_type="f32", context=32).logits(IDS)
    assert typical_nmse(have, want) <= 1e-2  # 8-bit activations
    noted = graphllm.load(packed, device="reference", context=32, type="q5_0").notes()
    assert any("they have a block format already" in line for line in noted)


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_logits_on_the_gpu(tmp_path, name, kind):
    """Those of the reference, with float activations and with those that kernels choose."""
    need_gpu()
    packed, _ = random_pair(tmp_path, name, kind)
    options = {"kv_type": "f32", "context": 32}
    want = graphllm.load(packed, device="reference", linear="float", **options).logits(IDS)
    for linear, limit in (("float", 1e-5), ("auto", 1e-4)):
        have = graphllm.load(packed, device="cuda", linear=linear, **options).logits(IDS)
        assert typical_nmse(have, want) <= limit, linear


# --------------------------------------------------------------------------------------- bad input


IN_WEIGHTS = r"config_groups\['group_0'\].weights: "


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(3), "bits = 3 is not supported: only 4, 8"),
        (gptq_config(4, 48), "group_size = 48 is not supported: only -1 and multiples of 32"),
        (gptq_config(4, 0), "group_size = 0 is"),
        (gptq_config(8, sym=False), "sym = False is not supported: only True"),
        (gptq_config(desc_act=1), "desc_act = 1 is not supported: only True, False"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format = 'marlin' is not"),
        (gptq_config(dynamic={"-:lm_head": {}}), "dynamic = .* is not supported"),
        (gptq_config(spin=1), "unknown key 'spin'"),
        (gptq_config("4"), "bits = '4' is not supported"),
        (gptq_config(True), "bits = True is not supported"),
        (gptq_config(None), "missing key 'bits'"),
        (compressed_config(), "config_groups = {} is not supported"),
        (compressed_config(weights_config(), format="nvfp4-pack"), "format = 'nvfp4-pack"),
        (compressed_config(weights_config(), ignore=["re:(a+)+"]), "ignore = .*repeats a group"),
        (
            compressed_config(weights_config(), ignore=["re:.*.*.*.*"]),
            "ignore = .*more than 3 long",
        ),
        (
            compressed_config(weights_config(), ignore=[r"re:a\\*b+c{9,}.{,99}"]),
            "ignore = .*more than 3 long",
        ),
        (
            compressed_config(weights_config(), ignore=[f"re:{i}" for i in range(101)]),
            "ignore = .*101 expressions, more than 100",
        ),
        (compressed_config(weights_config(), ignore=["re:(a"]), "ignore = .*no regular expression"),
        (
            compressed_config(weights_config(), targets="re:*"),
            r"config_groups\['group_0'\]: targets = .*no regular expression",
        ),
        (compressed_config(weights_config(), kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed_config(weights_config(), sparsity_config={"format": "sparse"}), "sparsity_con"),
        (compressed_config(weights_config(), quantization_status="frozen"), "quantization_status"),
        (compressed_config(weights_config(3)), IN_WEIGHTS + "num_bits = 3 is not"),
        (compressed_config(weights_config(4, 48)), IN_WEIGHTS + "group_size = 48 is"),
        (compressed_config(weights_config(8, 32, False)), IN_WEIGHTS + "symmetric = False"),
        (compressed_config(weights_config(actorder="rows")), IN_WEIGHTS + "actorder = 'rows'"),
        (compressed_config(weights_config(strategy="block")), IN_WEIGHTS + "strategy = 'block'"),
        (compressed_config(weights_config(type="float")), IN_WEIGHTS + "type = 'float'"),
        (compressed_config(weights_config(spin=1)), IN_WEIGHTS + "unknown key 'spin'"),
        (awq_config(version="gemv"), "version = 'gemv' is not supported: only 'gemm', 'GEMM'"),
        (awq_config(bits=8), "bits = 8 is not supported: only 4"),
        (awq_config(modules_to_not_convert=[3]), ".* 3 is not the name of a module"),
    ],
)
def test_refused_configurations(config, message):
    with pytest.raises(ConfigError, match=rf"^config.json: quantization_config\W*{message}"):
        published.scheme(config["quant_method"], "config.json: quantization_config", config)


def test_modules_that_are_excluded_must_not_be_packed(tmp_path):
    tensors = writer.awq("a.b", random_linear(4, 32, False))
    with pytest.raises(ModelFileError, match=r"'a.b.qweight': modules_to_not_convert excludes it"):
        read(tmp_path, awq_config(modules_to_not_convert=["lm_head", "b"]), tensors)


WRONG = [
    ("scales", None, "'a.scales': missing"),
    ("qzeros", None, "'a.qzeros': missing"),
    ("qweight", lambda t: t.astype(np.int64), "'a.qweight': is i64, not i32"),
    ("qweight", lambda t: t.reshape(-1), r"'a.qweight': has shape .*, which is no matrix"),
    ("qweight", lambda t: t[:-1], "'a.qweight': is a weight of 136 x 408, whose rows are not whol"),
    ("qweight", lambda t: t[:0], "'a.qweight': is a weight of 136 x 0"),
    ("scales", lambda t: t[:-1], r"'a.scales': has shape \[12, 136\], not \[13, 136\]"),
    ("scales", lambda t: t.astype(np.int32), "'a.scales': is i32, not f32 or f16 or bf16"),
    ("qzeros", lambda t: t[:, :-1], r"'a.qzeros': has shape \[13, 16\], not \[13, 17\]"),
    ("g_idx", lambda t: t[:-1], "'a.g_idx': has shape"),
]
WRONG_VALUES = [
    ("scales", lambda t: t * 0, "'a.scales': row 0, group 0 is 0.0: a scale must be finite"),
    ("scales", lambda t: t * np.inf, "'a.scales': row 0, group 0 is inf: a scale must be finite"),
    ("scales", lambda t: t * np.nan, "'a.scales': row 0, group 0 is NaN: a scale must be finite"),
    ("scales", lambda t: t * np.float32(1e9), "'a.scales': .* beyond the range of f16"),
    ("qzeros", lambda t: t ^ 16, "'a.qzeros': row 1, group 0 is 7: a zero point is not 8"),
    ("g_idx", lambda t: t[::-1], r"'a.g_idx': groups of scattered columns .*desc_act"),
]


@pytest.mark.parametrize(("part", "change", "message"), WRONG + WRONG_VALUES)
def test_wrong_tensors(tmp_path, part, change, message):
    """Shapes and dtypes are checked by the header alone, values when the weight is read."""
    tensors = writer.gptq("a", random_linear(4, 32, True), 4)
    if change is None:
        del tensors[f"a.{part}"]
    else:
        tensors[f"a.{part}"] = change(tensors[f"a.{part}"])
    if (part, change, message) in WRONG_VALUES:
        file = read(tmp_path, gptq_config(), tensors)
        with pytest.raises(ModelFileError, match=message):
            file.raw("a.weight")
    else:
        with pytest.raises(ModelFileError, match=message):
            read(tmp_path, gptq_config(), tensors)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight_shape", lambda t: t - [0, 32], r"'a.weight_shape': is \[136, 384\], but"),
        ("weight_shape", None, "'a.weight_shape': missing"),
        ("weight_scale", None, "'a.weight_scale': missing"),
        ("weight_zero_point", None, "'a.weight_zero_point': missing"),
        ("weight_zero_point", lambda t: t[:-1], r"'a.weight_zero_point': has shape \[16, 13\], n"),
        (
            "weight_g_idx",
            lambda t: np.zeros(416, np.int32),
            "'a.weight_g_idx': groups of sca",
        ),
    ],
)
def test_wrong_compressed_tensors(tmp_path, part, change, message):
    tensors = writer.compressed("a", random_linear(4, 32, False), 4, False)
    if change is None:
        del tensors[f"a.{part}"]
    else:
        tensors[f"a.{part}"] = change(tensors.get(f"a.{part}"))
    config = compressed_config(weights_config(4, 32, False))
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, config, tensors).raw("a.weight")


def test_packed_and_float_weights_of_a_module(tmp_path):
    linear = random_linear(4, 32, True)
    with pytest.raises(ModelFileError, match=r"no packed weights, which config.json"):
        read(tmp_path, gptq_config(), {"a.weight": linear.dequantise()})
    both = {"a.weight": linear.dequantise(), **writer.gptq("a", linear, 4)}
    with pytest.raises(ModelFileError, match=r"tensor 'a.weight': stored packed as well"):
        read(tmp_path, gptq_config(), both)


def test_scales_that_are_too_small_for_float16_are_noted(tmp_path):
    """A scale of float32 or bfloat16 is rounded; subnormal results lose precision."""
    want = random_linear(4, 32, True)
    want.scales = want.scales.astype(np.float32)
    want.scales[3, 1] = 1.5e-7
    file = read(tmp_path, gptq_config(), writer.gptq("a", want, 4))
    assert not file.notes()
    check(file, want, "q4_0", 8 * 0.25)
    assert file.notes() == ["1 scales are too small to be exact in f16: those of 'a'"]


@pytest.mark.parity
def test_a_plan_shows_the_formats(tmp_path):
    """It needs headers only."""
    packed, plain = random_pair(tmp_path, "llama", "gptq")
    stored = packed / "model.safetensors"
    content = stored.read_bytes()
    stored.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    formats = {t.dtype.name for t in open_checkpoint(packed, data=False).tensors.values()}
    assert formats == {"q4_0", "f32"}
    read = [graphllm.dry_run(f, context=32, device="cpu").token.nbytes for f in (packed, plain)]
    assert read[0] < read[1] / 2
