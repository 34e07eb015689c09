"""`graphllm validate --oracle` with a torch module: a divergence is located by module path."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from graphllm.errors import RequestError
from graphllm.validation import hf_oracle, validate

pytestmark = pytest.mark.parity

CONFIG = {
    "model_type": "halves", "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
    "auto_map": {"AutoModelForCausalLM": "modeling_halves.Halves"},
}  # fmt: skip

MODEL = """
from dataclasses import replace
from graphllm import ops
from graphllm.model.decoder import Decoder
from graphllm.graph.tensor import scope
from graphllm.model.config_keys import base_config

def config(keys):
    return replace(base_config(keys), tied=False)

class Model(Decoder):
    def layer(self, x, i, batch):
        h = self.norm(x, "input_layernorm")
        with scope("self_attn"):
            a = self.attn(h, i, batch)
        with scope("mlp"):
            m = self.mlp(h)
        with scope("gate"):
            gate = ops.{gate}(self.linear(h, "proj", self.cfg.dim))  # the gate
        return ops.add(x, ops.mul(gate, ops.add(a, m)))
"""

# The modeling code imports a helper module next to the oracle's file.
MODELING = """
import torch
from torch import nn
from torch.nn import functional as F

class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(c["hidden_size"]))
        self.eps = c["rms_norm_eps"]

    def forward(self, x):
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + self.eps) * self.weight

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width, wide = c["head_dim"], c["num_attention_heads"] * c["head_dim"]
        few = c["num_key_value_heads"] * c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], wide, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], few, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], few, bias=False)
        self.o_proj = nn.Linear(wide, c["hidden_size"], bias=False)

    def rotated(self, x):
        half = self.width // 2
        angle = torch.arange(x.shape[2])[:, None] * 1e4 ** (-torch.arange(half) / half)
        a, b, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (p(x).view(n, t, -1, self.width).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (e.repeat_interleave(q.shape[1] // k.shape[1], 1) for e in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).reshape(n, t, -1))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        wide = c["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(c["hidden_size"], wide, bias=False) for _ in "gu")
        self.down_proj = nn.Linear(wide, c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

class Gate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c["hidden_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return torch.sigmoid(self.proj(x))

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(c), Attention(c)
        self.mlp, self.gate = MLP(c), Gate(c)

    def forward(self, x):
        h = self.input_layernorm(x)
        return x + self.gate(h) * (self.self_attn(h) + self.mlp(h))

class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

class Halves(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model, self.lm_head = Body(c), nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids):
        return {returned}
"""

FUNCTION = """
def oracle(config, weights, ids):
    import torch
    from modeling_halves import Halves  # a late import
    module = Halves(config)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return module
"""

INSTANCE = """
import json, pathlib
from modeling_halves import Halves
from safetensors.torch import load_file

here = pathlib.Path(__file__).parent
oracle = Halves(json.loads((here / "config.json").read_text()))
oracle.load_state_dict(load_file(here / "model.safetensors"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a directory with modeling code and a model file. It is not on this process's path."""
    monkeypatch.delitem(sys.modules, "modeling_halves", raising=False)
    write(tmp_path)
    import torch

    scope: dict = {}
    exec(MODELING.replace("{returned}", "None"), scope)
    torch.manual_seed(0)
    config = {k: v for k, v in CONFIG.items() if k != "auto_map"}
    state = scope["Halves"](config).state_dict()
    save_file({k: v.numpy() for k, v in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = list(sys.path)
    yield tmp_path
    assert sys.path == path
    sys.modules.pop("modeling_halves", None)


def write(
    folder: Path, oracle: str = FUNCTION, returned: str = "self.lm_head(self.model(ids))"
) -> None:
    (folder / "modeling_halves.py").write_text(MODELING.replace("{returned}", returned))
    (folder / "mine.py").write_text(MODEL.replace("{gate}", "sigmoid"))
    (folder / "theirs.py").write_text(oracle)


def validated(folder: Path):
    return validate(
        folder, model_def=folder / "mine.py", oracle=folder / "theirs.py", device="reference",
        tokens=16, new=4,
    )  # fmt: skip


@pytest.mark.parametrize("oracle, name", [
    (FUNCTION, "oracle() of theirs.py"), (INSTANCE, "the module Halves"),
])  # fmt: skip
@pytest.mark.parametrize("returned", [
    "self.lm_head(self.model(ids))", '{"logits": self.lm_head(self.model(ids))}',
    "(self.lm_head(self.model(ids)), None)",
])  # fmt: skip
def test_a_module_is_an_oracle(folder, oracle, name, returned):
    write(folder, oracle, returned)
    found = validated(folder)
    assert found.first is None, found.table()
    assert (found.runs[0].oracle, found.runs[0].verdict) == (name, "passed")
    assert next(c for c in found.runs[0].checks if c.name == "layers").status == "passed"


def test_a_divergence_is_located_to_a_module(folder):
    (folder / "mine.py").write_text(MODEL.replace("{gate}", "silu"))
    _, check = validated(folder).first
    at = next(i for i, line in enumerate(MODEL.splitlines(), 1) if "# the gate" in line)
    assert check.name == "layers" and check.summary == (
        "model.layers.0: output of model.layers.0.gate differs: computed by silu at "
        f"{folder / 'mine.py'}:{at}"
    )


@pytest.mark.parametrize("returned, message", [
    ("None", r"oracle\(\) of theirs.py returned no floats, expected \[1, \d+, vocabulary\]"),
    ("self.model(ids)[:, :3]", r"returned \[1, 3, 60\], expected \[1, \d+, vocabulary\]"),
    ("self.model(ids)", r"returned logits \[\d+, 60\], expected \[\d+, 131\]"),
])  # fmt: skip
def test_what_a_module_may_not_return(folder, returned, message):
    write(folder, returned=returned)
    _, check = validated(folder).first
    assert re.search(message, check.summary), check.summary


def test_a_directory_with_code_of_its_own(folder, monkeypatch):
    """The code is not run, and the report tells how to compare with it."""
    hint = "modeling_halves.py (auto_map) is not run: an --oracle FILE may import it and return"
    found = validate(folder, model_def=folder / "mine.py", device="reference", tokens=8, new=2)
    assert found.first is None and found.runs[0].verdict.endswith("; pass one with --oracle FILE")
    layers = next(c for c in found.runs[0].checks if c.name == "layers")
    assert hint in layers.summary
    monkeypatch.setattr(hf_oracle, "has_model", lambda kind, spec: True)
    with pytest.raises(
        RequestError, match=r"transformers cannot load .* an --oracle FILE may import"
    ):
        validate(folder, model_def=folder / "mine.py", device="reference")
