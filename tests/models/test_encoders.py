"""Encoders against transformers, and embeddings of sentence-transformers directories."""

from __future__ import annotations

import importlib.util
import json

import hf_models
import numpy as np
import pytest
from cuda_cases import DEVICES, need_device
from encoder_models import write_encoder
from typer.testing import CliRunner

import graphllm
from graphllm import models
from graphllm.cli import app
from graphllm.embedding import EmbeddingModel
from graphllm.engine.packing import pack
from graphllm.errors import ConfigError, ModelFileError, RequestError
from graphllm.ops.pooling import POOLINGS

RNG = np.random.default_rng(3)
SPEC = hf_models.SPECS["bert"]
VARIANTS = [
    (s.name, i) for s in hf_models.SPECS.values() if s.is_encoder for i in range(len(s.tiny))
]
LENGTHS = [1, 64, 2, *RNG.integers(1, 64, 14)]  # ragged; a single token, and as many as positions
SEQUENCES = [RNG.integers(5, 120, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda case: f"{case[0]}-{case[1]}")
def written(request, tmp_path_factory):
    folder, (name, variant) = tmp_path_factory.mktemp("encoder"), request.param
    return folder, write_encoder(folder, hf_models.SPECS[name], variant)


def write_modules(folder, pooling="mean", normalize=False, **prompts):
    """The files that sentence-transformers adds to a directory."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    root = "sentence_transformers.models."
    modules = [{"type": root + kind, "path": path} for kind, path in zip(kinds, paths)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{n}_token{'s' * (n != 'cls')}": n == pooling for n in ("cls", "mean")}
    text = json.dumps({"word_embedding_dimension": 60, **modes})
    (folder / "1_Pooling" / "config.json").write_text(text)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    text = json.dumps({"prompts": prompts, "default_prompt_name": None})
    (folder / "config_sentence_transformers.json").write_text(text)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A sentence-transformers directory of a small model, and the model on the CPU."""
    folder = tmp_path_factory.mktemp("sentences")
    write_encoder(folder, SPEC, 0)
    write_modules(folder, "cls", True, query="the ")
    with EmbeddingModel.load(folder, device="cpu") as model:
        yield folder, model


@pytest.mark.parity
@pytest.mark.parametrize("device", DEVICES)
def test_hidden_states_agree_with_transformers(written, device):
    """Of batches of 1, 2 and 17 ragged sequences; on the CPU with the same bits in each batch."""
    import torch

    need_device(device)
    folder, oracle = written
    with torch.no_grad():
        want = [oracle(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in SEQUENCES]
    with EmbeddingModel.load(folder, device=device) as model:
        found = model.engine.hidden(SEQUENCES)
        for first, count in ((0, 1), (1, 1), (1, 2), (5, 2)):
            part = model.engine.hidden(SEQUENCES[first : first + count])
            for own, whole in zip(part, found[first:]):
                assert hf_models.distance(own, whole) <= (0 if device == "cpu" else 1e-4)
    assert len(found) == len(want) == 17
    for got, expected in zip(found, want, strict=True):
        assert hf_models.distance(got, expected) <= 1e-4


@pytest.mark.parity
def test_rope_scaling_of_modernbert(tmp_path):
    """The old form applies to layers with and without a window."""
    import torch
    from transformers import AutoModel

    write_encoder(tmp_path, hf_models.SPECS["modernbert"], 0)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    with torch.no_grad():
        oracle = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
        want = oracle(torch.tensor([SEQUENCES[1]])).last_hidden_state[0].numpy()
    with EmbeddingModel.load(tmp_path, device="reference") as model:
        assert hf_models.distance(model.engine.hidden(SEQUENCES[1:2])[0], want) <= 1e-4


@pytest.mark.parity
def test_distilbert_has_one_epsilon(tmp_path):
    write_encoder(tmp_path, hf_models.SPECS["distilbert"], 0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}))
    with pytest.raises(ConfigError, match="layer_norm_eps = 1e-05 is not supported, only 1e-12"):
        EmbeddingModel.load(tmp_path, device="reference")


