"""`graphllm quantize` to a compressed-tensors directory: the model that quantisation on load makes,
and that transformers runs; bad input, and interrupted runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_models
import numpy as np
import pytest

import graphllm
from graphllm import GraphllmError, ModelFileError, RequestError
from graphllm.quantize import quantize, quantize_directory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 120, 12)]
SIZES = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 32}


def write(folder: Path, name: str = "llama", dtype=torch.float32, shard: str = "1GB", **keys):
    """Write a random model with the files of a tokenizer; 131 rows of the head are odd."""
    config = {**hf_models.config_of(hf_models.SPECS[name], 0), **SIZES, **keys}
    model = hf_models.oracle(config, name).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "additional_chat_templates").mkdir()
    for path in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (folder / path).write_text(path)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("weights")
    return folder


def logits(folder: Path, **options) -> np.ndarray:
    return graphllm.load(folder, device="cpu", kv_type="f32", context=32, **options).logits(IDS)


def nmse(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(have - want).sum() / np.square(want).sum())


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("llama", "w8a8", torch.float32), ("gemma3_text", "fp8", torch.bfloat16)],
)
def test_it_is_the_model_that_loading_makes_and_transformers_runs(name, kind, dtype, tmp_path):
    """Untied and tied heads, and several files of weights."""
    plain = write(tmp_path / "plain", name, dtype, shard="300KB")
    assert len(list(plain.glob("*.safetensors"))) > 2
    done = quantize_directory(plain, tmp_path / "made", kind)
    assert done.formats[kind] == 21 and not done.notes
    np.testing.assert_array_equal(logits(tmp_path / "made"), logits(plain, type=kind))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "made", dtype=torch.float32
    )
    want = oracle(torch.tensor([IDS])).logits[0].detach().numpy()
    assert nmse(logits(tmp_path / "made"), want) <= 1e-3
    stored = {str(p.relative_to(tmp_path / "made")) for p in (tmp_path / "made").rglob("*.*")}
    assert stored == {
        "config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors",
        "chat_template.jinja", "additional_chat_templates/rag.jinja",
    }  # fmt: skip
    for path in stored - {"config.json", "model.safetensors"}:
        assert (tmp_path / "made" / path).read_bytes() == (plain / path).read_bytes()


@pytest.mark.parity
def test_experts_and_rows_that_are_not_whole_blocks(tmp_path):
    """Routers and ragged matrices stay, and are listed as such."""
    plain = write(tmp_path / "plain", "mixtral", intermediate_size=48)
    done = quantize_directory(plain, tmp_path / "made", "w8a8")
    assert done.notes == [
        "3 matrices are as stored, not w8a8: their rows are not whole blocks of 32"
    ]
    before, after = (load_file(f / "model.safetensors") for f in (plain, tmp_path / "made"))
    for name, value in before.items():
        if name.endswith(("_proj.weight", "w1.weight", "w3.weight")):
            scales = after[f"{name}_scale"]
            back = after[name].float() * scales
            assert after[name].dtype == torch.int8 and scales.shape == (len(value), 1)
            assert (back - value).abs().max() <= 0.51 * scales.max()  # half a step
        else:
            assert torch.equal(after[name], value)
    ignored = json.loads((tmp_path / "made" / "config.json").read_text())
    ignored = ignored["quantization_config"]["ignore"]
    assert "model.layers.1.block_sparse_moe.gate" in ignored
    assert "model.layers.2.block_sparse_moe.experts.1.w2" in ignored
    assert len(ignored) == 1 + 3 + 3 * 5 and ignored[0] == "lm_head"
    assert nmse(logits(tmp_path / "made"), logits(plain)) < 0.02


def fails(says: str, kind: type[GraphllmError], *args, **options) -> None:
    with pytest.raises(kind, match=says):
        quantize_directory(*args, **options)


def test_bad_input(tmp_path):
    plain, out = write(tmp_path / "plain"), tmp_path / "made"
    fails(r"made.gguf: this type is written as a dir", RequestError, plain, f"{out}.gguf", "w8a8")
    fails("config.json: is no Hugging Face dir", RequestError, plain / "config.json", out, "w8a8")
    fails("plain: contains the model", RequestError, plain, plain, "fp8", force=True)
    fails(f"{tmp_path.name}: contains the", RequestError, plain, tmp_path, "fp8", force=True)
    out.mkdir()
    (out / "photo.jpg").write_text("precious")
    fails("made: exists already", RequestError, plain, out, "w8a8")
    fails("not the directory of a model, so", RequestError, plain, out, "w8a8", force=True)
    shutil.rmtree(out)
    link = tmp_path / "link"
    link.symlink_to(out)
    quantize_directory(plain, link, "fp8")
    before = (out / "model.safetensors").read_bytes()
    fails("made: exists already", RequestError, plain, out, "w8a8")
    fails("the model is quantised already", RequestError, out, tmp_path / "twice", "w8a8")
    stored = load_file(plain / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"):
        bad = {**stored, name: stored[name].clone()}
        bad[name].view(-1)[-1] = np.nan
        save_file(bad, plain / "model.safetensors", metadata={"format": "pt"})
        says = f"tensor '{name}': row .* has a value that is infinite or NaN"
        fails(says, ModelFileError, plain, out, "w8a8", force=True)
    assert (out / "model.safetensors").read_bytes() == before
    save_file(stored, plain / "model.safetensors", metadata={"format": "pt"})
    quantize_directory(plain, link, "w8a8", force=True)
    assert link.is_symlink() and (out / "model.safetensors").read_bytes() != before
    with pytest.raises(RequestError, match="unknown type 'w8a8'; known: q2_k"):
        quantize(plain, tmp_path / "a.gguf", "w8a8")
    assert {p.name for p in tmp_path.iterdir()} == {"plain", "made", "link"}


def test_linears_that_are_no_rows(tmp_path):
    """GPT-2 stores the transpose."""
    config = hf_models.config_of(hf_models.SPECS["gpt2"], 0)
    hf_models.oracle(config, "gpt2").save_pretrained(tmp_path / "plain")
    says = "no linear can be quantised: their rows are not stored as rows"
    fails(says, ModelFileError, tmp_path / "plain", tmp_path / "made", "w8a8")


def command(*words: object, **options) -> subprocess.Popen:
    words = sys.executable, "-m", "graphllm", "quantize", *map(str, words)
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            **options)  # fmt: skip


def test_an_interrupted_run_leaves_the_old_directory(tmp_path):
    wide = {"hidden_size": 1536, "intermediate_size": 3072, "vocab_size": 4096}
    plain, out = write(tmp_path / "plain", **wide), tmp_path / "made"
    start = time.monotonic()
    done = command(plain, out, "--type", "W8A8")
    printed = done.communicate()
    assert done.returncode == 0 and "21 w8a8 tensors" in printed[0], printed
    seconds = time.monotonic() - start
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    rng = np.random.default_rng(0)
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        (out / "old").touch()
        run = command(plain, out, "--type", "w8a8", "--force")
        time.sleep(seconds * rng.uniform(0.5, 0.95))
        run.send_signal(number)
        run.communicate()
        found = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        assert found in (whole, {**whole, "old": b""})  # the new directory, or the old one
        assert run.returncode or "old" not in found
        if number != signal.SIGKILL:
            assert not list(tmp_path.glob(".*.part"))
        for rest in tmp_path.glob(".*.part"):
            shutil.rmtree(rest)

    def limit() -> None:  # as a full disk: writing beyond a size fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))

    run = command(plain, out, "--type", "w8a8", "--force", preexec_fn=limit, env=os.environ)
    _, error = run.communicate()
    text = f"error: {out}/model.safetensors: File too large\n"
    assert run.returncode == 1 and error == text
    assert not list(tmp_path.glob(".*.part"))
