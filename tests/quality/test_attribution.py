"""Attribution of divergence to tensors: a tensor with 2 bits among others with 8."""

from __future__ import annotations

import json
import subprocess
import sys

import hf_files
import numpy as np
import pytest
import tiny_models

from graphllm.checkpoints.checkpoint import open_checkpoint
from graphllm.checkpoints.mixed_weights import mixed_checkpoint, quantized_checkpoint
from graphllm.errors import RequestError
from graphllm.quality.attribution import attribute

CULPRIT = "model.layers.1.mlp.down_proj.weight"
IDS = np.random.default_rng(2).integers(0, 200, 5 * 40).tolist()
OPTIONS = {"device": "cpu", "threads": 1}


WIDTH, HIDDEN, VOCAB = 256, 512, 200
SHAPES = {
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in float32, whose rows are whole blocks of the K formats."""
    shapes = {"model.norm": (WIDTH,)}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (VOCAB, WIDTH))
    shapes |= {f"model.layers.{i}.{name}": s for i in range(2) for name, s in SHAPES.items()}
    rng, weights = np.random.default_rng(0), dict[str, np.ndarray]()
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        weights[f"{name}.weight"] = values / WIDTH**0.5 if len(shape) > 1 else 1 + 0.1 * values
    return hf_files.write(
        tmp_path_factory.mktemp("attribution"), weights, vocab_size=VOCAB, hidden_size=WIDTH,
        intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip


def test_the_planted_culprit_is_first(folder):
    base = open_checkpoint(folder)
    planted = mixed_checkpoint(
        quantized_checkpoint(base, "q8_0"), quantized_checkpoint(base, "q2_k"), {CULPRIT}
    )
    seen = list[str]()
    found = attribute(
        base, planted, IDS, 40, pattern="*.layers.1.*", options=OPTIONS,
        progress=lambda done, total, name: seen.append(name),
    )  # fmt: skip
    first, *others = found.tensors
    assert (first.name, first.base_type, first.type) == (CULPRIT, "f32", "q2_k")
    assert first.kld_per_mb > 3 * max(each.kld_per_mb for each in others)
    assert first.mean_kld > 3 * first.standard_error
    assert {each.type for each in others} == {"q8_0"}
    assert sorted(each.name for each in found.tensors) == sorted(seen) and len(seen) == 7
    count = WIDTH * HIDDEN
    assert first.saved_bytes == 4 * count - 84 * count // 256
    assert found.mean_kld > first.mean_kld / 2 and found.saved_bytes > first.saved_bytes


def test_bad_input(folder):
    base = open_checkpoint(folder)
    with pytest.raises(RequestError, match="no tensor that matches 'x' has fewer bytes"):
        attribute(base, quantized_checkpoint(base, "q8_0"), IDS, 40, pattern="x", options=OPTIONS)
    with pytest.raises(RequestError, match="chunks = 0 must be at least 1"):
        attribute(base, base, IDS, 40, chunks=0, options=OPTIONS)
    with pytest.raises(RequestError, match="unknown type 'q9'"):
        attribute(base, quantized_checkpoint(base, "q9"), IDS, 40, options=OPTIONS)


def test_the_verb(folder, tmp_path):
    """A directory without a tokenizer has no text, which is an error; a file of a model has."""
    path, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    tiny_models.write_tiny(path, "llama")
    text.write_text("What is the use of a book without pictures or conversations? " * 4)
    words = ("-f", str(text), "-c", "16", "--device", "cpu", "-t", "1", "--json")
    done = call(str(path), *words, "--type", "f16", "--tensors", "*.2.mlp.*")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["tensors"]
    assert sorted(each["name"].split(".")[-2] for each in found) == [
        "down_proj", "gate_proj", "up_proj",
    ]  # fmt: skip
    assert all(each["saved_bytes"] == 2 * 60 * 52 and each["mean_kld"] < 1e-4 for each in found)
    for model, more, message in (
        (path, (), "give --type FORMAT, or --against MODEL"),
        (path, ("--against", str(folder)), "the models differ"),
        (folder, ("--type", "q8_0"), "no tokenizer"),
    ):
        done = call(str(model), *words, *more)
        assert (done.returncode, done.stdout) == (1, "")
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ") and message in last


def call(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "graphllm", "attribute", *words]
    return subprocess.run(command, capture_output=True, timeout=120, text=True)
