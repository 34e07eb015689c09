"""The OpenAPI document of a server, made of the tables of fields that check its requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..version import __version__
from .encoder_endpoints import EMBEDDING, RERANK
from .errors import ANTHROPIC
from .fields import CHAT, COMPLETION, Field
from .json_shapes import OBJECT, STRING, Shape, array, fields, one_of, shape_of
from .llama_fields import APPLY_TEMPLATE, DETOKENIZE, INFILL, NATIVE, TOKENIZE
from .message_fields import COUNT_TOKENS, MESSAGES
from .response_fields import RESPONSES

OPENAPI = "/openapi.json"
_COUNT: Shape = {"type": "integer", "minimum": 0}
_NUMBER: Shape = {"type": "number"}
_NULL: Shape = {"type": "null"}
_TEXT_OR_NULL = one_of(STRING, _NULL)


def _all(**properties: Shape) -> Shape:
    """Return the schema of an object with all of the properties."""
    return fields(*properties, **properties)


@dataclass(frozen=True)
class _Operation:
    """An endpoint.

    Attributes:
        summary: what it does.
        result: JSON schema of its answer.
        table: fields of its requests; none for a request without a body.
        required: fields that must be present.
        kind: content type of the answer.
    """

    summary: str
    result: Shape
    table: Mapping[str, Field] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    kind: str = "application/json"


_USAGE = fields(
    "prompt_tokens", "total_tokens",
    prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
    prompt_tokens_details=_all(cached_tokens=_COUNT),
)  # fmt: skip
_HEAD = {"id": STRING, "created": _COUNT, "model": STRING, "usage": _USAGE}
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_CHOICE = {"index": _COUNT, "finish_reason": _FINISH, "logprobs": one_of(OBJECT, _NULL)}
_CALL = _all(id=STRING, type={"const": "function"}, function=_all(name=STRING, arguments=STRING))
_CHAT_MESSAGE = fields(
    "role", "content", role={"const": "assistant"}, content=_TEXT_OR_NULL,
    reasoning_content=STRING, tool_calls=array(_CALL), refusal=_NULL,
)  # fmt: skip
_MODEL = fields(
    "id", "object", "created", "status", id=STRING, object={"const": "model"}, created=_COUNT,
    max_model_len=_COUNT, status=fields("value", value={"enum": ["loaded", "loading", "unloaded"]}),
)  # fmt: skip
_NATIVE_ANSWER = _all(
    content=STRING, tokens=array(_COUNT, 0), stop={"const": True}, tokens_predicted=_COUNT,
    tokens_evaluated=_COUNT, stop_type={"enum": ["limit", "eos", "word"]}, stopping_word=STRING,
    timings=OBJECT,
)  # fmt: skip
_RANKED = fields(
    "index", "relevance_score", index=_COUNT, relevance_score=_NUMBER, document=_all(text=STRING)
)
_ANTHROPIC_USAGE = {
    "input_tokens": _COUNT,
    "output_tokens": _COUNT,
    "cache_read_input_tokens": _COUNT,
    "cache_creation_input_tokens": _COUNT,
}
_RESPONSE_USAGE = _all(
    input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT,
    input_tokens_details=_all(cached_tokens=_COUNT),
    output_tokens_details=_all(reasoning_tokens=_COUNT),
)  # fmt: skip
_PAIRS = _Operation(
    "Rank documents for a query.",
    one_of(
        _all(id=STRING, model=STRING, results=array(_RANKED), usage=_USAGE),
        array(fields("index", "score", index=_COUNT, score=_NUMBER, text=STRING)),
    ),
    RERANK, ("query",),
)  # fmt: skip

_NATIVE = _Operation(
    "Continue prompts, as llama.cpp's server.",
    one_of(OBJECT, array(_NATIVE_ANSWER)),
    NATIVE,
    ("prompt",),
)

OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("POST", "/v1/chat/completions"): _Operation(
        "Answer chat messages.",
        _all(**_HEAD, object={"const": "chat.completion"},
             choices=array(_all(**_CHOICE, message=_CHAT_MESSAGE))),
        CHAT, ("messages",),
    ),
    ("POST", "/v1/chat/completions/input_tokens"): _Operation(
        "Count the tokens of chat messages.", _all(input_tokens=_COUNT), CHAT, ("messages",)
    ),
    ("POST", "/v1/completions"): _Operation(
        "Continue prompts.",
        _all(**_HEAD, object={"const": "text_completion"},
             choices=array(_all(**_CHOICE, text=STRING))),
        COMPLETION, ("prompt",),
    ),
    ("POST", "/v1/responses"): _Operation(
        "Answer items of OpenAI's Responses API.",
        _all(id=STRING, object={"const": "response"}, model=STRING,
             status={"enum": ["completed", "incomplete"]}, store={"const": False},
             output=array(_all(id=STRING, type=STRING), 0), usage=_RESPONSE_USAGE),
        RESPONSES, ("input",),
    ),
    ("POST", "/v1/messages"): _Operation(
        "Answer messages of Anthropic's API.",
        _all(id=STRING, type={"const": "message"}, role={"const": "assistant"}, model=STRING,
             content=array(_all(type={"enum": ["text", "thinking", "tool_use"]}), 0),
             stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
             stop_sequence=_TEXT_OR_NULL, usage=_all(**_ANTHROPIC_USAGE)),
        MESSAGES, ("model", "max_tokens", "messages"),
    ),
    ("POST", "/v1/messages/count_tokens"): _Operation(
        "Count the tokens of messages.", _all(input_tokens=_COUNT), COUNT_TOKENS,
        ("model", "messages"),
    ),
    ("POST", "/v1/embeddings"): _Operation(
        "Compute embeddings of texts.",
        _all(object={"const": "list"}, model=STRING, usage=_USAGE,
             data=array(_all(index=_COUNT, embedding=one_of(STRING, array(_NUMBER))))),
        EMBEDDING, ("input",),
    ),
    ("POST", "/v1/rerank"): _PAIRS,
    ("POST", "/v2/rerank"): _PAIRS,
    ("POST", "/completion"): _NATIVE,
    ("POST", "/completions"): _NATIVE,
    ("POST", "/infill"): _Operation(
        "Fill in text between a prefix and a suffix.", _NATIVE_ANSWER, INFILL,
        ("input_prefix", "input_suffix"),
    ),
    ("POST", "/apply-template"): _Operation(
        "Render chat messages as a prompt.", _all(prompt=STRING), APPLY_TEMPLATE, ("messages",)
    ),
    ("POST", "/tokenize"): _Operation(
        "Encode a text.", _all(tokens=array(one_of(_COUNT, _all(id=_COUNT, piece={})), 0)),
        TOKENIZE, ("content",),
    ),
    ("POST", "/detokenize"): _Operation(
        "Decode token ids.", _all(content=STRING), DETOKENIZE, ("tokens",)
    ),
    ("GET", "/v1/models"): _Operation(
        "List the models.", _all(object={"const": "list"}, data=array(_MODEL))
    ),
    ("GET", "/v1/models/{name}"): _Operation("Describe a model.", _MODEL),
    ("GET", "/props"): _Operation(
        "Describe the server.", _all(default_generation_settings=OBJECT, total_slots=_COUNT,
                                     chat_template=STRING)),
    ("GET", "/slots"): _Operation(
        "List the sequences that can be computed at once.",
        array(_all(id=_COUNT, n_ctx=_COUNT, is_processing={"type": "boolean"})),
    ),
    ("GET", "/health"): _Operation("Return whether the server runs.", _all(status={"const": "ok"})),
    ("GET", "/metrics"): _Operation("Return metrics for Prometheus.", STRING, kind="text/plain"),
    ("GET", OPENAPI): _Operation("Return this document.", OBJECT),
}  # fmt: skip
_OPENAI_ERROR = _all(error=fields(
    "message", "type", message=STRING, type=STRING, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL,
    n_prompt_tokens=_COUNT, n_ctx=_COUNT,
))  # fmt: skip
_ANTHROPIC_ERROR = _all(type={"const": "error"}, error=_all(type=STRING, message=STRING))


def openapi_document(paths: Collection[tuple[str, str]]) -> dict[str, Any]:
    """Return the OpenAPI document of a server with the given methods and paths.

    Paths without an entry in `OPERATIONS` are no part of the API, such as pages.
    """
    items: dict[str, Any] = {}
    for method, path in paths:
        shown = path.replace(":path}", "}")  # Starlette's converter
        if (method, shown) in OPERATIONS:
            items.setdefault(shown, {})[method.lower()] = _operation(method, shown)
    return {
        "openapi": "3.1.0",
        "info": {"title": "graphllm", "version": __version__},
        "components": {
            "schemas": {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
        "paths": items,
    }


def _operation(method: str, path: str) -> dict[str, Any]:
    own = OPERATIONS[method, path]
    content = {own.kind: {"schema": own.result}}
    if "stream" in own.table:
        content["text/event-stream"] = {"schema": {}}  # docs/server.md describes the events
    error = "AnthropicError" if path.startswith(ANTHROPIC) else "Error"
    shape = {"schema": {"$ref": f"#/components/schemas/{error}"}}
    failed = {"description": "The error.", "content": {"application/json": shape}}
    made: dict[str, Any] = {
        "summary": own.summary,
        "responses": {
            "200": {"description": "The result.", "content": content},
            "4XX": failed,
            "5XX": failed,
        },
    }
    if "{name}" in path:
        place = {"name": "name", "in": "path", "required": True, "schema": STRING}
        made["parameters"] = [place]
    if own.table:
        shown = {"application/json": {"schema": _body(own)}}
        made["requestBody"] = {"required": True, "content": shown}
    return made


def _body(own: _Operation) -> Shape:
    """Return the JSON schema of a request; a field that is null counts as absent."""
    shapes = {name: shape_of(each.rule) for name, each in own.table.items()}
    known = {
        name: shape if name in own.required else one_of(shape, _NULL)
        for name, shape in shapes.items()
    }
    return fields(*own.required, **known)
