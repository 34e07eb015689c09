"""`graphllm validate`: correct models pass, and each of many faults is located."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace

import hf_files
import hf_models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from graphllm import models
from graphllm.cli import app
from graphllm.cli.scaffold import write_model_file
from graphllm.errors import ConfigError, ModelFileError, RequestError
from graphllm.validation import Check, Report, Run, file_checks, validate
from graphllm.validation.case import Case, ValidatedDirectory

GEMMA3 = (
    "from graphllm.models.gemma3_text import *\nfrom graphllm.models import gemma3_text as base\n"
)
GEMMA2 = "from graphllm.models.gemma2 import *\nfrom graphllm.models import gemma2 as base\n"
LLAMA = "from graphllm.models.llama import *\nfrom graphllm.models import llama as base\n"
QWEN2 = "from graphllm.models.qwen2 import *\nfrom graphllm.models import qwen2 as base\n"
MORE = """from dataclasses import replace
from graphllm import ops
from graphllm.model.decoder import Rope
"""

OTHER_BASE = """
def config(keys):
    c = base.config(keys)
    turned = [replace(e, rope=replace(e.rope, base=2e4)) if i == 1 else e
              for i, e in enumerate(c.layers)]
    return replace(c, layers=tuple(turned))
"""
NO_SCORE_CAP = """
def config(keys):
    c = base.config(keys)
    return replace(c, attention=replace(c.attention, softcap=0.0))
"""
NO_SOFTCAP = """
def config(keys):
    return replace(base.config(keys), logit_softcap=0.0)
"""
SWAPPED = """
class Model(Decoder):
    def mlp(self, x):
        hidden = self.cfg.mlp.intermediate_size
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
        q, k, v = self.qkv(x)
        k = self.norm(k, "k_norm")
        if %r:
            self.norm(q, "q_norm")  # the result is not used
        q, k = self.rope(q, i, batch), self.rope(k, i, batch)
        return self.linear(self.attend(q, k, v, i, batch), "o_proj", self.cfg.dim)
"""
TIED = """
def config(keys):
    return replace(base.config(keys), tied=%r)
"""
WIDTH = """
def config(keys):
    c = base.config(keys)
    return replace(c, attention=replace(c.attention, head_dim=12))
"""
ACTIVATION = """
def config(keys):
    c = base.config(keys)
    return replace(c, mlp=replace(c.mlp, act="gelu"))
