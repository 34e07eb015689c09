"""The endpoints of encoders: ``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..arguments import Integer, OneOf, flag, invalid_argument, text
from ..embedding import EmbeddingModel, SequenceClassifier
from ..errors import RequestError
from .errors import ApiError
from .fields import Field, any_text, check_fields
from .json_data import json_bytes
from .json_shapes import STRING, accepts, array, fields, one_of, shape_of
from .request_body import read_json
from .served_model import ServedModel
from .streaming import until_disconnect

MAX_TEXTS = 2048  # of a request, as OpenAI has it
MAX_PENDING = 64  # requests that run or wait; more are refused


@accepts(one_of(shape_of(text), array(shape_of(text), 1, MAX_TEXTS)))
def _texts(name: str, value: Any) -> list[str]:
    """A non-empty string, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(x, str) and x for x in found):
        raise invalid_argument(name, value, "a non-empty string, or a list of them")
    if len(found) > MAX_TEXTS:
        raise invalid_argument(name, value, f"at most {MAX_TEXTS} strings")
    return found


@accepts(array(one_of(STRING, fields("text", text=STRING)), 1, MAX_TEXTS))
def _documents(name: str, value: Any) -> list[str]:
    """Documents: strings, or objects with a ``text``."""
    listed = value if isinstance(value, list) else None
    texts = [each.get("text") if isinstance(each, dict) else each for each in listed or ()]
    found = [each for each in texts if isinstance(each, str)]
    if not found or len(found) < len(texts):
        raise invalid_argument(name, value, "a list of strings that is not empty")
    if len(found) > MAX_TEXTS:
        raise invalid_argument(name, value, f"at most {MAX_TEXTS} strings")
    return found


EMBEDDING = {
    "model": Field(any_text),
    "input": Field(_texts),
    "encoding_format": Field(OneOf(("float", "base64"))),
    "dimensions": Field(Integer(1)),
}


RERANK = {
    "model": Field(any_text),
    "query": Field(any_text),
    "documents": Field(_documents),
    "top_n": Field(Integer(1)),
    "return_documents": Field(flag),
    "truncate": Field(flag),
}


class EncoderEndpoint:
    """Base class of the endpoint of one encoder, which runs one request at a time.

    Args:
        served: how the model is served.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._pending = 0
        self._worker = ThreadPoolExecutor(1, "encoder")

    async def _read(
        self, request: Request, table: Mapping[str, Field], *required: str
    ) -> dict[str, Any]:
        """Return the values of a request's fields. RequestError, ApiError."""
        values = check_fields(table, await read_json(request, self._served.max_body), *required)
        self._served.check_model(values)
        return values

    async def _run(self, request: Request, compute: Callable[[], bytes], field: str) -> Response:
        """Return the response whose body ``compute`` returns.

        Args:
            request: the request.
            compute: runs in a thread.
            field: field of the request with the texts.

        Raises:
            ApiError: too many requests wait, or a text is too long.
        """
        if self._pending >= MAX_PENDING:
            text = "the server has too many requests; try again later"
            raise ApiError(503, text, code="server_overloaded", headers={"retry-after": "1"})
        self._pending += 1
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._worker, compute)
        try:
            body = await until_disconnect(request.receive, work)
        except RequestError as error:
            if error.argument != "truncate":
                raise
            text = str(error).replace("texts[", f"{field}[", 1)
            raise ApiError(400, text, field, "context_length_exceeded") from None
        finally:
            self._pending -= 1
        return Response(body, media_type="application/json")


class Embeddings(EncoderEndpoint):
    """``/v1/embeddings`` of an encoder without a head."""

    def __init__(self, model: EmbeddingModel, served: ServedModel) -> None:
        """See `EncoderEndpoint`."""
        super().__init__(served)
        self._model = model

    async def embed(self, request: Request) -> Response:
        """``/v1/embeddings``."""
        values, dim = await self._read(request, EMBEDDING, "input"), self._model.dim
        if values.get("dimensions", dim) != dim:
            text = f"the embeddings of the model have {dim} dimensions"
            raise ApiError(400, text, "dimensions", "unsupported_value")
        form = values.get("encoding_format", "float")
        return await self._run(request, partial(self._compute, values["input"], form), "input")

    def _compute(self, texts: Sequence[str], form: str) -> bytes:
        """Return the body of the response."""
        ids = self._model.tokens(texts)
        tokens = sum(map(len, ids))
        vectors = self._model.embed(ids, truncate=False)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if form == "base64"
                else [float(f"{x:.9g}") for x in vector],
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_bytes(
            {"object": "list", "data": data, "model": self._served.name, "usage": usage}
        )


class Rerank(EncoderEndpoint):
    """``/v1/rerank`` of an encoder that scores pairs of texts."""

    def __init__(self, model: SequenceClassifier, served: ServedModel) -> None:
        """See `EncoderEndpoint`."""
        super().__init__(served)
        self._model = model

    async def rerank(self, request: Request) -> Response:
        """``/v1/rerank``, as Jina, Cohere, vLLM and llama.cpp have it."""
        values = await self._read(request, RERANK, "query", "documents")
        return await self._run(request, partial(self._compute, values), "documents")

    def _compute(self, values: Mapping[str, Any]) -> bytes:
        """Return the body of the response."""
        query, documents = values["query"], values["documents"]
        truncate, top = values.get("truncate", False), values.get("top_n")
        ranked = self._model.rerank(query, documents, top_k=top, truncate=truncate, progress=False)
        shown = values.get("return_documents", False)
        results = [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": documents[each.index]}} if shown else {})
            for each in ranked
        ]
        tokens = self._model.count_tokens([(query, text) for text in documents])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        made = {"object": "list", "model": self._served.name, "results": results, "usage": usage}
        return json_bytes({"id": "rerank-" + secrets.token_hex(12), **made})
