"""Mixtures of experts and latent attention (MLA): file layouts, reads, caches, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf_models
import hf_models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import graphllm
from graphllm.errors import ConfigError, ModelFileError, RequestError
from graphllm.formats.legacy import Q8_0
from graphllm.formats.microscaling import MXFP4
from graphllm.formats.quantization import dequantise, quantise
from graphllm.graph.dtype import F32
from graphllm.graph.tensor import Meta
from graphllm.weights.mxfp4_tensors import Mxfp4
from graphllm.weights.safetensors_format import U8
from graphllm.weights.weight_rules import Rows, View

pytestmark = pytest.mark.parity
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 120, 12)]
Tensors = dict[str, np.ndarray]


def written(folder: Path, name: str, **keys: object) -> Path:
    """Write the directory of a model's first TINY, with ``keys`` changed."""
    spec = hf_models.SPECS[name]
    model = hf_models.oracle({**hf_models.config_of(spec, 0), **keys}, name)
    model.save_pretrained(folder)
    return folder


def changed(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Rewrite the tensors of the directory."""
    file = folder / "model.safetensors"
    made = change(load_file(file))
    save_file({name: np.ascontiguousarray(value) for name, value in made.items()}, file)
    return folder


def configured(folder: Path, **keys: object) -> Path:
    """Rewrite keys in config.json of the directory."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


def logits(model: Path, **options: object) -> np.ndarray:
    options = {"device": "reference", "kv_type": "f32", "context": 32, **options}
    return graphllm.load(model, **options).logits(IDS)


# ------------------------------------------------------------------------------------ file layouts


def stacked(tensors: Tensors) -> Tensors:
    """Stack the experts as transformers does, with gate and up in one tensor."""
    out: Tensors = {}
    for name, value in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert is None:
            out[name] = value
        elif expert[2] == "0" and expert[3] != "up":
            count = sum(n.startswith(f"{expert[1]}.") for n in tensors) // 3
            of = ("down",) if expert[3] == "down" else ("gate", "up")
            each = [
                np.concatenate([tensors[f"{expert[1]}.{e}.{n}_proj.weight"] for n in of])
                for e in range(count)
            ]
            out[f"{expert[1]}.{'_'.join(of)}_proj"] = np.stack(each)
    return out


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_that_are_stacked(name, tmp_path):
    folder = written(tmp_path, name)
    want = logits(folder)
    np.testing.assert_array_equal(logits(changed(folder, stacked)), want)


@pytest.mark.parametrize("form", ["each", "joint"])
def test_gguf_layouts_of_experts(form, tmp_path):
    """One tensor per expert, as in 2023; or gate and up in one tensor."""
    arch, model = gguf_models.ARCHS["mixtral"], gguf_models.model_of("mixtral", 0)

    def joint(c: gguf_models.Config, tensors: Tensors) -> Tensors:
        out = arch.tensors(c, tensors)
        for i in range(c["num_hidden_layers"]):
            names = (f"model.layers.{i}.mlp.experts.{n}_proj.weight" for n in ("gate", "up"))
            both = np.concatenate([out.pop(name) for name in names], axis=1)
            out[f"blk.{i}.ffn_gate_up_exps.weight"] = both
        return out

    def apart(c: gguf_models.Config, tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, value in arch.tensors(c, tensors).items():
            expert = re.fullmatch(r"model\.layers\.(\d+)\..*experts\.(\w+)_proj\.weight", name)
            if expert is None:
                out[name] = value
                continue
            for e, one in enumerate(value):
                out[f"blk.{expert[1]}.ffn_{expert[2]}.{e}.weight"] = one
        return out

    other = gguf_models.Arch(arch.name, arch.keys, joint if form == "joint" else apart)
    paths = [gguf_models.write(tmp_path / f"{a is other}.gguf", model, a) for a in (arch, other)]
    np.testing.assert_array_equal(*map(logits, paths))


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_gguf_files_with_keys_and_values_in_one_tensor(kind, tmp_path):
    """Old files, which state head sizes instead of cache sizes."""
    arch, model = gguf_models.ARCHS[kind], gguf_models.model_of(kind, 0)

    def keys(c: gguf_models.Config) -> dict[str, object]:
        own = dict(arch.keys(c))
        own["attention.head_count_kv"] = c["num_attention_heads"]
        own["attention.key_length"] = own.pop("attention.key_length_mla")
        own["attention.value_length"] = own.pop("attention.value_length_mla")
        return own

    def one(c: gguf_models.Config, tensors: Tensors) -> Tensors:
        found = gguf_models.experts(c, tensors)
        return {n.replace("correction_bias", "correction.bias"): v for n, v in found.items()}

    old = gguf_models.Arch(arch.name, keys, one)
    paths = [gguf_models.write(tmp_path / f"{a is old}.gguf", model, a) for a in (arch, old)]
    np.testing.assert_allclose(*map(logits, paths), rtol=1e-5, atol=1e-6)


def test_parts_of_tensors_in_blocks():
    """Rows keep their format; a permuted view becomes float32."""
    values = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    raw, meta = quantise(values, Q8_0), Meta.of((6, 64), Q8_0)
    every, turned = Rows(lambda w: w[1::2]), View(lambda w: w.T)
    assert (every.meta([meta]).shape, every.meta([meta]).dtype) == ((3, 64), Q8_0)
    np.testing.assert_array_equal(every.raw([raw], [meta]), raw[1::2])
    assert (turned.meta([meta]).shape, turned.meta([meta]).dtype) == ((64, 6), F32)
    found = turned.raw([raw], [meta]).view(np.float32)
    np.testing.assert_array_equal(found, dequantise(raw, Q8_0).T)
    with pytest.raises(ModelFileError, match=r"shape \(6, 64\) cannot be split"):
        Rows(lambda w: np.split(w, 4)[0]).meta([meta])


# -------------------------------------------------------------------------------------------- mxfp4


def in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return gpt-oss's tensors with random MXFP4 experts, and the same dequantised."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, packed, plain = np.random.default_rng(5), {}, {}
    for name, value in tensors.items():
        if not name.endswith("_proj"):
            packed[name] = plain[name] = value
            continue
        experts, columns, rows = value.shape  # transposed
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(118, 124, blocks.shape[:-1], np.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        ).numpy()
    return packed, plain


@pytest.fixture(scope="module")
def oss(tmp_path_factory):
    """Return a directory with MXFP4 weights and one with the same weights in float32."""
    folders = []
    for i, name in enumerate(("packed", "plain")):
        folder = tmp_path_factory.mktemp(name)
        written(folder, "gpt_oss", hidden_size=64, intermediate_size=96)
        folders.append(changed(folder, lambda tensors, i=i: in_mxfp4(tensors)[i]))
    return folders


def test_mxfp4_is_computed_with_as_it_is_stored(oss):
    packed, plain = (
        graphllm.load(f, device="reference", kv_type="f32", context=32, linear="float") for f in oss
    )
    layer = "model.layers.1.mlp.experts"
    for name in ("gate_proj", "up_proj", "down_proj"):
        have, want = (m.decoder.weights for m in (packed, plain))
        weight = f"{layer}.{name}.weight"
        assert have.meta(weight).dtype == MXFP4
        assert have.meta(weight).shape == want.meta(weight).shape
        values = dequantise(have.raw(weight), MXFP4)
        np.testing.assert_array_equal(values, want.raw(weight).view(np.float32))
    np.testing.assert_array_equal(packed.logits(IDS), plain.logits(IDS))


def test_mxfp4_on_the_cpu(oss):
    packed, plain = (logits(folder, device="cpu", linear="float") for folder in oss)
    assert hf_models.distance(packed, plain) <= 1e-5
    packed = logits(oss[0], device="cpu")  # 8-bit activations
    assert np.square(packed - plain).sum() / np.square(plain).sum() <= 1e-2


@pytest.mark.parametrize("lost", ["blocks", "scales"])
def test_mxfp4_without_one_half(oss, lost, tmp_path):
    (tmp_path / "config.json").write_text((oss[0] / "config.json").read_text())
    tensors = load_file(oss[0] / "model.safetensors")
    del tensors[f"model.layers.1.mlp.experts.down_proj_{lost}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model.layers.1.mlp.experts.down_proj.weight"):
        logits(tmp_path)


def test_blocks_of_other_shapes_are_no_mxfp4():
    scales = Meta.of((2, 4, 3), U8)
    assert Mxfp4(slice(1, None, 2)).meta([Meta.of((2, 4, 3, 16), U8), scales]).shape == (2, 2, 96)
    for other in (Meta.of((2, 4, 3, 15), U8), Meta.of((2, 4, 3, 16), F32), scales):
        with pytest.raises(ModelFileError, match="not blocks and scales of mxfp4"):
            Mxfp4().meta([other, scales])


# ------------------------------------------------------------------------------- reads and caches


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_token_reads_only_its_experts(device, tmp_path):
    """3 of 9, by the bytes of a profile."""
    llm = graphllm.load(written(tmp_path, "qwen3_moe"), device=device, context=64)
    weights = llm.decoder.weights
    stored = sum(weights.raw(n).nbytes for n in weights.names() if ".experts." in n)
    decode = llm.profile(IDS, decode=4, repeat=1)["decode"]
    rows = [row for row in decode.rows if ".experts" in row.scope]
    tokens = decode.tokens
    assert rows and stored / 3 < sum(row.bytes for row in rows) / tokens < 1.2 * stored / 3


def test_low_mem_leaves_experts_in_the_file(tmp_path):
    path = gguf_models.write(
        tmp_path / "model.gguf", gguf_models.model_of("mixtral", 0), gguf_models.ARCHS["mixtral"]
    )
    options = {"device": "cpu", "kv_type": "f32", "context": 32}
    llm = graphllm.load(path, low_mem=True, **options)
    np.testing.assert_array_equal(llm.logits(IDS), logits(path, **options))
    experts = [llm.file.raw(name) for name in llm.file.tensors if "_exps" in name]
    held = list(llm.executor.buffers.weight_buffers())
    assert experts
    for raw in experts:
        assert any(np.shares_memory(raw, each) for each in held)


def test_low_mem_where_it_cannot_be(tmp_path):
    folder = written(tmp_path, "qwen3_moe")
    with pytest.raises(ModelFileError, match=r"tensor .*experts.* low_mem .* GGUF"):
        graphllm.load(folder, device="cpu", low_mem=True)
    dense = graphllm.load(written(tmp_path / "dense", "qwen3"), device="cpu", low_mem=True)
    assert "low_mem has no effect: the model has no experts" in dense.notes()


def test_latent_attention_caches_one_vector_a_token(tmp_path):
    llm = graphllm.load(written(tmp_path, "deepseek_v3"), device="reference", context=32)
    (cache,) = llm.decoder.caches
    assert cache.entries == {"k": (1, 24 + 6)}
    pools = {n: s for n, s in llm.decoder.pools.items() if n.endswith(".k")}
    assert len(pools) == len(llm.decoder.pools) == 3


@pytest.mark.parametrize("kv_type, off", [("f16", 1e-5), ("q8_0", 1e-3)])
def test_quantized_latent_cache(kv_type, off, tmp_path):
    folder = written(tmp_path, "deepseek_v2", kv_lora_rank=64, qk_rope_head_dim=32)
    want = logits(folder)
    have = logits(folder, device="cpu", kv_type=kv_type)
    assert np.square(have - want).sum() / np.square(want).sum() <= off


def test_latent_cache_with_unaligned_rank(tmp_path):
    folder = written(tmp_path, "deepseek_v2", kv_lora_rank=48, qk_rope_head_dim=16)
    with pytest.raises(RequestError, match=r"kv_type.* head size is 48"):
        logits(folder, kv_type="q8_0")


@pytest.mark.parametrize("name", ["deepseek_v2", "mixtral"])
def test_quantize_on_load(name, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    if name == "deepseek_v2":
        sizes |= {
            "moe_intermediate_size": 32,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    folder = written(tmp_path, name, **sizes)
    want, have = logits(folder), logits(folder, device="cpu", type="q8_0")
    assert 1e-8 < np.square(have - want).sum() / np.square(want).sum() <= 2e-2


# ----------------------------------------------------------------------------------------- errors

# Keys of published files that files written by transformers lack.
PUBLISHED = {
    "mixtral": {},
    "qwen2_moe": {"max_window_layers": 21, "use_sliding_window": False, "sliding_window": 32768},
    "qwen3_moe": {"max_window_layers": 48, "sliding_window": None, "rope_scaling": None},
    "deepseek_v2": {
        "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1,
        "scoring_func": "softmax", "seq_aux": True, "n_group": 1, "topk_group": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    },
    "deepseek_v3": {
        "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "aux_loss_alpha": 0.001, "seq_aux": True,
    },
    "gpt_oss": {"experts_per_token": 2, "initial_context_length": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_files(name, tmp_path):
    folder = written(tmp_path, name)
    want = logits(folder)
    np.testing.assert_array_equal(logits(configured(folder, **PUBLISHED[name])), want)


REFUSED = [
    ("qwen3_moe", {"num_experts_per_tok": 10}, "num_experts_per_tok = 10 is above"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 is not in"),
    ("deepseek_v3", {"n_group": 3}, "n_routed_experts = 8 cannot form 3 groups"),
    ("deepseek_v3", {"topk_group": 5}, "n_routed_experts = 8 cannot form 4 groups"),
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok = 3 is above"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
    ("deepseek_v2", {"qk_head_dim": 15}, "qk_head_dim must be 8 \\+ 6"),
    ("deepseek_v2", {"num_key_value_heads": 3}, "num_key_value_heads = 3 is not supported, only 6"),
    ("gpt_oss", {"experts_per_token": 3}, "experts_per_token = 3 is not supported, only 2"),
    ("gpt_oss", {"swiglu": True}, "does not know the key 'swiglu'"),
]


@pytest.mark.parametrize("name, keys, said", REFUSED, ids=lambda value: "".join(value)[:40])
def test_keys_that_are_refused(name, keys, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        logits(configured(written(tmp_path, name), **keys))


def test_mtp_layers_are_not_loaded(tmp_path):
    """Multi-token prediction layers, if the configuration states them."""
    folder = written(tmp_path, "deepseek_v3")
    want = logits(folder)

    def mtp_layer(tensors: Tensors) -> Tensors:
        last = {n: v for n, v in tensors.items() if n.startswith("model.layers.2.")}
        more = {n.replace(".2.", ".3.", 1): v for n, v in last.items()}
        return tensors | more | {"model.layers.3.eh_proj.weight": np.ones((3, 4), np.float32)}

    changed(folder, mtp_layer)
    np.testing.assert_array_equal(logits(folder), want)
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'model\.layers\.3\."):
        logits(configured(folder, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    "lost, said",
    [
        ("mlp.experts.4.up_proj.weight", "part 4 of 'model.layers.1.mlp.experts.up_proj.weight'"),
        ("mlp.gate.weight", "missing tensor 'model.layers.1.mlp.gate.weight'"),
        ("self_attn.kv_b_proj.weight", "missing tensor 'model.layers.1.self_attn.k_b_proj.weight'"),
    ],
)
def test_tensors_that_are_missing(lost, said, tmp_path):
    def without(tensors: Tensors) -> Tensors:
        return {n: v for n, v in tensors.items() if n != f"model.layers.1.{lost}"}

    with pytest.raises(ModelFileError, match=re.escape(said)):
        logits(changed(written(tmp_path, "deepseek_v2"), without))


def test_experts_of_different_shapes(tmp_path):
    def narrow(tensors: Tensors) -> Tensors:
        name = "model.layers.1.mlp.experts.4.up_proj.weight"
        return tensors | {name: tensors[name][:-1]}

    with pytest.raises(ModelFileError, match=r"mlp\.experts\.up_proj\.weight: .*cannot be stacked"):
        logits(changed(written(tmp_path, "qwen3_moe"), narrow))
