"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..env import debug_level
from ..errors import GraphllmError, OutOfMemory, RequestError
from ..terminal import escape_control, note
from .json_data import json_bytes


class ApiError(Exception):
    """An error that a client gets.

    Args:
        status: HTTP status code.
        message: one line.
        param: field of the request that the error is about.
        code: OpenAI's code of the error.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The object that the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        known = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": known}

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(json_bytes(self.body), self.status, self.headers, "application/json")


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """Return the error that a client gets for an exception.

    Invalid requests are explained. Failures of the server are printed on standard error, and the
    client learns only that they happened.

    Args:
        error: the exception.
        param: field of the request that the error is about, if the exception names none.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError) and not isinstance(error, OutOfMemory):
        if error.argument == "context":
            return ApiError(400, str(error), param, "context_length_exceeded")
        return ApiError(400, str(error), error.argument or param)
    kind = "" if isinstance(error, GraphllmError) else f"{type(error).__name__}: "
    note(f"error: {kind}{escape_control(error)}")
    if debug_level():
        traceback.print_exception(error)
    return ApiError(500, "the server failed to process the request; its log says why")


def stopping() -> ApiError:
    """Return the error of a request that a stopping server cancels."""
    return ApiError(503, "the server is shutting down", code="server_stopping")
