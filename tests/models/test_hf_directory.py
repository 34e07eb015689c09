"""Hugging Face directories and llama2.c files as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny_models as tiny
from hf_files import CONFIG, write
from llama2c_files import write_model
from safetensors.numpy import save_file

import graphllm
from graphllm.checkpoints.checkpoint import open_checkpoint
from graphllm.errors import ConfigError, ModelFileError

IDS = [1, 5, 300, 17, 9, 9, 250, 3, 44, 101, 7]


def logits(model: Path, **options: object) -> np.ndarray:
    return graphllm.load(model, device="reference", context=32, **options).logits(IDS)


def test_a_directory_and_a_gguf_file_of_the_same_weights(tmp_path):
    """The rows of q and k are permuted in the GGUF file."""
    for tied in (False, True):
        weights = tiny.llama_weights(tied=tied)
        stored = tiny.write_llama(tmp_path / "tiny.gguf", weights)
        folder = write(tmp_path / "hf", weights, tie_word_embeddings=tied)
        want = logits(stored)
        np.testing.assert_allclose(logits(folder), want, atol=1e-5)
        np.testing.assert_allclose(logits(folder / "model.safetensors"), want, atol=1e-5)


def test_a_model_needs_no_tokenizer_for_logits(tmp_path):
    llm = graphllm.load(write(tmp_path), device="reference", context=32)
    assert not llm.file.has_vocabulary
    with pytest.raises(ModelFileError, match="tokenizer"):
        llm.generate("hello")


GAINS = """
from graphllm import ops
from graphllm.model.decoder import Decoder
from graphllm.models.llama import config

class Model(Decoder):
    def mlp(self, x):
        return ops.mul(super().mlp(x), self.vector("gain", *SHAPE))
