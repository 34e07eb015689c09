"""SmoothQuant: factors against the paper's formula on transformers' activations, and what they are
for: W8A8 of models with outliers in some channels."""

from __future__ import annotations

from pathlib import Path

import hf_models
import numpy as np
import pytest

import graphllm
from graphllm.quality.calibration import observe
from graphllm.quantize import quantize_directory, smoothing
from graphllm.quantize.smoothing import ChannelStatistics

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

CONTEXT, CHUNKS = 24, 4
IDS = [int(i) for i in np.random.default_rng(4).integers(3, 120, CHUNKS * CONTEXT)]
SIZES = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 32}
OUTLIERS = [3, 20, 50]
LAYERS = range(3)


def write(folder: Path, name: str):
    """Write a random model whose inputs of linears have outliers; returns transformers' model."""
    made = hf_models.oracle({**hf_models.config_of(hf_models.SPECS[name], 0), **SIZES}, name)
    made.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")

    def move(rows: str, columns: list[str], channels: np.ndarray, offset: float = 0.0) -> None:
        """Multiply the producer of some channels and divide the columns that read them."""
        factor = torch.ones(len(tensors[f"{rows}.weight"]))
        factor[OUTLIERS] = 60.0
        for part in ("weight", "bias"):
            if (x := tensors.get(f"{rows}.{part}")) is not None:
                by = factor[:, None] if x.ndim == 2 else factor
                tensors[f"{rows}.{part}"] = (x + offset) * by - offset
        for each in columns:
            tensors[f"{each}.weight"] = tensors[f"{each}.weight"] / factor[channels]

    gemma = name == "gemma3_text"
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    head = np.arange(192) // 32 // 3 * 32 + np.arange(192) % 32  # 6 heads share 2 of values
    for i in LAYERS:
        at = f"model.layers.{i}"
        qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        move(f"{at}.mlp.up_proj", [f"{at}.mlp.down_proj"], np.arange(160))
        move(f"{at}.self_attn.v_proj", [f"{at}.self_attn.o_proj"], head % 64)
        move(f"{at}.input_layernorm", qkv, np.arange(192), float(gemma))
        gate_up = [f"{at}.mlp.{part}_proj" for part in ("gate", "up")]
        move(f"{at}.{before_mlp}", gate_up, np.arange(192), float(gemma))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def statistics(folder: Path) -> dict[str, ChannelStatistics]:
    options = {"device": "cpu", "threads": 1, "kv_type": "f32"}
    return observe(folder, IDS, ChannelStatistics.empty, context=CONTEXT, options=options)[0]


def distance(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(have - want).sum() / np.square(want).sum())


def logits(folder: Path) -> np.ndarray:
    options = {"device": "cpu", "kv_type": "f32", "context": 32}
    return graphllm.load(folder, **options).logits(IDS[:CONTEXT])


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_outliers_of_activations_cost_less(name, tmp_path):
    """Biases, values that several heads share, and norm weights that are stored minus one."""
    plain = write(tmp_path / "plain", name)
    quantize_directory(tmp_path / "plain", tmp_path / "rough", "w8a8")
    made, inputs = tmp_path / "smooth", statistics(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", made, "w8a8", inputs=inputs)
    ids = torch.tensor([IDS[:CONTEXT]])
    want = plain(ids).logits[0].detach().numpy()
    errors = [distance(logits(folder), want) for folder in (tmp_path / "rough", made)]
    assert errors[1] < 0.02 and errors[1] < 0.1 * errors[0], errors
    oracle = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert distance(logits(made), oracle(ids).logits[0].detach().numpy()) <= 1e-3


def test_factors_are_those_of_the_paper(tmp_path, monkeypatch):
    """max|x|^a / max|w|^(1 - a) per channel, for a = 0.6, but for a common factor; over the heads
    that share a value. Norms and biases show the factors exactly."""
    monkeypatch.setattr(smoothing, "_STRENGTHS", (0.6,))
    model = write(tmp_path / "plain", "qwen2")
    attention = model.model.layers[1].self_attn
    seen: dict[str, np.ndarray] = {}
    for part in ("q_proj", "o_proj"):

        def note(module, args, part=part) -> None:
            seen[part] = np.maximum(seen.get(part, 0), args[0][0].abs().max(0).values.numpy())

        getattr(attention, part).register_forward_pre_hook(note)
    with torch.no_grad():
        for chunk in np.reshape(IDS, (CHUNKS, CONTEXT)):
            model(torch.tensor(chunk[None]))
    inputs = statistics(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "made", "w8a8", inputs=inputs)
    before, after = (
        {
            name: x.float().numpy()
            for name, x in load_file(tmp_path / f / "model.safetensors").items()
        }
        for f in ("plain", "made")
    )
    at = "model.layers.1"
    norm, bias = f"{at}.input_layernorm.weight", f"{at}.self_attn.v_proj.bias"
    found = {part: before[name] / after[name] for part, name in (("q", norm), ("o", bias))}
    weights = {part: before[f"{at}.self_attn.{part}_proj.weight"] for part in "qkvo"}
    weights["v"] = weights["v"] / found["o"][:, None]
    for part, x, w in (
        ("q", seen["q_proj"], np.concatenate([weights[each] for each in "qkv"])),
        ("o", seen["o_proj"], weights["o"]),
    ):
        w = np.abs(w).max(axis=0)
        if part == "o":
            x, w = (each.reshape(2, 3, 32).max(axis=1).reshape(-1) for each in (x, w))
        ratio = found[part] * w**0.4 / x**0.6
        np.testing.assert_allclose(ratio, np.median(ratio), rtol=1e-3)


def test_a_channel_that_is_always_zero(tmp_path):
    """No factor can be computed for it: it keeps its values."""
    write(tmp_path / "plain", "llama")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    norm, up = "model.layers.0.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"
    tensors[norm][7], tensors[up][9] = 0, 0
    save_file(tensors, path, metadata={"format": "pt"})
    inputs = statistics(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "made", "w8a8", inputs=inputs)
    after = load_file(tmp_path / "made" / "model.safetensors")
    assert after[norm][7] == 0 and (after[up][9] == 0).all()
    assert all(torch.isfinite(x.float()).all() for x in after.values())
    assert distance(logits(tmp_path / "made"), logits(tmp_path / "plain")) < 0.02
