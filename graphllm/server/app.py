"""The ASGI application of a loaded model."""

from __future__ import annotations

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
from .completions import Completions
from .encoder_endpoints import Embeddings, Rerank
from .errors import hide_folder
from .fields import check_known
from .json_data import json_response
from .llama_endpoints import LlamaEndpoints
from .messages import Messages
from .metrics import Metrics, count_responses, metrics_text
from .responses import Responses
from .routing import Endpoints, health, page, server_app
from .served_model import MAX_BODY, ServedModel
from .tokenizer_endpoints import TokenizerEndpoints

Model = LLM | EmbeddingModel | SequenceClassifier


def create_app(
    llm: Model,
    name: str,
    keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    profile: bool = False,
    recording: Recording | None = None,
    aliases: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> ASGIApp:
    """Return the application of a loaded model.

    Args:
        llm: the model: a decoder, or an encoder, each of which has other endpoints.
        name: its name in the API.
        keys: API keys, of which requests need one; none for no access control.
        max_body: bytes of a request body at most.
        profile: count the time of all generating requests by op in the metrics.
        recording: gets all generating requests and their answers; None records nothing.
        aliases: further names of the model.
        defaults: fields of `Sampling` for requests that do not set them.
    """
    served = ServedModel([name, *aliases], max_body, defaults or {}, profile, recording)
    metrics = Metrics(llm if isinstance(llm, LLM) else None)
    responses = count_responses(metrics.registry)
    models = ModelList({name: int(time.time())}, lambda _: model_state(llm), aliases)
    table: list[Endpoints] = [
        *model_endpoints(llm, served, metrics),
        *([("GET", "/", page)] if isinstance(llm, LLM) else []),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{name:path}", models.describe),
        ("GET", "/health", health),
        ("GET", "/metrics", partial(show_metrics, metrics.registry)),
    ]
    return server_app(table, keys, responses)


def model_endpoints(llm: Model, served: ServedModel, metrics: Metrics) -> list[Endpoints]:
    """Return the endpoints of a model; see `create_app`."""
    hide_folder(llm.file.path)
    if isinstance(llm, LLM) and llm.template_file is not None:
        hide_folder(llm.template_file)
    utilities = TokenizerEndpoints(llm.tokenizer, served.max_body)
    shared: list[Endpoints] = [
        ("POST", "/tokenize", utilities.tokenize),
        ("POST", "/detokenize", utilities.detokenize),
    ]
    if isinstance(llm, EmbeddingModel):
        return [("POST", "/v1/embeddings", Embeddings(llm, served).embed), *shared]
    if isinstance(llm, SequenceClassifier):
        call = Rerank(llm, served).rerank
        return [*(("POST", path, call) for path in ("/v1/rerank", "/v2/rerank")), *shared]
    completions = Completions(AsyncLLM(llm), served, metrics)
    messages, llama = Messages(completions), LlamaEndpoints(completions)
    return [
        ("POST", "/v1/chat/completions", completions.chat),
        ("POST", "/v1/chat/completions/input_tokens", completions.count_chat),
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
        aliases: further names of the first model.
    """

    def __init__(
        self, created: Mapping[str, int], state: Callable[[str], Mapping[str, Any]],
        aliases: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._created, self._state = created, state
        first = next(iter(created))
        self._aliases = {first: [first, *aliases]} if aliases else {}

    def _model(self, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": self._created[name]}
        others = {"aliases": self._aliases[name]} if name in self._aliases else {}
        return {**known, "owned_by": "graphllm", **others, **self._state(name)}

    async def list(self, request: Request) -> Response:
        """``/v1/models``."""
        return json_response({"object": "list", "data": [*map(self._model, self._created)]})

    async def describe(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        own = {alias: first for first, names in self._aliases.items() for alias in names}
        check_known(name, {**own, **self._created})
        return json_response(self._model(own.get(name, name)))


async def show_metrics(registry: Collector, request: Request) -> Response:
    """``/metrics``."""
    return Response(metrics_text(registry), media_type="text/plain; version=0.0.4")
