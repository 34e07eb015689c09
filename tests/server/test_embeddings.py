"""``/v1/embeddings`` of an encoder, with the `openai` package as a client."""

from __future__ import annotations

from collections.abc import Iterator

import hf_models
import numpy as np
import pytest
from encoder_models import write_encoder
from running_server import KEY, MODEL, Running

import graphllm

pytestmark = pytest.mark.parity
openai = pytest.importorskip("openai")
TEXTS = ["the the", "a", "letters and words of the encoder"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> graphllm.EmbeddingModel:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder, hf_models.SPECS["bert"], 0)
    return graphllm.load(folder, device="cpu", threads=1)


@pytest.fixture(scope="module")
def client(model) -> Iterator[openai.OpenAI]:
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
    assert client.models.retrieve(MODEL).max_model_len == model.max_length


@pytest.mark.parametrize("more, param", [
    ({"input": "a " * 500}, "input"),
    ({"input": []}, "input"),
    ({"input": [1, 2]}, "input"),
    ({"input": ["a"] * 3000}, "input"),
    ({"input": "a", "dimensions": 3}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
])  # fmt: skip
def test_bad_requests_are_explained(client, more, param):
    with pytest.raises(openai.BadRequestError) as found:
        client.embeddings.create(model=MODEL, **more)
    assert found.value.param == param


def test_a_decoder_is_needed_for_chats(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}])
