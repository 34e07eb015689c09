"""Heads of encoders against transformers: reranking, classification, masked language models."""

from __future__ import annotations

import json

import hf_models
import numpy as np
import pytest
from encoder_models import write_encoder
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.embedding import (
    EmbeddingModel,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
)
from graphllm.embedding.pairs import longest_first
from graphllm.engine.pooling import pool
from graphllm.errors import ConfigError, RequestError

pytestmark = pytest.mark.parity
CLASSES = {k.task: k for k in (MaskedLanguageModel, SequenceClassifier, TokenClassifier)}
BERT = hf_models.SPECS["bert"]
CASES = [  # BERT, RoBERTa, and families with heads of their own
    ("bert", 1),
    ("bert", 3),
    ("distilbert", 1),
    ("electra", 0),
    ("modernbert", 0),
    ("modernbert", 1),
    ("mpnet", 0),
    ("nomic_bert", 0),
]
RNG = np.random.default_rng(5)
LETTERS = [*map(chr, range(97, 123)), "the"]
TEXTS = ["", "a", *(" ".join(RNG.choice(LETTERS, n)) for n in RNG.integers(2, 60, 15))]


@pytest.fixture(scope="module", params=[(c, task) for c in CASES for task in CLASSES], ids=str)
def written(request, tmp_path_factory):
    """A directory of each family and head: (class, path, oracle)."""
    (name, variant), task = request.param
    folder = tmp_path_factory.mktemp("head")
    kinds = 2 if name == "bert" and variant == 1 else 1
    labels = {} if task == "MaskedLM" else {"num_labels": 2 * kinds - 1}
    oracle = write_encoder(folder, hf_models.SPECS[name], variant, task, **labels)
    return CLASSES[task], folder, oracle


def test_logits_agree_with_transformers(written):
    """Of 17 ragged sequences, with the same bits alone, in twos and all together."""
    import torch

    kind, folder, oracle = written
    with graphllm.load(folder, device="cpu") as model:
        assert type(model) is kind
        sequences = [model.encode(text) for text in TEXTS]

        def logits(some):
            pooling = model.encoder.cfg.head.pooling
            rows = model._map(lambda i, x: pool(x, (pooling,))[None] if pooling else x, some)
            ends = np.cumsum([len(each) for each in rows])[:-1]
            return np.split(model._logits(np.concatenate(rows)), ends)

        found = logits(sequences)
        for part in ([0], [5, 9], [16]):
            for i, own in zip(part, logits([sequences[i] for i in part]), strict=True):
                assert np.array_equal(own, found[i])
    assert len(found) == 17
    for ids, got in zip(sequences, found, strict=True):
        with torch.no_grad():
            want = oracle(torch.tensor([ids])).logits[0].numpy()
        want = want.reshape(got.shape)
        assert np.abs(got - want).max() <= 1e-4 * max(1.0, float(np.ptp(want)))


@pytest.mark.parametrize(
    "name, variant", [("bert", 1), ("bert", 3), ("mpnet", 0), ("nomic_bert", 0)]
)
def test_bias_of_a_masked_language_model(name, variant, tmp_path):
    """Without tied weights it is a parameter of the linear; a file may have one of two names."""
    import torch
    from safetensors.numpy import load_file, save_file

    spec, ids, file = hf_models.SPECS[name], [2, 9, 40, 3], tmp_path / "model.safetensors"
    oracle = write_encoder(tmp_path, spec, variant, "MaskedLM", tie_word_embeddings=False)
    tensors = load_file(file)
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0].numpy()
    (own,) = (each for each in tensors if each.endswith(".decoder.bias"))
    other = own.replace(".decoder.", ".")
    assert np.abs(tensors[own] - tensors[other]).max() > 0.1
    tied = {**tensors, other: tensors[own]}
    del tied[own]
    for stored in (tensors, tied):
        save_file(stored, file)
        with graphllm.load(tmp_path, device="reference") as model:
            got = model._logits(model.engine.hidden([ids])[0])
        assert hf_models.distance(got, want) <= 1e-4


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    oracle = write_encoder(folder, BERT, 0, "SequenceClassification", num_labels=1)
    with graphllm.load(folder, device="cpu") as model:
        yield folder, model, oracle


def test_rerank_agrees_with_transformers(reranker):
    """Pairs with token types and truncation as transformers' tokenizer and model have them."""
    import torch
    from transformers import PreTrainedTokenizerFast

    folder, model, oracle = reranker
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )
    for query in ("a b", "the " * 33, "x " * 90):
        want = []
        for text in TEXTS:
            pair = tokenizer(
                [[query, text]], truncation=True, max_length=64, return_token_type_ids=True,
                return_tensors="pt",
            )  # fmt: skip
            kinds = pair["token_type_ids"]
            assert kinds.max() == 1
            with torch.no_grad():
                logit = oracle(pair["input_ids"], token_type_ids=kinds).logits
            want.append(float(torch.sigmoid(logit)))
        found = model.rerank(query, TEXTS)
        scores = [each.score for each in found]
        assert scores == sorted(scores, reverse=True)
        assert sorted(each.index for each in found) == list(range(len(TEXTS)))
        np.testing.assert_allclose(scores, [want[each.index] for each in found], atol=2e-5)
        first = model.rerank(query, TEXTS, top_k=3)
        assert first == found[:3]
        assert model.rerank(query, [TEXTS[first[0].index]])[0].score == scores[0]
    assert model.rerank("a", []) == []


