"""Profiles, plans, traces, diffs and validation of encoders and encoder-decoders."""

from __future__ import annotations

import json

import hf_models
import numpy as np
import pytest
from encoder_models import write_encoder
from faulty_kernels import inject_fault
from test_encoder_decoders import load, write
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.errors import RequestError
from graphllm.profiler.html import render_page
from graphllm.validation import validate

pytestmark = pytest.mark.parity
TEXTS = [[5, 9, 17, 30], [7], [8] * 19]  # token ids
SOURCE, TARGET = [5, 9, 17, 1], [0, 4, 5]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    write_encoder(folder, hf_models.SPECS["bert"], 0, "MaskedLM")
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    write(folder, "t5")
    return folder


def run(*words: object):
    return CliRunner().invoke(app, [*map(str, words)])


def flops(phase, *ops: str) -> float:
    """FLOPs of the ops with these names in one pass."""
    rows = [row for row in phase.rows if row.op in ops or set(row.parts) & set(ops)]
    return sum(row.flops for row in rows) / len(phase.passes)


def test_a_profile_of_an_encoder_counts_real_tokens(bert):
    """60 wide, 52 in the MLP, 3 layers; the head computes a row of 131 logits for each text."""
    with graphllm.load(bert, device="cpu") as model:
        found = model.profile(TEXTS, 2)
        (phase,) = found.phases
        tokens, pairs = sum(map(len, TEXTS)), sum(len(ids) ** 2 for ids in TEXTS)
        assert (phase.name, phase.tokens) == ("encode", tokens)
        assert flops(phase, "packed_attention") == 3 * 4 * 60 * pairs
        encoder = 3 * (4 * 60 * 60 + 2 * 60 * 52)
        head = 60 * 60 + 60 * 131
        linears = flops(phase, "linear", "linears")
        assert linears == pytest.approx(2 * (tokens * encoder + len(TEXTS) * head), rel=0.02)
        assert phase.accounting.attributed > 0.99
        assert "encode" in render_page(found.as_dict()) and found.as_dict()["requests"] == []
        assert model.profile(["the cat", ""], 1).phases[0].tokens == 6 + 2  # [CLS] and [SEP]
        for wrong, text in (([[131]], "token id 131"), ([[]], "no tokens")):
            with pytest.raises(RequestError, match=text):
                model.profile(wrong)
        with pytest.raises(RequestError, match="ramps = True needs a GPU of CUDA"):
            model.profile(TEXTS, 1, ramps=True)


@pytest.mark.parametrize("load", [[], ["--load", "rate=1,prompt=2,output=1", "--url", "http://a"]])
def test_bench_refuses_encoders(bert, load):
    done = run("bench", bert, *load)
    assert isinstance(done.exception, RequestError)
    assert str(done.exception).startswith(f"{bert}: bert is an encoder, which has no prefill")


def test_a_profile_of_an_encoder_decoder_counts_pairs_by_kind(t5):
    """66 wide heads; a target attends to itself without its source, and to the source."""
    decode, prompts = 3, [SOURCE, SOURCE + SOURCE]
    with load(t5) as llm:
        found = llm.profile(prompts, decode, 2)
        layers, width = len(llm.decoder.cfg.layers), llm.decoder.cfg.attention.heads
        width *= llm.decoder.cfg.attention.head_dim
    prefill, phase = found.phases
    lengths = [len(ids) for ids in prompts]
    assert prefill.tokens == sum(lengths) + len(prompts)  # each target has its start token
    assert flops(prefill, "packed_attention") == 2 * 4 * width * sum(n * n for n in lengths)
    own = sum(1 + step for step in range(1, decode + 1)) * len(prompts)
    assert flops(phase, "attention") == layers * 4 * width * (own + decode * sum(lengths))
    assert [cost.tokens // 2 for cost in found.requests] == [n + 1 + decode for n in lengths]
    total = sum(cost.flops for cost in found.requests) / 2
    assert total == pytest.approx(sum(r.flops for p in found.phases for r in p.rows) / 2)


def test_traces_agree_with_the_reference(bert, t5):
    """Of all scopes, and of a decoder behind a source whose encoding is replaced."""
    found = []
    for device in ("cpu", "reference"):
        with graphllm.load(bert, device=device) as model:
            found.append(model.trace([5, 9, 17, 30], "*"))
            hidden = model.engine.hidden([[5, 9, 17, 30]])[0]
            assert np.array_equal(model.trace([5, 9, 17, 30], "bert")["bert"], hidden)
    assert list(found[0]) == list(found[1])
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], rtol=1e-4, atol=1e-5)
    last, zero = "encoder.final_layer_norm", {"encoder.final_layer_norm": np.zeros_like}
    for device in ("cpu", "reference"):
        with load(t5, device=device) as llm:
            plain = llm.trace(SOURCE, [last, "lm_head"], target=TARGET)
            assert [len(value) for value in plain.values()] == [len(SOURCE), len(TARGET)]
            assert np.array_equal(plain["lm_head"], llm.logits(SOURCE, target=TARGET))
            patched = llm.trace(SOURCE, "lm_head", zero, target=TARGET)["lm_head"]
            # Zeros in all rows are the same source, whatever its tokens are.
            other = llm.trace([9, 8, 7, 6], "lm_head", zero, target=TARGET)["lm_head"]
            assert np.array_equal(patched, other)
            assert np.abs(patched - plain["lm_head"]).max() > 1e-3
            assert "encoder.block.0" in llm.scopes() and "decoder.block.0" in llm.scopes()


