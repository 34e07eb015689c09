"""Load test of an OpenAI-compatible server: streamed completions that arrive over time.

Each request is sent when it is due, whatever the earlier ones do (open loop), by a thread of its
own. Times count from the scheduled arrival. A chunk of the stream counts as a token of the
inter-token latency; the number of tokens is the server's, if it reports the usage.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..engine.request import Sampling
from ..errors import RequestError
from .load_requests import LoadRequest
from .load_times import LoadTimes, RequestTimes

MAX_REQUESTS = 4096  # of a load, each of which may have a thread
_TIMEOUT_S = 600.0  # between two parts of an answer
_MAX_LINE, _MAX_BODY = 1 << 20, 1 << 20  # bytes of an event, and of another answer
_MAX_READ, _MAX_PENDING = 1 << 16, 1 << 20  # bytes that are read at once, and parsed later
_LAST = b"[DONE]"
_WARM_UP_TOKENS = 4
_SAMPLING = Sampling()  # as in a load test without a server


@dataclass(frozen=True)
class HttpLoadResult:
    """Result of a load test.

    Attributes:
        model: name of the model at the server.
        times: times of the requests that were answered; None if none was.
        failures: what went wrong, one line for each of the other requests.
    """

    model: str
    times: LoadTimes | None
    failures: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        own = {} if self.times is None else self.times.as_dict()
        return {"server_model": self.model, "failures": list(self.failures), **own}


class OpenAiServer:
    """A server at an address such as ``http://127.0.0.1:8080``, with or without ``/v1``.

    RequestError: the address is invalid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._parts = url, _parse_url(url)
        self._base = self._parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def is_local(self) -> bool:
        """Whether the address is one of this machine."""
        host = self._parts.hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def model(self) -> str:
        """Return the name of the server's first model. RequestError: it has none."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self._base}/models", headers=self._headers)
            response = connection.getresponse()
            body = response.read(_MAX_BODY)
            if response.status != 200:
                raise RequestError(f"{self._url}/models: {_status(response.status, body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{self._url}: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"{self._url}: the server lists no model") from None
        finally:
            connection.close()

    def complete(self, body: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
        """Stream a completion; return when each chunk came, and the usage, empty if unknown.

        Raises:
            RequestError: the server refuses it, or the stream has no token or no end.
            OSError, HTTPException: the connection failed.
        """
        connection = self._connect()
        try:
            data = json.dumps(body).encode()
            connection.request("POST", f"{self._base}/completions", data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(_status(response.status, response.read(_MAX_BODY)))
            found = _Stream()
            while not found.ended and (data := response.read1(_MAX_READ)):
                found.add(time.perf_counter(), data)
            found.parse()
            if found.ended:
                if not found.times:
                    raise RequestError("the stream has no token")
                return found.times, found.usage
            raise RequestError("the stream was cut off")
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        host = self._parts.hostname or ""
        return kind[self._parts.scheme](host, self._parts.port, timeout=_TIMEOUT_S)


class _Stream:
    """Events of a stream, which are parsed at its end.

    The client may run on the cores of the server, so it does as little as it can while the server
    computes.

    Attributes:
        times: when each event with text came.
        usage: the last usage; empty if there was none.
        ended: whether the last event came.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[float, bytes]] = []  # to be parsed
        self._pending, self._rest = 0, b""
        self.times, self.usage, self.ended = list[float](), dict[str, Any](), False

    def add(self, at: float, data: bytes) -> None:
        """Add data that came at a time. RequestError: see `parse`."""
        self._parts.append((at, data))
        self._pending += len(data)
        if self._pending > _MAX_PENDING or _LAST in data:
            self.parse()

    def parse(self) -> None:
        """Parse what came. RequestError: an event is malformed, too long or an error."""
        for at, data in self._parts:
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                raise RequestError(f"an event has more than {_MAX_LINE} bytes")
            for line in lines:
                self._parse_line(at, line)
        self._parts.clear()
        self._pending = 0

    def _parse_line(self, at: float, line: bytes) -> None:
        if not line.startswith(b"data:") or self.ended:
            return
        value = line[5:].strip()
        if value == _LAST:
            self.ended = True
            return
        event = _event(value)
        if any(choice.get("text") for choice in event["choices"]):
            self.times.append(at)
        self.usage = event["usage"] or self.usage


def _parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise RequestError(f"--url {url!r} must be http://HOST:PORT or https://HOST:PORT")
    return parts


def _status(status: int, body: bytes) -> str:
    return f"status {status}: {body[:200].decode('utf-8', 'replace')}"


