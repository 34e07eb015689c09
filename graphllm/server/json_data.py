"""JSON of requests and responses."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from starlette.responses import Response

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
SMALLEST_LOGPROB = -9999.0  # what OpenAI's API has for -inf, which JSON cannot express


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. ValueError: it is malformed."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def json_bytes(value: Any) -> bytes:
    """Return the JSON text of a value in UTF-8; a lone surrogate becomes a question mark."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def json_response(value: Any) -> Response:
    """Return a response with a JSON value."""
    return Response(json_bytes(value), media_type="application/json")


def json_logprob(value: float) -> float:
    """Return a log-probability as JSON can express it."""
    return value if math.isfinite(value) else SMALLEST_LOGPROB
