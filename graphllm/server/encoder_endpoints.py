"""The endpoints of encoders: ``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..arguments import Integer, OneOf, flag, invalid_argument, text, token_ids
from ..embedding import EmbeddingModel, RankedDocument, SequenceClassifier
from ..errors import RequestError
from .errors import ApiError, api_error
from .fields import Field, any_text, check_fields
from .json_data import json_bytes
from .json_shapes import STRING, accepts, array, fields, one_of, shape_of
from .request_body import read_json
from .served_model import ServedModel
from .worker import Worker

MAX_TEXTS = 2048  # of a request, as OpenAI has it


_INPUT = (shape_of(text), array({"type": "integer", "minimum": 0}))


@accepts(one_of(*_INPUT, array(one_of(*_INPUT), 1, MAX_TEXTS)))
def _inputs(name: str, value: Any) -> list[str | tuple[int, ...]]:
    """A non-empty string or token ids, or a list of them."""
    several = isinstance(value, list) and value and isinstance(value[0], (str, list))
    found = value if several else [value]
    if len(found) > MAX_TEXTS:
        raise invalid_argument(name, value, f"at most {MAX_TEXTS} texts")
    if not all(found) or not all(isinstance(each, (str, list)) for each in found):
        raise invalid_argument(name, value, "a non-empty string or token ids, or a list of them")
    return [each if isinstance(each, str) else token_ids(name, each) for each in found]


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
    "input": Field(_inputs),
    "encoding_format": Field(OneOf(("float", "base64"))),
    "dimensions": Field(Integer(1)),
}


RERANK = {
    "model": Field(any_text),
    "query": Field(any_text),
    "documents": Field(_documents),
    "texts": Field(_documents),
    "top_n": Field(Integer(1)),
    "return_documents": Field(flag),
    "return_text": Field(flag),
    "truncate": Field(flag),
}


class EncoderEndpoint:
    """Base class of the endpoint of one encoder, which runs one request at a time.

    Args:
        served: how the model is served.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._worker = Worker("encoder")

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
            ApiError: too many requests wait, a text is too long, or a token id is unknown.
        """
        try:
            body = await self._worker.run(request.receive, compute)
        except RequestError as error:
            if error.argument != "truncate":
                raise api_error(error, field) from None
            text = str(error).replace("texts[", f"{field}[", 1)
            raise ApiError(400, text, field, "context_length_exceeded") from None
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

    def _compute(self, inputs: Sequence[str | tuple[int, ...]], form: str) -> bytes:
        """Return the body of the response."""
        ids = [self._model.tokens(x)[0] if isinstance(x, str) else list(x) for x in inputs]
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
        """``/v1/rerank``, as Jina, Cohere, vLLM and llama.cpp have it.

        With ``texts`` instead of ``documents``, as text-embeddings-inference has it.
        """
        values = await self._read(request, RERANK, "query")
        given = [name for name in ("documents", "texts") if name in values]
        if not given:
            text = "documents is missing"
            raise ApiError(400, text, "documents", "missing_required_parameter")
        if len(given) > 1:
            raise ApiError(400, "give documents or texts, not both", "texts")
        make = self._scores if given == ["texts"] else self._results
        return await self._run(request, partial(make, values), given[0])

    def _ranked(self, values: Mapping[str, Any], documents: Sequence[str]) -> list[RankedDocument]:
        return self._model.rerank(
            values["query"], documents, top_k=values.get("top_n"),
            truncate=values.get("truncate", False), progress=False,
        )  # fmt: skip

    def _scores(self, values: Mapping[str, Any]) -> bytes:
        """Return the body of the response to a request with ``texts``."""
        texts, shown = values["texts"], values.get("return_text", False)
        return json_bytes([
            {"index": each.index, "score": each.score}
            | ({"text": texts[each.index]} if shown else {})
            for each in self._ranked(values, texts)
        ])  # fmt: skip

    def _results(self, values: Mapping[str, Any]) -> bytes:
        """Return the body of the response to a request with ``documents``."""
        documents, shown = values["documents"], values.get("return_documents", False)
        results = [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": documents[each.index]}} if shown else {})
            for each in self._ranked(values, documents)
        ]
        tokens = self._model.count_tokens([(values["query"], text) for text in documents])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        made = {"object": "list", "model": self._served.name, "results": results, "usage": usage}
        return json_bytes({"id": "rerank-" + secrets.token_hex(12), **made})
