"""The endpoint of an encoder: ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..arguments import Integer, OneOf, invalid_argument
from ..embedding import EmbeddingModel
from ..errors import RequestError
from .errors import ApiError
from .fields import Field, any_text, check_fields
from .json_data import json_bytes
from .request_body import read_json
from .streaming import until_disconnect

MAX_TEXTS = 2048  # of a request, as OpenAI has it
MAX_PENDING = 64  # requests that run or wait; more are refused


def _texts(name: str, value: Any) -> list[str]:
    """A non-empty string, or a list of them."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(x, str) and x for x in found):
        raise invalid_argument(name, value, "a non-empty string, or a list of them")
    if len(found) > MAX_TEXTS:
        raise invalid_argument(name, value, f"at most {MAX_TEXTS} strings")
    return found


EMBEDDING = {
    "model": Field(any_text),
    "input": Field(_texts),
    "encoding_format": Field(OneOf(("float", "base64"))),
    "dimensions": Field(Integer(1)),
}


class Embeddings:
    """Computes embeddings with one encoder.

    Args:
        model: the encoder.
        name: its name in the API.
        max_body: bytes of a request body at most.
    """

    def __init__(self, model: EmbeddingModel, name: str, max_body: int) -> None:
        self._model, self._name, self._max_body = model, name, max_body
        self._pending = 0
        self._worker = ThreadPoolExecutor(1, "embeddings")  # the model runs one call at a time

    async def embed(self, request: Request) -> Response:
        """``/v1/embeddings``."""
        values = check_fields(EMBEDDING, await read_json(request, self._max_body), "input")
        name, dim = values.get("model", self._name), self._model.dim
        if name != self._name:
            text = f"the model {name[:100]!r} does not exist; this server has {self._name!r}"
            raise ApiError(404, text, "model", "model_not_found")
        if values.get("dimensions", dim) != dim:
            text = f"the embeddings of the model have {dim} dimensions"
            raise ApiError(400, text, "dimensions", "unsupported_value")
        if self._pending >= MAX_PENDING:
            text = "the server has too many requests; try again later"
            raise ApiError(503, text, code="server_overloaded", headers={"retry-after": "1"})
        self._pending += 1
        form = values.get("encoding_format", "float")
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._worker, self._compute, values["input"], form)
        try:
            body = await until_disconnect(request.receive, work)
        except RequestError as error:
            if error.argument != "truncate":
                raise
            text = str(error).replace("texts[", "input[", 1)
            raise ApiError(400, text, "input", "context_length_exceeded") from None
        finally:
            self._pending -= 1
        return Response(body, media_type="application/json")

    def _compute(self, texts: Sequence[str], form: str) -> bytes:
        """Return the body of the response."""
        tokens = sum(len(self._model.encode(text)) for text in texts)
        vectors = self._model.embed(list(texts), truncate=False)
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
        return json_bytes({"object": "list", "data": data, "model": self._name, "usage": usage})
