"""`graphllm validate`: right models pass, and each of many faults is named where it is."""

from __future__ import annotations

import hf_models
import pytest

from graphllm import models
from graphllm.validation import Report, validate

GEMMA3 = (
    "from graphllm.models.gemma3_text import *\nfrom graphllm.models import gemma3_text as base\n"
)
LLAMA = "from graphllm.models.llama import *\nfrom graphllm.models import llama as base\n"
QWEN2 = "from graphllm.models.qwen2 import *\nfrom graphllm.models import qwen2 as base\n"
MORE = (
    "from dataclasses import replace\nfrom graphllm import ops\nfrom graphllm.decoder import Rope\n"
)

OTHER_BASE = """
def config(keys):
    c = base.config(keys)
    turned = [replace(e, rope=replace(e.rope, base=2e4)) if i == 1 else e
              for i, e in enumerate(c.layers)]
    return replace(c, layers=tuple(turned))
"""
NO_SOFTCAP = """
def config(keys):
    return replace(base.config(keys), logit_softcap=0.0)
"""
SWAPPED = """
class Model(Decoder):
    def mlp(self, x):
        hidden = self.cfg.mlp.hidden
        gate, up = self.linear(x, "gate_proj", hidden), self.linear(x, "up_proj", hidden)
        h = ops.mul(ops.silu(up), gate)  # the fault
        return self.linear(h, "down_proj", self.cfg.dim)
"""
EPS = """
def config(keys):
    c = base.config(keys)
    return replace(c, norm=replace(c.norm, eps=c.norm.eps / 10))
"""
WINDOW = """
def config(keys):
    c = base.config(keys)
    return replace(c, layers=tuple(replace(e, window=e.window and e.window + 1) for e in c.layers))
"""
SCALE = """
def config(keys):
    c = base.config(keys)
    return replace(c, attention=replace(c.attention, scale=c.attention.head_dim**-0.5))
"""
GROUPING = """
class Model(Decoder):
    def attend(self, q, k, v, i, batch, scale=0.0):
        c, rows = self.cfg.attention, q.shape[0]
        apart = q.reshape(rows, c.heads // c.kv_heads, c.kv_heads, c.head_dim)
        q = apart.permute(0, 2, 1, 3).reshape(rows, c.heads, c.head_dim)  # the fault
        return super().attend(q, k, v, i, batch, scale)
"""
NO_Q_NORM = """
class Model(Decoder):
    def attn(self, x, i, batch):
        c = self.cfg.attention
        q, k, v = self.qkv(x)
        q, k, v = q.heads(c.heads), self.norm(k.heads(c.kv_heads), "k_norm"), v.heads(c.kv_heads)
        if %r:
            self.norm(q, "q_norm")  # and forgotten
        q, k = self.rope(q, i, batch), self.rope(k, i, batch)
        return self.linear(self.attend(q, k, v, i, batch), "o_proj", self.cfg.dim)
"""
TIED = """
def config(keys):
    return replace(base.config(keys), tied=%r)
"""
ACTIVATION = """
def config(keys):
    c = base.config(keys)
    return replace(c, mlp=replace(c.mlp, act="gelu"))
"""

# (family, variant, code; the check that fails, and what it must say, line by line).
FAULTS = {
    "rope base": (
        LLAMA, 0, OTHER_BASE, "layers",
        ["model.layers.1: the query that model.layers.1.self_attn attends with differs: made by rope",
         "rope(base=20000", "1 of 5 values differ"],
    ),
    "no soft-cap": (
        GEMMA3, 1, NO_SOFTCAP, "layers",
        ["logits: the result of logits differs", "something is not done after"],
    ),
    "gate and up": (
        LLAMA, 0, SWAPPED, "layers",
        ["model.layers.0: what model.layers.0.mlp.down_proj reads differs: made by silu at FILE, "
         "mul at FILE"],
    ),
    "eps": (
        LLAMA, 0, EPS, "layers",
        ["model.layers.0: what model.layers.0.input_layernorm returns differs: made by rms_norm",
         "eps = 1e-06; the oracle's is 1e-05"],
    ),
    "window": (
        GEMMA3, 0, WINDOW, "layers",
        ["model.layers.0: what model.layers.0.self_attn", "made by attention",
         "window = 8; the oracle's is 7", "2 of 5 values differ"],
    ),
    "scale": (
        GEMMA3, 1, SCALE, "layers",
        ["model.layers.0: what model.layers.0.self_attn", "made by attention",
         "scale = 0.316228; the oracle's is 0.208514"],
    ),
    "head grouping": (
        LLAMA, 0, GROUPING, "layers",
        ["model.layers.0: the query that model.layers.0.self_attn attends with differs: made by "
         "contiguous at FILE"],
    ),
    "no q-norm": (
        GEMMA3, 0, NO_Q_NORM % False, "weights",
        ["does not use model.layers.0.self_attn.q_norm.weight and 2 more"],
    ),
    "q-norm forgotten": (
        GEMMA3, 0, NO_Q_NORM % True, "layers",
        ["model.layers.0: the query that model.layers.0.self_attn attends with differs: made by rope",
         "modules of the oracle alone: model.layers.0.self_attn.q_norm (Gemma3RMSNorm)"],
    ),
    "tied": (
        QWEN2, 0, TIED % True, "weights",
        ["'lm_head.weight' is stored, and is not 'model.embed_tokens.weight'"],
    ),
    "not tied": (QWEN2, 1, TIED % False, "weights", ["missing tensor 'lm_head.weight'"]),
    "activation": (
        GEMMA3, 0, ACTIVATION, "layers",
        ["model.layers.0: what model.layers.0.mlp.down_proj reads differs: made by gelu",
         "gelu(kind=erf)", "model.layers.0.mlp.act_fn (GELUTanh)"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a family's variant, made once."""
    made: dict[tuple[str, int], object] = {}

    def of(name: str, variant: int):
        if (name, variant) not in made:
            made[name, variant] = tmp_path_factory.mktemp(name)
            hf_models.write(made[name, variant], hf_models.FAMILIES[name], variant)
        return made[name, variant]

    return of


@pytest.mark.parity
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault, directory, tmp_path):
    head, variant, code, check, words = FAULTS[fault]
    path = tmp_path / "mine.py"
    path.write_text(head + MORE + code)
    found = validate(
        directory(head.split()[1].rpartition(".")[2], variant), model_def=path, device="reference"
    )
    run, failed = found.first
    print(found.table(verbose=True))
    assert failed.name == check
    text = "\n".join([failed.summary, *failed.lines])
    lines = path.read_text().splitlines()
    at = next((i for i, line in enumerate(lines, 1) if "# the fault" in line), 0)
    for each in words:
        assert each.replace("FILE", f"{path}:{at}") in text
    assert run.verdict.startswith(f"failed: {check}: ")


@pytest.mark.parity
@pytest.mark.parametrize("name", [f.name for f in models.families()])
def test_random_models_of_a_family_pass(name):
    found = validate(name, tiny=True, device="cpu")
    assert found.first is None, found.table()
    assert [c.status for c in found.runs[0].checks] == ["skipped"] + ["passed"] * 9
