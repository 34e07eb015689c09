"""The ASGI application of a loaded model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api import LLM
from ..api.async_llm import AsyncLLM
from ..api.recording import Recording
from ..embedding import EmbeddingModel, SequenceClassifier
from ..tokenizer import Tokenizer
from .access import KeyCheck
from .bills import note_arrival
from .chat_page import chat_page
from .completions import Completions
from .encoder_endpoints import Embeddings, Rerank
from .errors import ANTHROPIC, ApiError, api_error, stopping
from .fields import check_fields
from .json_data import json_response
from .llama_endpoints import LlamaEndpoints
from .llama_fields import DETOKENIZE, TOKENIZE
from .messages import Messages
from .metrics import Metrics
from .openapi import OPENAPI, openapi_document
from .request_body import read_json
from .responses import Responses
from .streaming import ClientDisconnected

MAX_BODY = 10_000_000  # bytes of a request body
CLIENT_CLOSED = 499  # status for the metrics, as nginx has it: nobody gets the response
Model = LLM | EmbeddingModel | SequenceClassifier
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Endpoints = tuple[str, str, Endpoint]  # method, path, endpoint


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
    length = llm.limits.context if isinstance(llm, LLM) else llm.max_length
    utilities = _UtilityEndpoints(llm.tokenizer, name, length, max_body, metrics)
    table = [
        *_model_routes(llm, name, max_body, metrics, profile, recording),
        ("GET", "/v1/models", utilities.models),
        ("GET", "/v1/models/{name:path}", utilities.model),
        ("POST", "/tokenize", utilities.tokenize),
        ("POST", "/detokenize", utilities.detokenize),
        ("GET", "/health", utilities.health),
        ("GET", "/metrics", utilities.metrics),
    ]
    table.append(("GET", OPENAPI, _document(table)))
    table += _without_version(table)
    routes = [Route(path, _guarded(call), methods=[method]) for method, path, call in table]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    paths = {path for _, path, _ in table}
    return _Counted(KeyCheck(app, keys), metrics, paths)


def _model_routes(
    llm: Model, name: str, max_body: int, metrics: Metrics, profile: bool,
    recording: Recording | None,
) -> list[Endpoints]:  # fmt: skip
    """Return the endpoints that run the model."""
    if isinstance(llm, EmbeddingModel):
        return [("POST", "/v1/embeddings", Embeddings(llm, name, max_body).embed)]
    if isinstance(llm, SequenceClassifier):
        call = Rerank(llm, name, max_body).rerank
        return [("POST", path, call) for path in ("/v1/rerank", "/v2/rerank")]
    completions = Completions(AsyncLLM(llm), name, max_body, metrics, profile, recording)
    messages, llama = Messages(completions), LlamaEndpoints(completions)
    return [
        ("GET", "/", _chat_page),
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
    ]


def _without_version(table: Sequence[Endpoints]) -> list[Endpoints]:
    """Return the endpoints of OpenAI's API without ``/v1``, as llama.cpp's server has them."""
    found = [each for each in table if each[1].startswith("/v1/")]
    own = [each for each in found if not each[1].startswith(ANTHROPIC)]
    short = [(method, path.removeprefix("/v1"), call) for method, path, call in own]
    taken = {path for _, path, _ in table}  # /completions is another endpoint
    return [each for each in short if each[1] not in taken]


def _document(table: Sequence[Endpoints]) -> Endpoint:
    """Return the endpoint of the OpenAPI document of the other endpoints and itself."""
    paths = [(method, path) for method, path, _ in table]
    document = openapi_document([*paths, ("GET", OPENAPI)])

    async def openapi(request: Request) -> Response:
        """``/openapi.json``."""
        return json_response(document)

    return openapi


async def _chat_page(request: Request) -> Response:
    """``/``: the chat page, which no other page may embed."""
    page = chat_page()
    headers = {
        "content-security-policy": f"{page.policy}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(page.text, headers=headers)


def _guarded(call: Endpoint) -> Endpoint:
    """Return the endpoint with its exceptions as responses."""

    async def endpoint(request: Request) -> ASGIApp:
        note_arrival(request)
        try:
            return await call(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED)
        except asyncio.CancelledError:  # by uvicorn, which stops
            return stopping().response(request.url.path)
        except Exception as error:
            return api_error(error).response(request.url.path)

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors (404, 405) in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{request.method} {path[:100]}: {error.detail}"
    return ApiError(error.status_code, text, headers=error.headers).response(path)


class _Counted:
    """ASGI middleware that counts the responses by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self._app, self._responses, self._paths = app, metrics.responses, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting)


class _UtilityEndpoints:
    """The endpoints that generate nothing."""

    def __init__(
        self, tokenizer: Tokenizer, name: str, length: int, max_body: int, metrics: Metrics
    ) -> None:
        """``length``: tokens of a prompt and its answer, or of a text, at most."""
        self._tokenizer, self._max_body, self._metrics = tokenizer, max_body, metrics
        self._model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "graphllm",
            "max_model_len": length,
        }

    async def models(self, request: Request) -> Response:
        """``/v1/models``."""
        return json_response({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        if name != self._model["id"]:
            text = f"the model {name[:100]!r} does not exist"
            raise ApiError(404, text, "model", "model_not_found")
        return json_response(self._model)

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

    async def health(self, request: Request) -> Response:
        """``/health``."""
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """``/metrics``."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")