@pytest.mark.parity
@pytest.mark.parametrize("name", ["modernbert", "nomic_bert"])
def test_encoders_refuse_longrope(name, tmp_path):
    write_encoder(tmp_path, hf_models.SPECS[name], 0)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    with pytest.raises(ConfigError, match="'longrope' is not supported for encoders"):
        EmbeddingModel.load(tmp_path, device="reference")


@pytest.mark.parity
def test_embeddings_are_pooled_hidden_states(embedder):
    _, model = embedder
    texts = ["the cat", "", "a b c d e f", "the"]
    ids = [model.encode(text) for text in texts]
    assert ids[0][0] == 2 and ids[0][-1] == 3 and ids[1] == [2, 3]
    hidden = model.engine.hidden(ids)
    want = np.stack([rows[0] for rows in hidden])
    assert np.array_equal(model.embed(texts, normalize=False), want)
    lengths = np.sqrt((want.astype(np.float64) ** 2).sum(1, keepdims=True))
    np.testing.assert_allclose(model.embed(texts), want / lengths, rtol=1e-6)
    mean = np.stack([rows.mean(0) for rows in hidden])
    got = model.embed(texts, normalize=False, pooling="mean")
    np.testing.assert_allclose(got, mean, rtol=1e-6)
    alone = np.concatenate([model.embed(text) for text in texts])
    assert np.array_equal(alone, model.embed(texts)) and alone.dtype == np.float32
    assert model.embed([]).shape == (0, 60)
    with_prompt = model.embed("cat", prompt="query")
    assert np.array_equal(with_prompt, model.embed("the cat"))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_dense_modules_and_fewer_columns(tmp_path, kind):
    """Two layers over a pooled vector, written out here; columns are cut before normalisation."""
    from safetensors.numpy import save_file

    write_encoder(tmp_path, SPEC, 0)
    write_modules(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    layers = []
    for i, (rows, columns, bias, act) in enumerate(((7, 60, True, "Tanh"), (5, 7, False, "ReLU"))):
        (folder := tmp_path / f"{i + 2}_Dense").mkdir()
        tensors = {"linear.weight": RNG.standard_normal((rows, columns)).astype(kind)}
        if bias:
            tensors["linear.bias"] = RNG.standard_normal(rows).astype(kind)
        save_file(tensors, folder / "model.safetensors")
        values = {"in_features": columns, "out_features": rows, "bias": bias,
                  "activation_function": f"torch.nn.modules.activation.{act}"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(values))
        modules.append({"type": "sentence_transformers.models.Dense", "path": folder.name})
        layers.append(tensors)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with EmbeddingModel.load(tmp_path, device="cpu") as model:
        assert model.dim == 5
        texts = ["the cat", "a", "b c"]
        pooled = [
            rows.mean(0) for rows in model.engine.hidden([model.encode(text) for text in texts])
        ]
        first = np.tanh(np.stack(pooled) @ layers[0]["linear.weight"].T + layers[0]["linear.bias"])
        want = np.maximum(first @ layers[1]["linear.weight"].T, 0)
        found = model.embed(texts, normalize=False)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
        assert np.array_equal(model.embed(texts[1], normalize=False)[0], found[1])
        short = model.embed(texts, truncate_dim=3)
        lengths = np.maximum(np.linalg.norm(want[:, :3], axis=1, keepdims=True), 1e-12)
        np.testing.assert_allclose(short, want[:, :3] / lengths, rtol=1e-4, atol=1e-5)
        assert model.embed([], truncate_dim=2).shape == (0, 2)
        with pytest.raises(RequestError, match="truncate_dim = 6 exceeds the 5 columns"):
            model.embed(texts, truncate_dim=6)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="2_Dense"):
        EmbeddingModel.load(tmp_path, device="reference")