"""

# (model, variant, code, failing check, lines that its report must contain)
FAULTS = {
    "rope base": (
        LLAMA, 0, OTHER_BASE, "layers",
        ["model.layers.1: query of model.layers.1.self_attn differs: computed by "
         "rope",
         "rope(base=20000", "1 of 5 values differ"],
    ),
    "no soft-cap": (
        GEMMA3, 1, NO_SOFTCAP, "layers",
        ["logits: result of logits differs", "an op after them is missing"],
    ),
    "no soft-cap of scores": (
        GEMMA2, 0, NO_SCORE_CAP, "layers",
        ["model.layers.0: ", "model.layers.0.self_attn", "computed by attention",
         "softcap = 0; oracle: 0.7"],
    ),
    "gate and up": (
        LLAMA, 0, SWAPPED, "layers",
        ["model.layers.0: input of model.layers.0.mlp.down_proj differs: computed by silu at FILE, "
         "mul at FILE"],
    ),
    "eps": (
        LLAMA, 0, EPS, "layers",
        ["model.layers.0: output of model.layers.0.input_layernorm differs: computed by rms_norm",
         "eps = 1e-06; oracle: 1e-05"],
    ),
    "window": (
        GEMMA3, 0, WINDOW, "layers",
        ["model.layers.0: ", "model.layers.0.self_attn", "computed by attention",
         "window = 8; oracle: 7", "2 of 5 values differ"],
    ),
    "scale": (
        GEMMA3, 1, SCALE, "layers",
        ["model.layers.0: ", "model.layers.0.self_attn", "computed by attention",
         "scale = 0.316228; oracle: 0.208514"],
    ),
    "head grouping": (
        LLAMA, 0, GROUPING, "layers",
        ["model.layers.0: query of model.layers.0.self_attn differs: computed by "
         "contiguous at FILE"],
    ),
    "no q-norm": (
        GEMMA3, 0, NO_Q_NORM % False, "weights",
        ["does not use model.layers.0.self_attn.q_norm.weight and 2 more"],
    ),
    "q-norm forgotten": (
        GEMMA3, 0, NO_Q_NORM % True, "layers",
        ["model.layers.0: query of model.layers.0.self_attn differs: computed by "
         "rope",
         "modules only in the oracle: model.layers.0.self_attn.q_norm (Gemma3RMSNorm)"],
    ),
    "tied": (
        QWEN2, 0, TIED % True, "weights",
        ["'lm_head.weight' differs from 'model.embed_tokens.weight'"],
    ),
    "not tied": (QWEN2, 1, TIED % False, "weights", ["missing tensor 'lm_head.weight'"]),
    "width of heads": (
        LLAMA, 0, WIDTH, "weights",
        ["tensor 'model.layers.0.self_attn.q_proj.weight' is (60, 60), the model expects (72, 60)"],
    ),
    "activation": (
        GEMMA3, 0, ACTIVATION, "layers",
        ["model.layers.0: input of model.layers.0.mlp.down_proj differs: computed by gelu",
         "gelu(kind=erf)", "model.layers.0.mlp.act_fn (GELUTanh)"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of a model's variant, written once."""
    made: dict[tuple[str, int], object] = {}

    def of(name: str, variant: int):
        if (name, variant) not in made:
            made[name, variant] = tmp_path_factory.mktemp(name)
            hf_models.write(made[name, variant], hf_models.SPECS[name], variant)
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
def test_weights_that_are_no_numbers(directory, tmp_path):
    """NaN in both models does not count as agreement."""
    folder = tmp_path / "model"
    shutil.copytree(directory("llama", 0), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(weights, folder / "model.safetensors")
    run, failed = validate(folder, device="reference").first
    assert failed.name == "layers" and failed.summary.startswith("model.layers.1: transformers")
    assert "NaN or infinity" in failed.summary
    assert {c.status for c in run.checks[4:]} == {"skipped"}


@pytest.mark.parity
@pytest.mark.parametrize("name", [f.name for f in models.specs() if f.is_decoder])
def test_a_random_model_of_each_family_passes(name):
    """The first configuration of TINY; test_builtin_models.py tests all."""
    spec = hf_models.SPECS[name]
    first = replace(spec, tiny=spec.tiny[:1])
    found = validate(model_def=first, tiny=True, device="cpu")
    assert found.first is None, found.table()
    for run in found.runs:
        skipped = {c.name for c in run.checks if c.status == "skipped"}
        compared = set() if run.oracle else {"layers", "logits", "greedy", "perplexity"}
        assert skipped == {"tokenizer", *compared}
        assert bool(run.oracle) == (not name.startswith("chatglm"))


# -------------------------------------------------------------------------------- other oracles

GATED = """
from graphllm.models.llama import *
from graphllm import ops
from graphllm.graph.tensor import scope

TINY = ({**TINY[0], "num_hidden_layers": 2},)


class Model(Decoder):
    def layer(self, x, i, batch):
        h = self.norm(x, "input_layernorm")
        with scope("self_attn"):
            a = self.attn(h, i, batch)
        before = self.norm(x, "post_attention_layernorm")
        with scope("mlp"):
            m = self.mlp(before)
        with scope("residual_gate"):
            gate = ops.sigmoid(self.linear(h, "proj", self.cfg.dim))
        return ops.add(x, ops.mul(gate, ops.add(a, m)))
"""


@pytest.mark.parity  # transformers is asked whether it has the model
def test_without_an_oracle_a_model_is_held_against_itself(tmp_path):
    path = tmp_path / "gated.py"
    path.write_text(GATED)
    found = validate(path, tiny=True, device="cpu")
    (run,) = found.runs
    assert (found.first, run.oracle) == (None, "")
    assert run.verdict.startswith("passed, but only against itself")
    status = {c.name: c.status for c in run.checks}
    assert {n for n, s in status.items() if s == "passed"} == {
        "config", "weights", "steps", "fusion", "backends",
    }  # fmt: skip
    assert {c.summary for c in run.checks if c.name in ("layers", "logits", "perplexity")} == {
        "no oracle to compare with"
    }


def numpy_gated(fault: str = "") -> str:
    """Return the source of a NumPy oracle of the gated model."""
    return f"""
import numpy as np

def norm(x, w, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w

def turn(x, base):
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half)
    cos, sin, a, b = np.cos(angle)[:, None], np.sin(angle)[:, None], x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

def oracle(config, weights, ids):
    c, found = config, {{}}
    heads, kv, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    eps, n = c["rms_norm_eps"], len(ids)
    x = weights["model.embed_tokens.weight"][ids].astype(float)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{{i}}."
        linear = lambda x, name: x @ weights[f"{{at}}{{name}}.weight"].T
        h = norm(x, weights[at + "input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"self_attn.{{p}}_proj").reshape(n, -1, width) for p in "qkv")
        q, k = turn(q, 1e4), turn(k, 1e4)
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        s = np.einsum("thd,shd->hts", q, k) * width**-0.5
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        a = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        a = linear(a, "self_attn.o_proj")
        m = norm(x, weights[at + "post_attention_layernorm.weight"], eps)
        g, u = linear(m, "mlp.gate_proj"), linear(m, "mlp.up_proj")
        m = linear(g / (1 + np.exp(-g)) * u, "mlp.down_proj")
        gate = 1 / (1 + np.exp(-linear({"x" if fault else "h"}, "residual_gate.proj")))
        x = x + gate * (a + m)
        found[at[:-1]], found[at + "mlp"], found[at + "self_attn"] = x, m, a
        found[at + "residual_gate"] = gate
    head = weights["lm_head.weight"]
    return {{"logits": norm(x, weights["model.norm.weight"], eps) @ head.T, **found}}
"""


def test_a_function_in_numpy_is_an_oracle(tmp_path):
    """Its values by scope locate the divergence."""
    path, other = tmp_path / "gated.py", tmp_path / "wrong.py"
    path.write_text(GATED + numpy_gated())
    shown: list[tuple] = []
    found = validate(path, tiny=True, device="cpu", progress=lambda *each: shown.append(each))
    assert found.first is None, found.table()
    assert [at for at in shown if at[0] == "checks"] == [("checks", n, 10) for n in (0, *range(10))]
    assert found.runs[0].oracle == "oracle() of gated.py" and found.runs[0].verdict == "passed"
    assert [c.status for c in found.runs[0].checks].count("passed") == 9
    other.write_text(numpy_gated("wrong"))
    run, check = validate(path, tiny=True, oracle=other, device="reference").first
    assert (run.oracle, check.name) == ("oracle() of wrong.py", "layers")
    assert check.summary.startswith(
        "model.layers.0: output of model.layers.0.residual_gate differs: computed by linear at "
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'x': 1}", "no 'logits'"),
        ("np.zeros(3)", "returned logits [3], expected [80, vocabulary]"),
        ("np.zeros((len(ids), 5))", "returned logits [80, 5], expected [80, 131]"),
    ],
)
def test_what_an_oracle_may_not_return(returned, message, tmp_path):
    path = tmp_path / "gated.py"
    path.write_text(f"{GATED}\nimport numpy as np\ndef oracle(c, w, ids): return {returned}\n")
    _, check = validate(path, tiny=True, device="reference").first
    assert message in check.summary or message.replace("80", "64") in check.summary