def test_activation_of_a_reranker(reranker, monkeypatch):
    _, model, _ = reranker
    sigmoid = model.rerank("a", ["b"])[0].score
    stated = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}
    monkeypatch.setitem(model.file.metadata, "sentence_transformers", stated)
    logit = model.rerank("a", ["b"])[0].score
    assert abs(1 / (1 + np.exp(-logit)) - sigmoid) < 1e-6
    monkeypatch.setitem(stated, "activation_fn", "torch.nn.Mish")
    with pytest.raises(ConfigError, match=r"activation_fn = 'torch.nn.Mish' is not supported"):
        model.rerank("a", ["b"])


def test_wrong_uses_are_one_error(reranker, tmp_path):
    folder, model, _ = reranker
    with pytest.raises(RequestError, match=r"embed needs an embedding model, but .* it has rerank"):
        model.embed("a")
    with pytest.raises(RequestError, match="is a sequence classifier, not an embedding model"):
        EmbeddingModel.load(folder)
    with pytest.raises(RequestError, match=r"texts\[0\] has \d+ tokens, the model takes 64"):
        model.rerank("a", ["b " * 99], truncate=False)
    for query, texts in ((3, ["a"]), ("a", "b"), ("a", [3])):
        with pytest.raises(RequestError, match="must be"):
            model.rerank(query, texts)
    write_encoder(tmp_path, BERT, 0)
    with pytest.raises(RequestError, match="bert is an embedding model, not a sequence"):
        SequenceClassifier.load(tmp_path)
    with (
        graphllm.load(tmp_path, device="reference") as embedder,
        pytest.raises(RequestError, match=r"rerank needs a sequence classifier, but .* has embed"),
    ):
        embedder.rerank("a", ["b"])


def test_classify_orders_the_labels(tmp_path):
    import torch

    labels = {0: "no", 1: "perhaps", 2: "yes"}
    oracle = write_encoder(tmp_path, BERT, 0, "SequenceClassification", id2label=labels)
    with graphllm.load(tmp_path, device="cpu") as model:
        found, pair = model.classify(["the cat", "a"]), model.classify([("the cat", "a")])[0]
        ids = model.encode("the cat")
        with pytest.raises(RequestError, match="rerank needs a model with one label"):
            model.rerank("a", ["b"])
    with torch.no_grad():
        want = torch.softmax(oracle(torch.tensor([ids])).logits[0], -1).numpy()
    assert list(found[0].values()) == sorted(found[0].values(), reverse=True)
    np.testing.assert_allclose([found[0][labels[i]] for i in range(3)], want, atol=1e-5)
    assert len(found) == 2 and sum(pair.values()) == pytest.approx(1) and pair != found[0]
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"].pop("1")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="id2label has 2 labels, the head has 3"):
        graphllm.load(tmp_path, device="reference")


def test_masks_and_tokens(tmp_path):
    """The mask alone is parsed; special tokens in a text are not."""
    (tmp_path / "lm").mkdir()
    write_encoder(tmp_path / "lm", BERT, 0, "MaskedLM")
    (tmp_path / "lm" / "tokenizer_config.json").write_text('{"mask_token": "[MASK]"}')
    with graphllm.load(tmp_path / "lm", device="cpu") as model:
        found = model.fill_mask(["the [MASK] a [MASK]", "[MASK]"], top_k=3)
        assert [len(each) for each in found] == [2, 1] and len(found[0][1]) == 3
        assert found[0][0][0].score > found[0][0][2].score > 0
        assert model._encode_with_masks("[SEP] [MASK]", 4).count(3) == 1
        with pytest.raises(RequestError, match=r"texts\[1\] has no \[MASK\]"):
            model.fill_mask(["[MASK]", "a"])
    (tmp_path / "ner").mkdir()
    write_encoder(tmp_path / "ner", BERT, 0, "TokenClassification", num_labels=5)
    with graphllm.load(tmp_path / "ner", device="cpu") as model:
        found = model.classify_tokens(["the thes", ""])
        assert [each.token for each in found[0]] == ["the", "the", "s"] and found[1] == []
        assert {each.label for each in found[0]} <= {f"LABEL_{i}" for i in range(5)}


def test_rerank_and_classify_on_the_command_line(reranker, tmp_path):
    folder, model, _ = reranker
    texts = ["the cat", "a b c", ""]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    file = ["-f", str(tmp_path / "lines.txt"), "--json"]
    done = CliRunner().invoke(app, ["rerank", str(folder), "-q", "a", *file, "-n", "2"])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    want = model.rerank("a", texts, top_k=2)
    assert [(row["line"] - 1, row["score"]) for row in rows] == [(w.index, w.score) for w in want]
    assert rows[0]["text"] == texts[want[0].index]
    done = CliRunner().invoke(app, ["classify", str(folder), *file])
    rows = [json.loads(line)["scores"] for line in done.stdout.splitlines()]
    assert rows == model.classify(texts)


def test_longest_first():
    """Each token that is removed is one of the longer text."""
    for first in range(12):
        for second in range(12):
            for most in range(12):
                a, b = longest_first(first, second, most)
                assert a + b == min(first + second, most) and a <= first and b <= second
                if a < first and b < second:
                    assert abs(a - b) <= 1
                elif a < first:
                    assert a >= b - 1
                elif b < second:
                    assert b >= a - 1