@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=["backends", "fused"])
def test_correct_backends_agree(how, bert, t5):
    for folder, kind, heads in ((bert, "packed_attention", "cls"), (t5, "attention", "lm_head")):
        found = graphllm.diff(folder, ids=SOURCE, **how)
        assert found.first is None, found.table()
        assert kind in {row.op for row in found.rows}
        assert any(row.scope.startswith(heads) for row in found.rows)
    same = graphllm.diff(t5, ("cpu",), ids=SOURCE, against=t5)
    assert same.first is None and same.rows[-1].scope.startswith("lm_head")


@pytest.mark.parametrize("scope", ["encoder.block.1", "decoder.block.0.layer.1.EncDecAttention.q"])
def test_a_faulty_kernel_is_named(scope, t5, monkeypatch):
    """In the encoder and in cross-attention, which reads what the encoder wrote."""
    inject_fault(monkeypatch, "linear", scope, "w")
    row = graphllm.diff(t5, ids=SOURCE, no_fuse=["all"]).first
    assert row is not None and row.scope.startswith(scope) and row.kernel == "faulty"


def test_plans_need_no_weights(bert, t5):
    (encode,) = (planned := graphllm.dry_run(bert, device="cpu", depth=32)).phases
    assert planned.kv_type is None and planned.prefill is None and planned.context == 64
    assert encode.tokens == 1024 and encode.ops["cpu"]["packed_attention"] == 3
    attention = 3 * 4 * 60 * 32 * 32**2
    assert encode.flops > 1024 * 2 * 3 * (4 * 60 * 60 + 2 * 60 * 52) + attention
    both = graphllm.dry_run(t5, device="cuda", context=128)
    assert [phase.kind for phase in both.phases] == ["encode", "prefill", "decode"]
    assert both.encode.tokens == 64 and both.as_dict()["encode"]["kind"] == "encode"
    done = run("plan", bert, "--device", "cpu", "-d", 16)
    assert done.exit_code == 0 and "batch of 64 texts of 16 tokens: " in done.stdout
    assert json.loads(run("plan", bert, "--json").stdout)["token"] is None
    for words, text in ((["--kv-type", "f32"], "kv_type has no"), (["-b", 2], "batches has no")):
        assert text in str(run("plan", bert, *words).exception)
    assert "kv_type has no meaning" in str(run("profile", bert, "--kv-type", "f32").exception)
    done = run("profile", bert, "--prompt-tokens", 5, "-b", 3, "-r", 1, "--device", "cpu")
    assert done.exit_code == 0 and done.stdout.startswith("encode: 15 tokens")


@pytest.mark.parametrize(
    ("like", "end"), [("bert", "hidden batches"), ("bart", "logits greedy perplexity steps")]
)
def test_a_copied_model_file_passes_and_a_fault_is_located(like, end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("new", "mine", "--like", like).exit_code == 0
    path = tmp_path / "mine.py"
    code = path.read_text()
    assert "return super().layer(x, i, batch)" in code and "class Model(" in code
    path.write_text(code + "\n\nTINY = TINY[:1]\n")
    found = validate(path, tiny=True, device="cpu")
    assert found.first is None, found.table()
    checks = ["tokenizer", "config", "weights", "layers", *end.split(), "fusion", "backends"]
    assert [check.name for check in found.runs[0].checks] == checks
    faulty = "h = super().layer(x, i, batch)\n        return ops.add(h, x) if i == 1 else h"
    code = code.replace("return super().layer(x, i, batch)", faulty)
    path.write_text(f"{code}\n\nfrom graphllm import ops\n\nTINY = TINY[:1]\n")
    _, check = validate(path, tiny=True, device="reference").first
    assert check.name == "layers" and ".1: " in check.summary
    assert "computed by add at mine.py:" in check.summary


def test_validation_of_a_directory_with_a_head(bert):
    found = validate(bert, tokens=12, device="cpu")
    assert found.first is None, found.table()
    assert found.runs[0].oracle.endswith("BertModel")
    assert found.runs[0].checks[0].status == "passed"  # the tokenizer
