"""``/tokenize`` and ``/detokenize``, as llama.cpp's server has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..tokenizer import Tokenizer
from .fields import check_fields
from .json_data import json_bytes
from .llama_fields import DETOKENIZE, TOKENIZE
from .request_body import read_json
from .worker import Worker


class TokenizerEndpoints:
    """The endpoints of one tokenizer.

    They have a thread of their own: long texts in the threads of all requests would keep chats from
    being encoded.
    """

    def __init__(self, tokenizer: Tokenizer, max_body: int) -> None:
        self._tokenizer, self._max_body = tokenizer, max_body
        self._worker = Worker("tokenizer")

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``, as llama.cpp has it, but special tokens are text by default."""
        values = check_fields(TOKENIZE, await read_json(request, self._max_body), "content")
        body = await self._worker.run(request.receive, partial(self._tokens, values))
        return Response(body, media_type="application/json")

    def _tokens(self, values: Mapping[str, Any]) -> bytes:
        """Return the body of ``/tokenize``. The JSON text of each token is made once."""
        add, parse = values.get("add_special", False), values.get("parse_special", False)
        ids = self._tokenizer.encode(values["content"], add_special=add, parse_special=parse)
        pieces = values.get("with_pieces", False)
        known = {
            token: json_bytes({"id": token, "piece": self._piece(token)} if pieces else token)
            for token in dict.fromkeys(ids)
        }
        return b'{"tokens":[%b]}' % b",".join([known[token] for token in ids])

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
        body = await self._worker.run(request.receive, partial(self._text, values["tokens"]))
        return Response(body, media_type="application/json")

    def _text(self, ids: tuple[int, ...]) -> bytes:
        """Return the body of ``/detokenize``."""
        return json_bytes({"content": self._tokenizer.decode(ids, skip_special=False)})