@pytest.mark.parity
def test_long_texts_are_truncated_with_one_note_or_refused(embedder, capsys):
    _, model = embedder
    long, short = "a " * 40, "a " * 7  # seven tokens and two special ones fill the model
    assert np.array_equal(model.embed([long, "b", long])[0], model.embed(short)[0])
    assert capsys.readouterr().err.count("2 of 3 texts exceed 9 tokens") == 1
    model.embed(short, truncate=False)
    with pytest.raises(RequestError, match=r"texts\[1\] has 42 tokens, the model takes 9"):
        model.embed(["b", long], truncate=False)


@pytest.mark.parity
def test_wrong_requests_are_one_error(embedder):
    folder, model = embedder
    for name in ("generate", "stream", "chat", "logits"):
        with pytest.raises(
            RequestError, match=f"{name} needs a decoder, but .* is an embedding model"
        ):
            getattr(model, name)("text")
    for wrong in (3, ["a", 3], {"a": 1}):
        with pytest.raises(RequestError, match=r"texts = .* must be"):
            model.embed(wrong)
    with pytest.raises(RequestError, match="prompt = 'passage' is unknown"):
        model.embed("a", prompt="passage")
    with pytest.raises(RequestError, match="pooling"):
        model.embed("a", pooling="median")
    closed = EmbeddingModel.load(folder, device="reference")
    closed.close()
    closed.close()
    with pytest.raises(RequestError, match="closed"):
        closed.embed("a")


@pytest.mark.parity
def test_load_chooses_by_the_model_type(embedder, tmp_path):
    folder, _ = embedder
    with graphllm.load(folder, device="reference") as model:
        assert isinstance(model, EmbeddingModel)
        assert model.tokenizer.decode(model.encode("the thes cat")) == "the thes cat"
    with pytest.raises(RequestError, match="kv_type has no meaning for an encoder"):
        graphllm.load(folder, kv_type="f16")
    with pytest.raises(RequestError, match="bert is an encoder, but this needs a decoder"):
        graphllm.LLM.load(folder)
    hf_models.write(tmp_path, hf_models.SPECS["llama"], 0)
    with pytest.raises(RequestError, match="llama is a decoder, not an embedding model"):
        EmbeddingModel.load(tmp_path)
    with (
        graphllm.load(tmp_path, device="reference") as llm,
        pytest.raises(RequestError, match=r"embed needs an encoder, but .* is a decoder"),
    ):
        llm.embed(["text"])


@pytest.mark.parity
def test_embed_on_the_command_line(embedder, tmp_path):
    folder, model = embedder
    texts = ["the cat", "", "a b c"]
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(texts) + "\n")
    want = model.embed(texts)
    for name in ("vectors.npy", "vectors.jsonl"):
        done = CliRunner().invoke(
            app, ["embed", str(folder), "-f", str(lines), "-o", str(tmp_path / name)]
        )
        assert done.exit_code == 0 and "3 embeddings of 60 columns" in done.stdout
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), want)
    rows = (tmp_path / "vectors.jsonl").read_text().splitlines()
    assert np.array_equal(np.array([json.loads(row) for row in rows], np.float32), want)
    wrong = CliRunner().invoke(app, ["embed", str(folder), "-f", str(lines), "-o", "v.txt"])
    assert wrong.exit_code != 0 and "must end in .npy or .jsonl" in str(wrong.exception)


