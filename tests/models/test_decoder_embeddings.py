"""Embeddings of decoders: hidden states of the last token, against transformers."""

from __future__ import annotations

import json

import hf_models
import numpy as np
import pytest
from hf_tokenizers import byte_level
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.embedding import EmbeddingModel
from graphllm.engine.decoder_states import SEQUENCES
from graphllm.errors import ModelFileError, RequestError

pytestmark = pytest.mark.parity
EOS = 0  # <|endoftext|>
PROMPT = "Find the text: "
LENGTHS = [0, 1, 127, 40, *np.random.default_rng(3).integers(1, 100, SEQUENCES).tolist()]
TEXTS = ["".join(chr(97 + i * n % 26) for i in range(n)) for n in LENGTHS]


def write(folder, name, variant=0, headless=True):
    """A directory as sentence-transformers saves a decoder; returns transformers' model."""
    import torch
    from tokenizers import Tokenizer, processors

    config = hf_models.config_of(hf_models.SPECS[name], variant) | {"vocab_size": 700}
    model = hf_models.oracle(config, name)
    saved = model.base_model if headless else model
    saved.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(byte_level())
    end = [("<|endoftext|>", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, end)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "Qwen2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    root = "sentence_transformers.models."
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"{root}{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    texts = {"prompts": {"query": PROMPT, "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(texts))
    base = model.base_model.eval()

    def embed(ids):
        with torch.no_grad():
            vector = base(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1].numpy()
        return vector / np.linalg.norm(vector)

    return embed


@pytest.mark.parametrize(
    ("name", "variant", "headless"),
    [("qwen3", 0, True), ("qwen3", 1, False), ("qwen3", 2, True), ("qwen2", 0, True)],
)
def test_embeddings_agree_with_transformers(name, variant, headless, tmp_path):
    """More texts than a step takes; a window; with and without a head and a prefix of names."""
    oracle = write(tmp_path, name, variant, headless)
    from transformers import AutoTokenizer

    with graphllm.load(tmp_path, device="cpu") as model:
        assert isinstance(model, EmbeddingModel)
        found = model.embed(TEXTS)
        ids = [model.encode(text) for text in TEXTS]
        assert ids == AutoTokenizer.from_pretrained(tmp_path)(TEXTS).input_ids
        assert all(each[-1] == EOS and EOS not in each[:-1] for each in ids)
        want = np.stack([oracle(each) for each in ids])
        assert hf_models.distance(found, want) <= 1e-4
        for index in (0, 2, 5):
            assert np.array_equal(model.embed(TEXTS[index])[0], found[index])
        query = model.embed("cat", prompt="query")[0]
        assert hf_models.distance(query, oracle(model.encode(f"{PROMPT}cat"))) <= 1e-4
        text = " ".join("abc" * 300)
        (long,) = model.embed(text)  # truncated, with its EOS token
        cut = [*model.encode(text)[: model.max_length - 1], EOS]
        assert hf_models.distance(long, oracle(cut)) <= 1e-4
        hidden = model.engine.hidden([ids[3]])[0]
        np.testing.assert_allclose(
            model.embed(TEXTS[3], pooling="mean", normalize=False)[0], hidden.mean(0), rtol=1e-5
        )
        assert model.profile(TEXTS[:3], 1)["encode"].tokens == sum(map(len, ids[:3]))
        with pytest.raises(RequestError, match="load the decoder with LLM"):
            model.trace("a", "*")


def test_verb_and_endpoint(tmp_path):
    """The usage of the endpoint counts the default prompt, too."""
    openai = pytest.importorskip("openai")
    from running_server import KEY, MODEL, Running

    oracle = write(tmp_path, "qwen3")
    settings = {"prompts": {"query": PROMPT}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "lines.txt").write_text("the cat\na b\n")
    done = CliRunner().invoke(app, ["embed", str(tmp_path), "-f", str(tmp_path / "lines.txt")])
    assert done.exit_code == 0, done.output
    found = np.array([json.loads(line) for line in done.stdout.splitlines()], np.float32)
    with graphllm.load(tmp_path, device="cpu") as model:
        ids = model.tokens(["the cat", "a b"])
        assert ids == [model.encode(PROMPT + text) for text in ("the cat", "a b")]
        assert hf_models.distance(found, np.stack([oracle(each) for each in ids])) <= 1e-4
        assert np.array_equal(model.embed(ids), model.embed(["the cat", "a b"]))
        running = Running(model, keys=[KEY])
        url = f"http://127.0.0.1:{running.port}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            reply = client.embeddings.create(model=MODEL, input=["the cat", "a b"])
        running.stop()
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    np.testing.assert_allclose([each.embedding for each in reply.data], found, rtol=1e-6)


def test_what_is_refused(tmp_path):
    write(tmp_path, "qwen3", 1)  # tied
    with graphllm.LLM.load(tmp_path, device="reference") as llm:
        assert llm.logits([5, 6]).shape == (2, 700)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(RequestError, match="qwen3 is a decoder, not an embedding model"):
        EmbeddingModel.load(tmp_path)
    (other := tmp_path / "gemma").mkdir()
    write(other, "gemma2")
    with pytest.raises(ModelFileError, match="gemma2 without the prefix 'model'"):
        graphllm.load(other)