FIRST = """
from graphllm.model.decoder import Decoder
from graphllm.models import llama

TINY = ({{"model_type": "llama", **llama.TINY[0], "{key}": 52}},)

def config(keys):
    {config}

class Model(Decoder):
    def mlp(self, x):
        return self.linear(x, "gate_proj", 7)
"""


@pytest.mark.parity
@pytest.mark.parametrize(
    ("key", "config", "message"),
    [
        ("intermediate_size", "llama.config(keys)",
         "returned NoneType, not a DecoderConfig or an EncoderConfig"),
        ("intermediate_sise", "return llama.config(keys)",
         "first.py: TINY: the model does not know the key 'intermediate_sise' (it reads "
         "'intermediate_size')"),
        ("intermediate_size", "return llama.config(keys)",
         "tensor 'model.layers.0.mlp.gate_proj.weight' is (52, 60), the model expects (7, 60) "
         "({}/first.py:12)"),
    ],
)  # fmt: skip
def test_what_a_first_model_file_gets_wrong(key, config, message, tmp_path):
    path = tmp_path / "first.py"
    path.write_text(FIRST.format(key=key, config=config))
    _, check = validate(path, tiny=True, device="reference").first
    assert check.summary.endswith(message.format(tmp_path))


@pytest.mark.parametrize("tiny", ["5", "({'hidden_size': 60})", "('llama',)"])
def test_a_tiny_that_is_no_tuple_of_configurations(tiny, tmp_path):
    path = tmp_path / "first.py"
    path.write_text(f"from graphllm.models.llama import Decoder as Model, config\nTINY = {tiny}\n")
    with pytest.raises(ModelFileError, match="TINY is not a tuple of dicts"):
        models.spec_of_file(path)