@pytest.mark.realmodel
@pytest.mark.parity
def test_minilm_agrees_with_transformers():
    """Mean pooling written out here; texts of one to more tokens than the model takes."""
    if importlib.util.find_spec("all_minilm_l6_v2") is None:
        pytest.skip("needs the extra minilm")
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["", "Hello", "that", "Where is it?", "caf\u00e9 \u65e5\u672c!", "one two " * 150]
    with graphllm.load("minilm") as model:
        path, found = model.file.path, model.embed(texts)
    with graphllm.load("minilm", type="q8_0", device="cpu") as model:
        assert np.all((model.embed(texts) * found).sum(1) >= 0.999)  # "that": 0.9977 if not rotated
    oracle, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    for text, got in zip(texts, found, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            want = oracle(**inputs).last_hidden_state[0].mean(0).numpy()
        assert float(got @ want) / np.linalg.norm(want) >= 0.9999


@pytest.mark.parity
def test_the_maximum_length_without_that_of_sentence_transformers(tmp_path):
    write_encoder(tmp_path, SPEC, 0)
    for stated, most in ((7, 7), (10**30, None), (1e30, None), (None, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stated}))
        with EmbeddingModel.load(tmp_path, device="reference") as model:
            assert model.max_length == (most or model.encoder.cfg.context) != 9
    write_modules(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    with EmbeddingModel.load(tmp_path, device="reference") as model:
        assert model.max_length == 9  # max_seq_length precedes it
    (tmp_path / "sentence_bert_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 0}')
    with pytest.raises(ConfigError, match=r"model_max_length = 0 must be a positive number"):
        EmbeddingModel.load(tmp_path, device="reference")


@pytest.mark.parity
def test_directories_are_read_strictly(tmp_path):
    write_encoder(tmp_path, SPEC, 0)
    assert EmbeddingModel.load(tmp_path, device="reference").settings.pooling == ("mean",)
    path, first = tmp_path / "modules.json", '{"type": "a.Transformer", "path": ""}'
    for text, error, match in (
        ('[{"type": "a.LSTM", "path": "2_LSTM"}]', ConfigError, "module 'LSTM'"),
        (f'[{first}, {{"type": "a.Dense", "path": "2_Dense"}}]', ModelFileError, "2_Dense"),
        (
            f'[{first}, {{"type": "a.Pooling", "path": "3"}}]',
            ModelFileError,
            "3/config.json: no such",
        ),
        ("[]", ConfigError, "no Transformer module"),
        ('[{"type": "a.Pooling"}, {"type": "a.Transformer"}]', ConfigError, "in this order"),
        ('[{"type": "a.Pooling", "path": "../x"}]', ModelFileError, "not inside"),
        (f'[{{"type": "a.Pooling", "path": "{"x" * 5000}"}}]', ModelFileError, "is too long"),
        ('{"a": 1}', ModelFileError, "not a list of modules"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=match):
            EmbeddingModel.load(tmp_path, device="reference")
    write_modules(tmp_path, pooling="nothing")
    with pytest.raises(ConfigError, match="pooling"):
        EmbeddingModel.load(tmp_path, device="reference")
    write_modules(tmp_path)
    for text, match in (('{"max_length": 9}', "max_length"), ('{"max_seq_length": 0}', "positive")):
        (tmp_path / "sentence_bert_config.json").write_text(text)
        with pytest.raises(ConfigError, match=match):
            EmbeddingModel.load(tmp_path, device="reference")
    write_modules(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 7, "pooling_mode_cls_token": true}'
    )
    with pytest.raises(ModelFileError, match="states 7 columns, the model has 60"):
        EmbeddingModel.load(tmp_path, device="reference")


def test_batches_hold_every_sequence_once_within_the_budget():
    lengths = [0, 5, 9, 1, 9, 2, 0, 3]
    batches = list(pack(lengths, 9))
    assert sorted(i for batch in batches for i in batch) == [1, 2, 3, 4, 5, 7]
    assert all(sum(lengths[i] for i in batch) <= 9 for batch in batches)
    assert batches[:2] == [[2], [4]] and not list(pack([], 9)) and not list(pack([0, 0], 9))


def test_poolings_of_two_tokens():
    x = np.array([[1.0, -2.0], [4.0, 6.0]], np.float32)
    want = {"cls": [1, -2], "max": [4, 6], "mean": [2.5, 2], "lasttoken": [4, 6]}
    want |= {"mean_sqrt_len_tokens": [5 / 2**0.5, 4 / 2**0.5], "weightedmean": [3, 10 / 3]}
    assert POOLINGS.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(POOLINGS[name](x), values, rtol=1e-6)


def test_encoders_of_all_names_are_found():
    for kind in ("bert", "roberta", "xlm-roberta", "camembert"):
        assert models.spec_of_model_type(kind, "test").is_encoder