def _event(data: bytes) -> dict[str, Any]:
    """Return an event with its choices and usage. RequestError: it is an error, or no event."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestError(f"an event is not JSON: {data[:100]!r}") from None
    if not isinstance(value, dict) or "error" in value:
        raise RequestError(f"an event is an error: {data[:200]!r}")
    choices, usage = value.get("choices") or [], value.get("usage") or {}
    listed = isinstance(choices, list) and all(isinstance(each, dict) for each in choices)
    if not listed or not isinstance(usage, dict):
        raise RequestError(f"an event is malformed: {data[:200]!r}")
    return {"choices": choices, "usage": usage}


def run(
    server: OpenAiServer, requests: Sequence[LoadRequest], parallel: int, seed: int,
    seen: Callable[[int], None],
) -> HttpLoadResult:  # fmt: skip
    """Run a load test.

    Args:
        server: the server.
        requests: the requests, in the order of arrival.
        parallel: number of requests of the last round of the warm-up, which computes 1, 2, 4, ...
            requests at once.
        seed: request i is sampled with ``seed + i``.
        seen: callback with the number of requests that have ended.

    Raises:
        RequestError: there are too many requests, or the server cannot be reached or refuses the
            warm-up.
    """
    if len(requests) > MAX_REQUESTS:
        raise RequestError(f"{len(requests)} requests are more than {MAX_REQUESTS}")
    model = server.model()
    _warm_up(server, model, requests, parallel)
    test = _Test(server, model, seed, seen)
    threads = []
    for index, request in enumerate(requests):
        time.sleep(max(0.0, test.start + request.arrival_s - time.perf_counter()))
        threads.append(Thread(target=test.send, args=(index, request), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return test.result(requests)


def _warm_up(
    server: OpenAiServer, model: str, requests: Sequence[LoadRequest], parallel: int
) -> None:
    """Run rounds of 1, 2, 4, ... requests at once, whose prompts are not those of the test."""
    count = 1
    while True:
        test = _Test(server, model, 0, lambda done: None)
        length = max(2, min(len(each.prompt) for each in requests))
        some = [LoadRequest(0.0, [3 + i % 200] * length, _WARM_UP_TOKENS) for i in range(count)]
        threads = [Thread(target=test.send, args=each, daemon=True) for each in enumerate(some)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if test.failures:
            raise RequestError(f"the server refuses the load: {test.failures[0]}")
        if count >= parallel:
            return
        count = min(2 * count, parallel)


class _Test:
    """Requests that were sent, and what came back.

    Attributes:
        start: time from which arrivals count.
        failures: what went wrong, one line a request.
    """

    def __init__(
        self, server: OpenAiServer, model: str, seed: int, seen: Callable[[int], None]
    ) -> None:
        self._server, self._model, self._seed, self._seen = server, model, seed, seen
        self.start = time.perf_counter()
        self.failures: list[str] = []
        self._found: dict[int, RequestTimes] = {}
        self._mutex = Lock()

    def send(self, index: int, request: LoadRequest) -> None:
        """Send a request, and wait for its end."""
        body = {
            "model": self._model, "prompt": request.prompt, "max_tokens": request.max_tokens,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "temperature": _SAMPLING.temperature, "top_k": _SAMPLING.top_k,
            "top_p": _SAMPLING.top_p, "seed": self._seed + index,
        }  # fmt: skip
        try:
            times, usage = self._server.complete(body)
        except (OSError, http.client.HTTPException, RequestError) as error:
            with self._mutex:
                self.failures.append(f"request {index}: {error or type(error).__name__}")
        else:
            own = RequestTimes.of(
                arrival_s=request.arrival_s,
                started_s=None,
                times=[at - self.start for at in times],
                prompt_tokens=_count(usage, "prompt_tokens", len(request.prompt)),
                output_tokens=_count(usage, "completion_tokens", len(times)),
            )
            with self._mutex:
                self._found[index] = own
        self._seen(len(self._found) + len(self.failures))

    def result(self, requests: Sequence[LoadRequest]) -> HttpLoadResult:
        """Return the result; all requests have ended."""
        times = [self._found[index] for index in sorted(self._found)]
        if not times:
            return HttpLoadResult(self._model, None, self.failures)
        end = max(each.arrival_s + each.end_s for each in times)
        found = LoadTimes(times, end - requests[0].arrival_s)
        return HttpLoadResult(self._model, found, self.failures)


def _count(usage: Mapping[str, Any], name: str, default: int) -> int:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else default
