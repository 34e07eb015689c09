"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, or Anthropic's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.responses import Response

from ..env import debug_level
from ..errors import ContextExceeded, GraphllmError, OutOfMemory, RequestError
from ..terminal import escape_control, note
from .json_data import json_bytes

ANTHROPIC = "/v1/messages"  # beginning of the paths of Anthropic's API
OPENAI = "/v1/"  # of OpenAI's; the others are llama.cpp's
_INVALID = "invalid_request_error"
_CONTEXT = "context_length_exceeded"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_LLAMA_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    503: "unavailable_error",
}


# Folders of served models and of their chat templates, each with a slash at its end.
_hidden: set[str] = set()


def hide_folder(path: Path) -> None:
    """Let errors that clients get name the file ``path`` without its folder.

    A relative path is hidden in its absolute form, too.
    """
    for folder in (path.parent, path.absolute().parent):
        if folder.parent != folder:
            _hidden.add(f"{folder}/")


def _without_folders(text: str) -> str:
    # The longest first, as a nested folder begins with the name of its parent; and only where a
    # path begins, as another path may hold the same names.
    folders = sorted(_hidden, key=len, reverse=True)
    for before, is_absolute in (("", True), ("/", False)):
        own = [re.escape(each) for each in folders if each.startswith("/") == is_absolute]
        text = re.sub(rf"(?<![\w.{before}-])(?:{'|'.join(own)})", "", text) if own else text
    return text


class ApiError(Exception):
    """An error that a client gets.

    Args:
        status: HTTP status code.
        message: one line.
        param: field of the request that the error is about.
        code: OpenAI's code of the error.
        headers: further headers of the response.
        details: further keys of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self._details = dict(headers or {}), details or {}

    @property
    def body(self) -> dict[str, Any]:
        """The object that the client gets."""
        kind = "server_error" if self.status >= 500 else _INVALID
        known = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**known, **self._details}}

    def response(self, path: str) -> Response:
        """Return the HTTP response to a request for ``path``, whose API the error's shape is of."""
        body = self.body
        if path.startswith(ANTHROPIC):
            body = anthropic_body(self)
        elif not path.startswith(OPENAI):
            body["error"]["type"] = self._llama_type
        return Response(json_bytes(body), self.status, self.headers, "application/json")

    @property
    def _llama_type(self) -> str:
        """The type of the error in llama.cpp's server."""
        if self.code == _CONTEXT:
            return "exceed_context_size_error"
        return _LLAMA_TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the object of an error in Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else _INVALID)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """Return the error that a client gets for an exception.

    Invalid requests are explained, without the folders of models. Failures of the server are
    printed on standard error, and the client learns only that they happened.

    Args:
        error: the exception.
        param: field of the request that the error is about, if the exception names none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextExceeded):
        counts = {"n_prompt_tokens": error.tokens, "n_ctx": error.context}
        text = f"the prompt has {error.tokens} tokens, which exceeds the available context size"
        text += f" ({error.context} tokens)"
        return ApiError(400, text, param, _CONTEXT, details=counts)
    if isinstance(error, RequestError) and not isinstance(error, OutOfMemory):
        text = _without_folders(str(error))
        if error.argument == "context":
            return ApiError(400, text, param, _CONTEXT)
        return ApiError(400, text, error.argument or param)
    log_failure(error)
    return ApiError(500, "the server failed to process the request; its log says why")


def log_failure(error: Exception, what: str = "") -> None:
    """Print a failure of the server on standard error; ``what``: what failed."""
    kind = "" if isinstance(error, GraphllmError) else f"{type(error).__name__}: "
    note(f"error: {what and f'{escape_control(what)}: '}{kind}{escape_control(error)}")
    if debug_level():
        traceback.print_exception(error)


def overloaded() -> ApiError:
    """Return the error of a request that would have to wait behind too many others."""
    text = "the server has too many requests; try again later"
    return ApiError(503, text, code="server_overloaded", headers={"retry-after": "1"})


def stopping() -> ApiError:
    """Return the error of a request that a stopping server cancels."""
    return ApiError(503, "the server is shutting down", code="server_stopping")
