"""Run docs/encoders.md: all its Python and all its commands, in the order of the page."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex

import hf_models
import numpy as np
import pytest
from doc_examples import DOCS
from encoder_models import write_encoder
from test_encoder_decoders import write as write_seq2seq
from translation_tokenizers import from_transformers, marian
from typer.testing import CliRunner

from graphllm import ops, tokenizer
from graphllm.checkpoints import minilm
from graphllm.cli import app
from graphllm.embedding import EmbeddingModel
from graphllm.graph import op

pytestmark = pytest.mark.parity
PAGE = (DOCS / "encoders.md").read_text("utf-8")
TEXTS = ["We swim in the lake.", "The sun shines.", "A man eats.", "It rains."]
VERBS = {"embed", "rerank", "classify", "quantize", "run", "profile", "plan", "diff"}


def examples():
    """(is Python, text) of each block of code, and of each command within a line."""
    for language, block, inline in re.findall(r"```(\w*)\n(.*?)```|`(graphllm [^`]+)`", PAGE, re.S):
        if language:
            yield language == "python", block
        else:
            yield from ((False, line) for line in (block or inline).splitlines())


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The models and files of the page in the working directory; those not installed are tiny."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents.txt").write_text("\n".join(TEXTS) + "\n")

    def classifier(name, **config):
        (path := tmp_path / name).mkdir(parents=True)
        write_encoder(path, hf_models.SPECS["bert"], 0, "SequenceClassification", **config)

    classifier("cross-encoder/ms-marco-MiniLM-L6-v2", num_labels=1)
    classifier("sentiment", num_labels=3)
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        (tiny := tmp_path / "tiny").mkdir()
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
        write_encoder(tiny, hf_models.SPECS["bert"], 0, **sizes)
        monkeypatch.setattr(minilm, "minilm_path", lambda: tiny)
    (path := tmp_path / "opus-mt-en-de").mkdir()
    marian(path)
    write_seq2seq(path, "marian", vocab_size=len(json.loads((path / "vocab.json").read_text())))
    (path := tmp_path / "nllb").mkdir()
    from_transformers(path, "NllbTokenizer")
    write_seq2seq(path, "m2m_100", vocab_size=tokenizer.from_directory(path).vocab_size)
    return tmp_path


def test_the_page_runs(models, capsys):
    """Each example succeeds, and prints or writes what the text around it says."""
    names, printed, outputs = {}, [], {}
    for is_python, text in examples():
        if file := re.match(r"# (\w+\.py)\n", text):
            (models / file[1]).write_text(text)
            continue
        if is_python:
            exec(text, names)
            printed.append(capsys.readouterr().out.splitlines())
            continue
        words = shlex.split(text)
        assert words[0] == "graphllm", text
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, (text, done.output, done.exception)
        outputs.setdefault(words[1], []).append(done.output)
    assert outputs.keys() == VERBS
    loaded, found, reranked, translated = printed
    assert not loaded and names["vectors"].shape[0] == 2
    for lines in (found, reranked):  # best first
        scores = [float(line.split()[0]) for line in lines]
        assert scores == sorted(scores, reverse=True)
        assert sorted(line.split("  ", 1)[1] for line in lines) == sorted(TEXTS)
    assert len(translated) == 3 and all(float(line.split()[0]) < 0 for line in translated[1:])
    assert np.load("vectors.npy").shape == names["index"].shape
    assert all("station" not in each for each in outputs["run"])


def test_a_model_file_with_padded_input(models, monkeypatch):
    """The page's op averages within each sequence; the longest fills its rectangle."""
    monkeypatch.setattr(op, "_REGISTRY", dict(ops.registry()))
    (models / "smoothed_bert.py").write_text(next(t for _, t in examples() if "smooth(x)" in t))
    folder, sequences = models / "small", [[5, 6, 7, 8], [9], [7] * 64]
    folder.mkdir()
    write_encoder(folder, hf_models.SPECS["bert"], 0)
    with EmbeddingModel.load(folder, device="cpu") as model:
        plain = model.engine.hidden(sequences)
    with EmbeddingModel.load(folder, device="cpu", model_def="smoothed_bert.py") as model:
        found = model.engine.hidden(sequences)
    for x, have in zip(plain, found, strict=True):
        zero = np.zeros_like(x[:1])
        want = (x + np.concatenate([zero, x[:-1]]) + np.concatenate([x[1:], zero])) / 3
        np.testing.assert_allclose(have, want, atol=1e-6)


def test_a_wrong_language(models):
    command = next(text for _, text in examples() if "fra_Latn" in text)
    wrong = CliRunner().invoke(app, shlex.split(command.replace("fra_Latn", "fra"))[1:])
    assert "target_lang = 'fra' is not one of" in str(wrong.exception)