# --------------------------------------------------------------------------------- the command line


def asked(*words: object):
    return CliRunner().invoke(app, ["validate", *map(str, words)])


@pytest.mark.parity
def test_what_it_prints_and_writes(directory, tmp_path):
    folder = directory("llama", 0)
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    done = asked(folder, "--device", "reference", "-o", page, "-o", data)
    assert done.exit_code == 0 and done.output.endswith("\npassed\n"), done.output
    assert "  layers      passed  5 values, NMSE at most" in done.output
    found = json.loads(data.read_text())
    assert (found["schema"], found["version"]) == ("graphllm.validation", 1)
    assert (found["passed"], found["failed"]) == (True, None)
    (one,) = found["runs"]
    assert [c["name"] for c in one["checks"]] == [
        "tokenizer", "config", "weights", "layers", "logits", "greedy", "perplexity", "steps",
        "fusion", "backends",
    ]  # fmt: skip
    rows = {row["value"]: row["alone"] for row in one["checks"][3]["rows"]}
    assert len(rows) == 5 and 0 < max(rows.values()) < 1e-9
    text = page.read_text()
    assert "<script" not in text and "http" not in re.sub("http-equiv", "", text)
    for check in one["checks"]:
        assert html.escape(check["summary"]) in text


@pytest.mark.parity
def test_what_transformers_cannot_load_either(directory, tmp_path):
    """graphllm's error is clearer than transformers'."""
    folder = tmp_path / "spiral"
    shutil.copytree(directory("llama", 0), folder)
    config = json.loads((folder / "config.json").read_text())
    stated = {**config, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}
    stated.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="rope_type 'spiral' is not supported, only default"):
        validate(folder)


@pytest.mark.parity
def test_a_failure_is_an_exit_code_and_a_last_line(directory, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LLAMA + MORE + EPS)
    page = tmp_path / "r.html"
    ask = (directory("llama", 0), "--model-def", path, "--device", "reference")
    done = asked(*ask, "--tokens", 20, "-n", 4, "-o", page)
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith(
        "failed: layers: model.layers.0: output of model"
    )
    assert "<details open>" in page.read_text()
    told = asked(*ask, "--json")
    assert told.exit_code == 1 and json.loads(told.output)["failed"] == "layers"


def test_what_is_no_number_is_a_name_in_json():
    row = {"alone": float("nan"), "max": float("inf"), "n": 1.5}
    run = Run("x", "", "cpu", (Check("layers", "failed", "no", (), (row,)),))
    data = Report("x", (run,)).as_dict()
    assert data["runs"][0]["checks"][0]["rows"] == [{"alone": "nan", "max": "inf", "n": 1.5}]
    assert json.loads(json.dumps(data, allow_nan=False))["failed"] == "layers"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "pass a Hugging Face directory, or --tiny"),
        (["nowhere"], "nowhere: no such file"),
        ([__file__], "not a Hugging Face directory; use --tiny for a model file"),
        (["--tiny"], "--tiny needs either a model type or a model file"),
        (
            ["llama", "--tiny", "--model-def", "x.py"],
            "--tiny needs either a model type or a model file",
        ),
        (["lama", "--tiny"], "unknown model_type 'lama'; nearest: llama"),
        (["llama", "--tiny", "--tokens", "1"], "tokens = 1 must be at least 2"),
        (["llama", "--tiny", "--oracle", __file__], "defines neither oracle(config, weights, ids)"),
        (["llama", "--tiny", "-o", "x.txt"], "-o x.txt: the name must end in .html or .json"),
    ],
)
def test_what_it_refuses(words, message):
    done = asked(*words)
    assert done.exit_code == 1 and message in str(done.exception)


