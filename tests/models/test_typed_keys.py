"""Keys of GGUF files: types, ranges, defaults, and error messages of bounded length."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
import tiny_models
from gguf_files import finish

import graphllm
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.errors import LISTED, SHOWN, ConfigError, GraphllmError, ModelFileError, quote
from graphllm.model.config_keys import Keys

LONG = "x" * 1_000_000


def tiny(path, **keys):
    """Write a tiny llama with additional metadata, by full key names."""

    class Writer(gguf.GGUFWriter):
        def add_tokenizer_model(self, name):
            super().add_tokenizer_model(name)
            for key, value in keys.items():
                if isinstance(value, list):
                    self.add_array(key, value)
                else:
                    add = {bool: self.add_bool, int: self.add_int32, float: self.add_float32,
                           str: self.add_string}  # fmt: skip
                    add[type(value)](key, value)

    original, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        return tiny_models.write_llama(path, tiny_models.llama_weights())
    finally:
        gguf.GGUFWriter = original


def config(path):
    with GgufCheckpoint(path) as file:
        spec = file.spec()
        keys = file.keys(spec)
        found = spec.config(keys)
        keys.finish()
        return found


SCALING = "llama.rope.scaling."
WRONG = {  # key: wrong values
    f"{SCALING}type": (0, 2.5, True, ["linear"], [1, 2], "spiral"),
    f"{SCALING}factor": ("4", True, [4.0], float("nan"), -2.0),
    f"{SCALING}attn_factor": ("much", True, [1.0, 2.0], 0.0, float("nan")),
    f"{SCALING}original_context_length": ("64", 64.5, [64]),
    f"{SCALING}yarn_beta_fast": ("32", [32.0]),
    "llama.rope.scale_linear": ("4", [4.0]),
    "llama.attn_logit_softcapping": ([50.0, 30.0], ["x"], "50"),
    "llama.rope.freq_base": ("1e4", [1e4], float("inf")),
    "tokenizer.chat_template": (["a", "b"], 7, True),
    "general.name": (["a"], 7),
    "general.alignment": ("32", [32], 3.5),
    "tokenizer.ggml.bos_token_id": (-1, 2**31 - 1, 1.5, "1", [1], True),
    "tokenizer.ggml.eos_token_id": (-1, 2**31 - 1, 1.5, "2", [2], True),
    "tokenizer.ggml.eot_token_id": (-1, 1.5, [2]),
    "tokenizer.ggml.add_bos_token": (1, "true", [True]),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_the_wrong_type_is_an_error_of_one_line(tmp_path, key):
    last = key.split(".")[-1]
    for value in WRONG[key]:
        path = tiny(tmp_path / "m.gguf", **{key: value})
        with pytest.raises((ModelFileError, ConfigError)) as caught:
            _ = graphllm.load(path, device="reference").has_template
        text = str(caught.value)
        assert "\n" not in text and len(text) < 400 + len(str(path)), value
        assert last in text or (key.startswith(SCALING) and "rope.scaling" in text), text


@pytest.mark.parametrize(
    "keys, scale, attention_factor",
    [
        ({"factor": 4.0}, 0.25, 1.0),  # llama.cpp: linear, unless another type is stated
        ({"factor": 4}, 0.25, 1.0),
        ({"type": "linear", "factor": 4.0}, 0.25, 1.0),
        ({"type": "none", "factor": 4.0}, 1.0, 1.0),
        ({"factor": 0.0}, 1.0, 1.0),
        ({"factor": 4.0, "attn_factor": 1.5}, 0.25, 1.5),
        ({"type": "none", "attn_factor": 1.5}, 1.0, 1.5),
        ({"attn_factor": 0.5, "original_context_length": 64}, 1.0, 0.5),
    ],
)
def test_rope_scaling_as_in_llama_cpp(tmp_path, keys, scale, attention_factor):
    path = tiny(tmp_path / "m.gguf", **{SCALING + name: value for name, value in keys.items()})
    for layer in config(path).layers:
        assert (layer.rope.scale, layer.rope.attention_factor) == (scale, attention_factor)


def test_the_old_key_of_a_linear_factor(tmp_path):
    path = tiny(tmp_path / "m.gguf", **{"llama.rope.scale_linear": 2.0})
    assert config(path).layers[0].rope.scale == 0.5


def test_unknown_keys_are_listed_together():
    known = {"rope_theta": 1e4}
    wrong = {"rope_thetas": 1.0, "colour": "red", LONG: 1}
    keys = Keys("config.json", {**known, **wrong}, (), {})
    keys.factor("rope_theta")
    with pytest.raises(ConfigError) as caught:
        keys.finish()
    text = str(caught.value)
    assert "keys 'rope_thetas' (it reads 'rope_theta'), 'colour', 'xxx" in text
    assert len(text) < 500
    keys = Keys("config.json", {f"key{i}": 1 for i in range(100)}, (), {})
    with pytest.raises(ConfigError, match=f"'key{LISTED - 1}' and {100 - LISTED} more$"):
        keys.finish()


def test_unknown_scaling_keys_are_listed_together(tmp_path):
    keys = {"type": "longrope", "yarn_beta_fast": 1.0, "yarn_beta_slow": 2.0}
    with pytest.raises(ConfigError, match="unknown keys: 'beta_fast', 'beta_slow'"):
        config(tiny(tmp_path / "m.gguf", **{SCALING + k: v for k, v in keys.items()}))


VALUES = {
    "text": LONG, "bytes": LONG.encode(), "list": [LONG] * 1000, "object": {LONG: {LONG: LONG}},
    "nested": [[[1] * 99] * 99] * 99, "escapes": "\x1b\n" * 999, "array": np.zeros((99, 99)),
    "infinity": -math.inf, "nothing": None, "digits": 10**3000,
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_in_messages_are_bounded(value):
    text = quote(value)
    assert len(text) <= SHOWN and text.isprintable()


LONG_KEYS = (
    "general.architecture", f"{SCALING}type", "tokenizer.ggml.model", "llama." + LONG[:60_000],
    "tokenizer.ggml.eos_token_id", "llama.attention.head_count_kv",
)  # fmt: skip


@pytest.mark.parametrize("key", LONG_KEYS, ids=[key[:40] for key in LONG_KEYS])
def test_a_long_text_of_a_file_is_cut(tmp_path, key):
    writer = gguf.GGUFWriter(path := tmp_path / "m.gguf", "llama")
    own = {"tokenizer.ggml.model": "llama", "llama.block_count": 1, key: LONG + "\x1b[2J\n"}
    if key == "general.architecture":
        writer = gguf.GGUFWriter(path, own.pop(key))
    for name, value in own.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer, path)
    with pytest.raises(GraphllmError) as caught:
        graphllm.load(path)
    assert len(str(caught.value)) < 1500 + len(str(path)) and str(caught.value).isprintable()
