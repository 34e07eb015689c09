"""Bills of requests over HTTP: ``x_profile`` of a request, and of its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from ..engine.completion import Completion
from .errors import ApiError

FIELD = "x_profile"
_HEADER = "x-profile"


def note_arrival(request: Request) -> None:
    """Note the time from which a request counts; a later call for it changes nothing."""
    state = request.scope.setdefault("state", {})  # that of `Request.state`
    state.setdefault("arrived_ns", time.perf_counter_ns())


def asks_bill(request: Request, settings: Mapping[str, Any], prompts: int) -> bool:
    """Return whether a request asks for a bill, by its header or the field.

    ApiError: it asks for one, and has several prompts.
    """
    given = request.headers.get(_HEADER, "0")
    if given not in ("0", "1"):
        raise ApiError(400, "X-Profile must be 0 or 1", FIELD)
    asks = given == "1" or settings.get("profile", False)
    if asks and prompts > 1:
        raise ApiError(400, f"{FIELD} needs a single prompt", FIELD)
    return asks


def bill_field(request: Request, done: Sequence[Completion]) -> dict[str, Any]:
    """Return the field of the answer to a request that asks for a bill.

    What is left of the time since the arrival is charged to ``http``.
    """
    bill = done[0].bill
    if bill is None:
        return {}
    wall = time.perf_counter_ns() - request.state.arrived_ns
    return {FIELD: replace(bill, http_ns=max(0, wall - bill.wall_ns)).as_dict()}