def test_without_transformers_a_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("graphllm.validation.hf_oracle.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"torch is not installed: pip install 'graphllm\[par"):
        validate("llama", tiny=True)


def test_an_unknown_key_may_be_null(tmp_path):
    path = hf_files.write(tmp_path / "model", wonder=None, use_cache=True)
    file = ValidatedDirectory(path, None)
    case = Case("", file, file.spec(), "cpu", None, tokens=1, new=1, progress=lambda *_: None)
    check = file_checks.config(case)
    assert check.status == "passed"
    assert {"ignored: wonder (null)", "ignored: use_cache (the cache is always used)"} < set(
        check.lines
    )


@pytest.mark.parity
def test_a_wrong_tokenizer_is_named_and_the_rest_is_checked(directory, tmp_path):
    """transformers reads a file other than the one that the index names."""
    import hf_tokenizers

    folder = tmp_path / "model"
    shutil.copytree(directory("llama", 0), folder)
    hf_tokenizers.KINDS["llama2"](tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "text" / name, folder)
    good = validate(folder, device="reference", tokens=16, new=2)
    assert good.runs[0].checks[0].status == "passed", good.table()
    (folder / "tokenizer.json").write_text("{}")
    bad = validate(folder, device="reference", tokens=16, new=2)
    assert bad.first[1].name == "tokenizer"
    assert [c.status for c in bad.runs[0].checks[1:9]] == ["passed"] * 8


# ---------------------------------------------------------------------------------------- scaffold


@pytest.mark.parametrize("like", [f.name for f in models.specs() if f.is_decoder])
def test_a_scaffold_of_each_model_is_that_model(like, tmp_path):
    path, there = write_model_file("mine", like, folder=tmp_path)
    own, spec = models.spec_of_file(path), hf_models.SPECS[like]
    assert not there and own.model.__name__ == "Model"
    kinds = {variant.get("model_type") for variant in own.tiny}
    assert own.tiny[0]["model_type"] == like and kinds <= {like, None}
    bare = [{k: v for k, v in variant.items() if k != "model_type"} for variant in own.tiny]
    assert bare == [dict(variant) for variant in spec.tiny]
    assert "model_type selects the class of transformers" in path.read_text()
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@pytest.mark.parity
def test_a_scaffold_validates_at_once(tmp_path):
    path, _ = write_model_file("mine", "glm4", folder=tmp_path)
    found = validate(path, tiny=True, device="reference")
    assert found.first is None and {run.verdict for run in found.runs} == {"passed"}
    assert "Glm4ForCausalLM" in found.runs[0].oracle


def test_a_scaffold_overwrites_nothing_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = CliRunner().invoke(app, ["new", "mine"])
    assert new.output == (
        "mine.py: written as a copy of llama\n"
        "try it: graphllm validate --tiny --model-def mine.py\n"
    )
    (tmp_path / "mine.py").write_text("x")
    done = CliRunner().invoke(app, ["new", "mine"])
    assert done.exit_code == 1 and (tmp_path / "mine.py").read_text() == "x"
    assert "mine.py: already exists; --force overwrites it" in str(done.exception)
    done = CliRunner().invoke(app, ["new", "mine", "--force"])
    assert "mine.py: overwritten" in done.output and len((tmp_path / "mine.py").read_text()) > 99
    for words, message in (
        (["my-model"], "cannot be a model file's name"),
        (["class"], "cannot be a model file's name"),
        (["qwen2"], "is a built-in model"),
        (["mine2", "--like", "lama"], "--like lama: no such family; known: "),
    ):
        done = CliRunner().invoke(app, ["new", *words])
        assert done.exit_code == 1 and message in str(done.exception)