"""


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_parameter_of_one_element(tmp_path, shape, kind, device):
    """A scalar or one-element gain in each layer is multiplied without a copy."""
    weights, scaled = tiny.llama_weights(), tiny.llama_weights()
    for layer in range(tiny.LAYERS):
        name, gain = f"model.layers.{layer}.mlp", 0.5 + 0.25 * layer
        weights[f"{name}.gain"] = np.full(shape, gain, kind)
        scaled[f"{name}.down_proj.weight"] = gain * scaled[f"{name}.down_proj.weight"]
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(
        {k: np.asarray(v, order="C") for k, v in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    own = tmp_path / "gains.py"
    own.write_text(f"SHAPE = {shape}\n{GAINS}")
    llm = graphllm.load(folder, model_def=own, device=device, context=32, linear="float")
    want = graphllm.load(write(tmp_path / "hf", scaled), device=device, context=32, linear="float")
    np.testing.assert_allclose(llm.logits(IDS), want.logits(IDS), atol=1e-5)
    steps = [step.node.op for step in llm.engine.decode_plan().steps]
    others = [step.node.op for step in want.engine.decode_plan().steps]
    assert steps.count("contiguous") == others.count("contiguous")


def test_quantize_on_load(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "DIM", 64)  # two blocks; other rows are not whole blocks
    folder = write(tmp_path, hidden_size=64)
    want, have = logits(folder), logits(folder, type="q4_0", linear="float")
    assert 1e-6 < np.square(have - want).mean() / np.square(want).mean() < 0.1
    llm = graphllm.load(folder, device="reference", context=32, type="q4_0")
    assert any("rows are not whole blocks" in line for line in llm.notes())
    assert not any("converted on" in line for line in llm.notes())
    switched = {"no_kernels": ("cpu:quantise",), "threads": 1}
    llm = graphllm.load(folder, device="cpu", context=32, type="q4_0", **switched)
    assert "matrices are converted on reference: switched off (cpu:quantise)" in llm.notes()
    for unknown in ("q7", "a8_32"):
        with pytest.raises(
            graphllm.RequestError, match=rf"unknown type '{unknown}' .*known: .*q8_0"
        ):
            logits(folder, type=unknown)


@pytest.mark.parametrize("kind, least", [("f32", 0), ("f16", 2e-3), ("bf16", 2e-2)])
def test_floats_are_converted_on_load(tmp_path, kind, least):
    folder = write(tmp_path)
    want, have = logits(folder), logits(folder, type=kind)
    assert np.abs(have - want).max() <= least * np.abs(want).max()
    assert (kind == "f32") == np.array_equal(have, want)


def test_a_llama2c_file(tmp_path):
    weights = write_model(tmp_path / "model.bin", shared=True)
    llm = graphllm.load(tmp_path / "model.bin", device="reference")
    ids = [1, 2, 3, 5, 4]
    folder = tmp_path / "hf"
    folder.mkdir()
    turned = {k: _halves(k, v, llm.file.metadata) for k, v in weights.items()}
    save_file(turned, folder / "model.safetensors")
    keys = {"model_type": "llama", **llm.file.metadata}
    (folder / "config.json").write_text(json.dumps(keys))
    other = graphllm.load(folder, device="reference")
    np.testing.assert_allclose(llm.logits(ids), other.logits(ids), atol=1e-5)


def _halves(name: str, value: np.ndarray, config) -> np.ndarray:
    """Reorder the rows of q and k from interleaved pairs to halves, Hugging Face's layout."""
    count = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    found = next((key for part, key in count.items() if part in name), None)
    if found is None:
        return np.ascontiguousarray(value)
    pairs = value.reshape(config[found], -1, 2, value.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"new_thing": 2}, "config.json: the model does not know the key 'new_thing'"),
        ({"mlp_bais": True}, r"know the key 'mlp_bais' \(it reads 'mlp_bias'\)"),
        ({"hidden_size": None}, "missing key 'hidden_size'"),
        ({"hidden_size": "60"}, "hidden_size = '60' is not int"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000.* is not float"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers = 0 is not in 1\.\."),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported, only silu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope_type 'spiral' is not suppo"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling factor = None is not a number"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "twist": 1}}, "unknown keys: 'twist'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0.0 must be above 0"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4 KV heads"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq' are not supported"),
    ],
)
def test_refused_configurations(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        logits(write(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "lama"}, r"unknown model_type 'lama'; nearest: llama.*model_def"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": 40}, r"missing tensor '\*\.39\.\*'"),
        ({"num_hidden_layers": 2}, r"unexpected tensor 'model\.layers\.2\."),
        ({"head_dim": 12}, r"'model\.layers\.0\.self_attn\.q_proj\.weight' is \(60, 60\)"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' differs from"),
        ({"vocab_size": 7}, r"'model\.embed_tokens\.weight' is \(\d+, 60\), the model expects \(7"),
    ],
)
def test_refused_directories(tmp_path, keys, message):
    with pytest.raises(ModelFileError, match=message):
        logits(write(tmp_path, **keys))


def test_a_tied_head_may_be_stored_as_well(tmp_path):
    weights = tiny.llama_weights(tied=True)
    want = logits(write(tmp_path / "one", weights, tie_word_embeddings=True))
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    have = logits(write(tmp_path / "two", both, tie_word_embeddings=True))
    np.testing.assert_array_equal(have, want)


def test_not_a_model_directory(tmp_path):
    with pytest.raises(ModelFileError, match=r"is a directory without a config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json: not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"config\.json: not a JSON object"):
        open_checkpoint(tmp_path)


def test_a_plan_needs_headers_only(tmp_path):
    folder = write(tmp_path)
    stored = folder / "model.safetensors"
    size = int.from_bytes(stored.read_bytes()[:8], "little")
    stored.write_bytes(stored.read_bytes()[: 8 + size])
    assert graphllm.dry_run(folder, context=32, type="q8_0").model_type.startswith("llama")


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes and an end token; return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return made.get_vocab_size()


def test_text_in_and_out(tmp_path):
    """A vocabulary smaller than the embedding; ids above it decode to nothing."""
    count = write_tokenizer(write(tmp_path))
    assert count < CONFIG["vocab_size"]
    llm = graphllm.load(tmp_path, device="reference", context=64)
    assert bytes(llm.tokenizer.piece(i)[0] for i in llm.encode("ab c")) == b"ab c"
    done = llm.generate("ab c", max_tokens=20, temperature=2.0, seed=3, ignore_eos=True)
    shown = b"".join(llm.tokenizer.piece(i) for i in done.ids)
    assert len(done.ids) == 20 and done.text == shown.decode("utf-8", "replace")
    assert any(i >= count for i in done.ids) and llm.tokenizer.piece(count) == b""
    with pytest.raises(graphllm.RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = graphllm.load(tmp_path, device="reference", context=64)
    assert chat.encode_chat([{"role": "user", "content": "ab"}]) == llm.encode("ab")


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    weights = tiny.llama_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100]
    write_tokenizer(write(tmp_path, weights, vocab_size=100))
    with pytest.raises(ModelFileError, match="tokenizer has 257 tokens, the embedding 100 rows"):
        logits(tmp_path)
