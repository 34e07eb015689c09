"""CPU time of HTTP, which a server and a client on the cores of the engine take from it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from ..backends.cpu.runtime.cores import usable_cores

_EVENT = {
    "id": "cmpl-0123456789abcdef01234567",
    "object": "text_completion",
    "created": 1_700_000_000,
    "model": "demo",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}
# CPU time of the server's event loop and of the client of `bench --url`, in times of `_event_s`:
# measured with 16 streams of the demo on two cores of an EPYC, see docs/design/profiling.md.
_TOKEN_EVENTS, _REQUEST_EVENTS = 24.0, 770.0
_REPEATS, _EVENTS = 20, 50


@dataclass(frozen=True)
class HttpCosts:
    """CPU seconds of a server's event loop and of a client on the same machine.

    Attributes:
        token_s: per sampled token.
        request_s: per request, besides that of its tokens.
    """

    token_s: float
    request_s: float

    @classmethod
    def on_shared_cores(cls, threads: int) -> HttpCosts | None:
        """Return the costs on this machine, if ``threads`` threads of an engine use all cores.

        None: there is a core left for HTTP.
        """
        if threads < usable_cores():
            return None
        unit = min(_event_s() for _ in range(_REPEATS))
        return cls(_TOKEN_EVENTS * unit, _REQUEST_EVENTS * unit)


def _event_s() -> float:
    """Return the CPU seconds of encoding and parsing the JSON of one event, the speed of Python."""
    began = time.thread_time()
    for _ in range(_EVENTS):
        json.loads(json.dumps(_EVENT))
    return (time.thread_time() - began) / _EVENTS
