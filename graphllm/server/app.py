"""The ASGI application of a loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..api import LLM
from ..api.async_llm import AsyncLLM
from ..api.recording import Recording
from ..embedding import EmbeddingModel, SequenceClassifier
from ..tokenizer import Tokenizer
from .completions import Completions
from .encoder_endpoints import Embeddings, Rerank
from .fields import check_fields, check_known
from .json_data import json_response
from .llama_endpoints import LlamaEndpoints
from .llama_fields import DETOKENIZE, TOKENIZE
from .messages import Messages
from .metrics import Metrics, count_responses, metrics_text
from .request_body import read_json
from .responses import Responses
from .routing import Endpoints, health, page, server_app

MAX_BODY = 10_000_000  # bytes of a request body
Model = LLM | EmbeddingModel | SequenceClassifier


def create_app(
    llm: Model,
    name: str,
    keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    profile: bool = False,
    recording: Recording | None = None,
) -> ASGIApp:
    """Return the application of a loaded model.

    Args:
        llm: the model: a decoder, or an encoder, each of which has other endpoints.
        name: its name in the API.
        keys: API keys, of which requests need one; none for no access control.
        max_body: bytes of a request body at most.
        profile: count the time of all generating requests by op in the metrics.
        recording: gets all generating requests and their answers; None records nothing.
    """
    metrics = Metrics(llm if isinstance(llm, LLM) else None)
    responses = count_responses(metrics.registry)
    models = ModelList({name: int(time.time())}, lambda _: model_state(llm))
    table: list[Endpoints] = [
        *model_endpoints(llm, name, max_body, metrics, profile, recording),
        *([("GET", "/", page)] if isinstance(llm, LLM) else []),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{name:path}", models.describe),
        ("GET", "/health", health),
        ("GET", "/metrics", partial(show_metrics, metrics.registry)),
    ]
    return server_app(table, keys, responses)


def model_endpoints(
    llm: Model, name: str, max_body: int, metrics: Metrics, profile: bool,
    recording: Recording | None,
) -> list[Endpoints]:  # fmt: skip
    """Return the endpoints of a model; see `create_app`."""
    utilities = _TokenizerEndpoints(llm.tokenizer, max_body)
    shared: list[Endpoints] = [
        ("POST", "/tokenize", utilities.tokenize),
        ("POST", "/detokenize", utilities.detokenize),
    ]
    if isinstance(llm, EmbeddingModel):
        return [("POST", "/v1/embeddings", Embeddings(llm, name, max_body).embed), *shared]
    if isinstance(llm, SequenceClassifier):
        call = Rerank(llm, name, max_body).rerank
        return [*(("POST", path, call) for path in ("/v1/rerank", "/v2/rerank")), *shared]
    completions = Completions(AsyncLLM(llm), name, max_body, metrics, profile, recording)
    messages, llama = Messages(completions), LlamaEndpoints(completions)
    return [
        ("POST", "/v1/chat/completions", completions.chat),
        ("POST", "/v1/completions", completions.complete),
        ("POST", "/v1/responses", Responses(completions).create),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("POST", "/completion", llama.completion),
        ("POST", "/completions", llama.completion),
        ("POST", "/infill", llama.infill),
        ("POST", "/apply-template", llama.apply_template),
        ("GET", "/props", llama.props),
        ("GET", "/slots", llama.slots),
        *shared,
    ]


def model_state(llm: Model) -> dict[str, Any]:
    """Return what ``/v1/models`` says of a loaded model."""
    length = llm.limits.context if isinstance(llm, LLM) else llm.max_length
    return {"max_model_len": length, "status": {"value": "loaded"}}


class ModelList:
    """``/v1/models`` and ``/v1/models/NAME``.

    Args:
        created: times since which the models are served, by name; the first one is the default.
        state: returns ``status`` and further keys of a model.
    """

    def __init__(
        self, created: Mapping[str, int], state: Callable[[str], Mapping[str, Any]]
    ) -> None:
        self._created, self._state = created, state

    def _model(self, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": self._created[name]}
        return {**known, "owned_by": "graphllm", **self._state(name)}

    async def list(self, request: Request) -> Response:
        """``/v1/models``."""
        return json_response({"object": "list", "data": [*map(self._model, self._created)]})

    async def describe(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        check_known(name, self._created)
        return json_response(self._model(name))


async def show_metrics(registry: Collector, request: Request) -> Response:
    """``/metrics``."""
    return Response(metrics_text(registry), media_type="text/plain; version=0.0.4")


class _TokenizerEndpoints:
    """``/tokenize`` and ``/detokenize``."""

    def __init__(self, tokenizer: Tokenizer, max_body: int) -> None:
        self._tokenizer, self._max_body = tokenizer, max_body

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``, as llama.cpp has it, but special tokens are text by default."""
        values = check_fields(TOKENIZE, await read_json(request, self._max_body), "content")
        add, parse = values.get("add_special", False), values.get("parse_special", False)

        def response() -> Response:
            ids = self._tokenizer.encode(values["content"], add_special=add, parse_special=parse)
            if values.get("with_pieces"):
                return json_response({"tokens": [{"id": i, "piece": self._piece(i)} for i in ids]})
            return json_response({"tokens": list(ids)})

        return await asyncio.to_thread(response)

    def _piece(self, token: int) -> str | list[int]:
        """Return the text of a token, or its bytes if they are no text."""
        data = self._tokenizer.piece(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``."""
        values = check_fields(DETOKENIZE, await read_json(request, self._max_body), "tokens")
        ids = values["tokens"]
        text = await asyncio.to_thread(self._tokenizer.decode, ids, skip_special=False)
        return json_response({"content": text})
