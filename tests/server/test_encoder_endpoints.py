"""``/v1/embeddings`` and ``/v1/rerank`` of encoders; the `openai` package is the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hf_models
import numpy as np
import pytest
import tiny_models as tiny
from encoder_models import write_encoder
from running_server import KEY, MODEL, Running

import graphllm
from graphllm.cli.options import GenerationLoadOptions
from graphllm.cli.served_models import ServedModels
from graphllm.server.model_router import ModelRouter

pytestmark = pytest.mark.parity
TEXTS = ["the the", "a", "letters and words of the encoder"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> graphllm.EmbeddingModel:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder, hf_models.SPECS["bert"], 0)
    return graphllm.load(folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> graphllm.SequenceClassifier:
    folder = tmp_path_factory.mktemp("reranker")
    write_encoder(folder, hf_models.SPECS["bert"], 0, "SequenceClassification", num_labels=1)
    return graphllm.load(folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def server(reranker) -> Iterator[Running]:
    running = Running(reranker, keys=[KEY])
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(openai, model) -> Iterator[Any]:
    running = Running(model, keys=[KEY])
    url = f"http://127.0.0.1:{running.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made
    running.stop()


def test_embeddings(model, client):
    """As numbers and as base64, which the client asks for by default."""
    want = model.embed(TEXTS)
    for form in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=MODEL, input=TEXTS, **form)
        assert [each.index for each in found.data] == [0, 1, 2]
        have = np.array([each.embedding for each in found.data], np.float32)
        np.testing.assert_array_equal(have, want)
        assert found.usage.prompt_tokens == sum(len(model.encode(text)) for text in TEXTS)
    (one,) = client.embeddings.create(model=MODEL, input="a", dimensions=model.dim).data
    np.testing.assert_array_equal(np.array(one.embedding, np.float32), want[1])
    mixed = [model.encode(TEXTS[0]), TEXTS[1], model.encode(TEXTS[2])]
    for given, rows in ((mixed, want), (mixed[0], want[:1])):
        found = client.embeddings.create(model=MODEL, input=given)
        np.testing.assert_array_equal(
            np.array([each.embedding for each in found.data], np.float32), rows
        )
    assert client.models.retrieve(MODEL).max_model_len == model.max_length


@pytest.mark.parametrize("more, param", [
    ({"input": "a " * 500}, "input"),
    ({"input": []}, "input"),
    ({"input": [1, 10**6]}, "input"),
    ({"input": [[1], []]}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": ["a"] * 3000}, "input"),
    ({"input": "a", "dimensions": 3}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
])  # fmt: skip
def test_bad_requests_are_explained(openai, client, more, param):
    with pytest.raises(openai.BadRequestError) as found:
        client.embeddings.create(model=MODEL, **more)
    assert found.value.param == param


def test_a_decoder_is_needed_for_chats(openai, client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])


def test_rerank(reranker, server):
    """The scores of the model, the highest first; both shapes of documents."""
    want = reranker.rerank("a", TEXTS)
    asks = ({"documents": TEXTS}, {"documents": [{"text": each} for each in TEXTS]})
    for ask, path in zip(asks, ("/v1/rerank", "/rerank")):
        status, found = server.call(path, {"model": MODEL, "query": "a", **ask})
        assert status == 200 and found["id"].startswith("rerank-")
        have = [(each["index"], each["relevance_score"]) for each in found["results"]]
        assert have == [(each.index, each.score) for each in want]
        pairs = reranker.tokenizer.engine.encode_batch([("a", text) for text in TEXTS])
        tokens = sum(len(pair.ids) for pair in pairs)
        assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    ask = {"query": "a", "documents": TEXTS, "return_documents": True, "top_n": 2}
    _, found = server.call("/v1/rerank", ask)
    assert [each["document"]["text"] for each in found["results"]] == [
        TEXTS[each.index] for each in want[:2]
    ]
    ask = {"query": "a", "texts": TEXTS, "return_text": True, "top_n": 2}
    _, found = server.call("/rerank", ask)
    assert found == [
        {"index": each.index, "score": each.score, "text": TEXTS[each.index]} for each in want[:2]
    ]
    ask = {"query": "a", "documents": ["a " * 500], "truncate": True, "top_n": 9}
    assert len(server.call("/v1/rerank", ask)[1]["results"]) == 1


@pytest.mark.parametrize("more, param", [
    ({"documents": []}, "documents"),
    ({"documents": "a"}, "documents"),
    ({"documents": [1, "a"]}, "documents"),
    ({"documents": [{"title": "a"}]}, "documents"),
    ({"documents": ["a"] * 3000}, "documents"),
    ({"documents": ["b", "a " * 500]}, "documents"),
    ({"documents": None}, "documents"),
    ({"texts": ["a"]}, "texts"),
    ({"query": ["a"]}, "query"),
    ({"query": None}, "query"),
    ({"top_n": 0}, "top_n"),
])  # fmt: skip
def test_bad_requests_to_rerank(server, more, param):
    status, found = server.call("/v1/rerank", {"query": "a", "documents": TEXTS, **more})
    assert (status, found["error"]["param"]) == (400, param)


def test_encoders_beside_a_decoder(model, reranker, tmp_path):
    """Options of decoders are for the decoder alone."""
    paths = {"embed": model.file.path, "rank": reranker.file.path}
    paths["chat"] = tiny.write_tiny(tmp_path / "tiny.gguf", "llama")
    models = ServedModels(others=[f"{name}={path}" for name, path in paths.items()])
    options = GenerationLoadOptions(device="cpu", threads=1, context=64)
    router = ModelRouter(models.sources(options), [KEY], budget=10**9)
    running = Running(None, app=router.app)
    _, found = running.call("/v1/embeddings", {"input": TEXTS, "model": "embed"})
    have = np.array([each["embedding"] for each in found["data"]], np.float32)
    np.testing.assert_array_equal(have, model.embed(TEXTS))
    _, found = running.call("/v1/rerank", {"query": "a", "documents": TEXTS, "model": "rank"})
    want = [(each.index, each.score) for each in reranker.rerank("a", TEXTS)]
    assert [(e["index"], e["relevance_score"]) for e in found["results"]] == want
    ask = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True, "model": "chat"}
    assert running.call("/v1/completions", ask)[1]["usage"]["completion_tokens"] == 2
    states = [each["status"]["value"] for each in running.call("/v1/models")[1]["data"]]
    assert states == ["loaded"] * 3
    running.stop()
    router.pool.close()
