"""`graphllm quantize` of Hugging Face directories: the GGUF file is the same model.

llama.cpp (llama-cpp-python 0.3.36) loads these files, with the ids of `graphllm.tokenizer` on all
edge cases and the logits of graphllm (NMSE below 1e-6).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hf_files
import hf_tokenizers
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors

import graphllm
from graphllm import ConfigError, ModelFileError, models
from graphllm.quality.calibration import calibrate
from graphllm.quantize import quantize
from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.pre_tokenizers import PRE_TOKENIZERS, expand

pytestmark = pytest.mark.parity
hf_models = pytest.importorskip("hf_models")

ROWS, IDS = 950, [1, 5, 600, 17, 9, 9, 250]
TEMPLATE = "{{ messages[0].content }}"


def add_sentencepiece(folder: Path) -> None:
    shutil.copy(hf_tokenizers.train_model("bpe"), folder / "tokenizer.model")
    added = {"0": "<unk>", "1": "<s>", "2": "</s>", "600": "<|im_end|>", "601": "<tool>x"}
    settings = {
        "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "chat_template": TEMPLATE, "added_tokens_decoder": {
            number: {"content": text, "special": number != "601"} for number, text in added.items()
        },
    }  # fmt: skip
    hf_tokenizers.write_json(folder / "tokenizer_config.json", settings)


def add_byte_level(folder: Path, pre: str) -> None:
    """Byte-level BPE with the words of a pre-tokenizer of llama.cpp."""
    words = expand(PRE_TOKENIZERS[pre].patterns[0])
    made = Tokenizer.from_str(hf_tokenizers.byte_level(words, 900))
    made.add_special_tokens(["<|begin_of_text|>", "<|im_end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    begin = "<|begin_of_text|>"
    settings = {
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    if PRE_TOKENIZERS[pre].add_bos:
        made.model.ignore_merges = True
        tokens = [(begin, made.token_to_id(begin))]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=None, special_tokens=tokens
        )
        settings |= {"bos_token": begin, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(made.to_str(), "utf-8")
    hf_tokenizers.write_json(folder / "tokenizer_config.json", settings)


def write(folder: Path, family: str, variant: int, pre: str = ""):
    """Write a directory of a random model; returns transformers' model."""
    spec = next(each for each in models.specs() if each.name == family)
    config = {**hf_models.config_of(spec, variant), "vocab_size": ROWS}
    made = hf_models.oracle(config, family)
    made.save_pretrained(folder)
    if pre:
        add_byte_level(folder, pre)
    else:
        add_sentencepiece(folder)
    return made


@pytest.mark.parametrize(
    ("family", "variant", "pre", "architecture"),
    [
        ("llama", 0, "", "llama"), ("llama", 1, "llama-bpe", "llama"),
        ("llama", 3, "llama-bpe", "llama"), ("mistral", 3, "", "llama"),
        ("qwen2", 0, "qwen2", "qwen2"), ("qwen3", 0, "qwen2", "qwen3"),
        ("gemma3_text", 0, "", "gemma3"),
    ],
)  # fmt: skip
def test_the_file_is_the_same_model(family, variant, pre, architecture, tmp_path):
    oracle = write(tmp_path / "model", family, variant, pre)
    done = quantize(tmp_path / "model", tmp_path / "model.gguf", "f32")
    assert [line[:18] for line in done.notes] == ["the sliding window"] * (family == "mistral")
    one, two = (
        graphllm.load(tmp_path / name, device="cpu", linear="float", kv_type="f32", context=64)
        for name in ("model", "model.gguf")
    )
    logits = two.logits(IDS)
    np.testing.assert_allclose(logits, one.logits(IDS), atol=1e-5 * np.abs(logits).max())
    assert hf_models.distance(logits, hf_models.logits_of(oracle, IDS)) < 1e-5
    # Differences of llama.cpp from transformers: it has no NFC, and always puts a space before.
    ours, theirs = one.tokenizer, two.tokenizer
    differ = [t for t in EDGE_CASES if ours.encode(t, True) != theirs.encode(t, True)]
    assert all(text != text.strip(" ") or not text.isascii() for text in differ), differ
    assert len(differ) < 8
    assert ours.encode("<|im_end|>", parse_special=True) == theirs.encode(
        "<|im_end|>", parse_special=True
    )
    assert (ours.eos_id, ours.add_bos) == (theirs.eos_id, theirs.add_bos)
    assert ours.eog_ids <= theirs.eog_ids
    with graphllm.weights.gguf.GgufFile(tmp_path / "model.gguf") as file:
        assert file.architecture == architecture
        assert file.value("tokenizer.chat_template", str) == TEMPLATE
        assert file.value("tokenizer.ggml.pre", str) == (pre or "default")


def test_importance_of_a_directory_is_that_of_its_file(tmp_path):
    write(tmp_path / "model", "llama", 0)
    quantize(tmp_path / "model", tmp_path / "model.gguf", "f32")
    ids, options = IDS * 4, {"device": "cpu", "kv_type": "f32", "threads": 1}
    one, two = (
        calibrate(tmp_path / name, ids, context=14, options=options).weights()
        for name in ("model", "model.gguf")
    )
    assert one.keys() == two.keys() and len(one) % 7 == 0
    for name, values in one.items():
        np.testing.assert_allclose(values, two[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("family", "variant", "says"),
    [
        ("llama", 4, "GGUF cannot state mlp.act = 'gelu'"),
        ("llama", 7, "rope_type 'longrope' cannot be written as GGUF"),
        ("qwen2", 2, "GGUF cannot state layers.1.window = 9"),
        ("qwen3", 1, "attention_bias: llama.cpp's qwen3 has no biases"),
        ("gemma3_text", 1, "GGUF cannot state attention.scale = 0.208"),
    ],
)
def test_what_gguf_cannot_state(family, variant, says, tmp_path):
    write(tmp_path / "model", family, variant)
    with pytest.raises(ConfigError, match=says):
        quantize(tmp_path / "model", tmp_path / "model.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_directories(tmp_path):
    folder = hf_files.write(tmp_path / "model")

    def fails(says: str) -> None:
        with pytest.raises(ModelFileError, match=says):
            quantize(folder, tmp_path / "out.gguf", "q8_0")

    fails("no tokenizer, which a GGUF file needs")
    shutil.copy(hf_tokenizers.train_model("unigram"), folder / "tokenizer.model")
    fails("the tokenizer has 600 tokens, the embedding 400 rows")
    (folder / "tokenizer.model").unlink()
    add_byte_level(folder, "llama-bpe")
    fails("the tokenizer has 903 tokens, the embedding")
    write(folder, "llama", 0, "llama-bpe")
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False,
                                "trim_offsets": True}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    fails("llama.cpp has no pre-tokenizer that splits as this one")
    hf_files.write(folder, model_type="bloom")
    fails("model_type 'bloom' cannot be written as GGUF; supported are llama, mistral")
