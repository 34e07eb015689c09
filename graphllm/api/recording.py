"""Recorded requests: a JSON-lines file that a server writes, and that `graphllm replay` reads.

Each session of a server begins with a line ``{"recording": 1, ...}``, its head. A request is a line
``{"request": N, "arrival_s": ..., "prompt": ..., "sampling": ...}`` when it arrives, and a line
``{"answer": N, "tokens": [...], "finish_reason": [...]}``, with the ids of each sample, when it
ends. Every line is flushed, so that a killed process loses at most the end of the last one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..arguments import quote
from ..engine.completion import Completion
from ..engine.request import Sampling
from ..errors import RequestError
from ..version import __version__

FORMAT = 1
MAX_BYTES = 1 << 30  # of a recording
MAX_LINE = 64 << 20  # bytes


class Recording:
    """Writes requests and their answers to a file. One thread calls it.

    A file that cannot be written, or that is full, ends the recording, not the requests.
    """

    def __init__(
        self, path: Path, head: Mapping[str, Any], warn: Callable[[str], None],
        limit: int = MAX_BYTES,
    ) -> None:  # fmt: skip
        """Begin a session at the end of the file, which is created if it does not exist.

        Args:
            path: the file. Only its owner may read a new one.
            head: what an exact replay needs: ``model``, ``options``, the ``device`` in use, and
                ``speculate``.
            warn: called with a line if the recording ends early.
            limit: bytes of the file at most.

        Raises:
            RequestError: the file cannot be written, is no recording, or has a recording of
                another model or with other options.
        """
        self._path, self._warn, self._limit = path, warn, limit
        self._start, self._count = time.perf_counter_ns(), 0
        if path.exists() and path.stat().st_size:
            _check_same(path, head)
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._file: BinaryIO | None = os.fdopen(number, "r+b", buffering=0)
            self._size = self._file.seek(0, os.SEEK_END)
            if self._size and not _ends_with_newline(self._file):
                self._size += self._file.write(b"\n")
        except OSError as error:
            raise RequestError(f"--record {path}: {error.strerror}") from None
        self._write({"recording": FORMAT, "graphllm": __version__, **head})

    def request(
        self, prompt: str | Sequence[int], settings: Mapping[str, Any], arrived_ns: int
    ) -> int:
        """Record a request and return its number.

        Args:
            prompt: ids, or the text of an encoder-decoder's source.
            settings: fields of `Sampling`, with the seed.
            arrived_ns: its arrival, on the clock of `time.perf_counter_ns`.
        """
        self._count += 1
        arrival = round((arrived_ns - self._start) / 1e9, 6)
        values = {name: value for name, value in settings.items() if name != "profile"}
        own = prompt if isinstance(prompt, str) else list(prompt)
        request = {"request": self._count, "arrival_s": arrival, "prompt": own}
        self._write({**request, "sampling": values})
        return self._count

    def answer(self, number: int, choices: Sequence[Completion], error: str | None) -> None:
        """Record the samples of a request that has ended; ``error``: what ended it, if any."""
        tokens = [each.ids for each in choices]
        reasons = [each.finish_reason for each in choices]
        more = {"error": error} if error is not None else {}
        self._write({"answer": number, "tokens": tokens, "finish_reason": reasons, **more})

    def close(self) -> None:
        """End the recording."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        if self._size + len(line) > self._limit:
            self._end(f"it has reached {self._limit} bytes")
            return
        try:
            written = self._file.write(line)
        except OSError as error:
            self._end(str(error.strerror))
            return
        self._size += written
        if written < len(line):
            self._end("the disk is full")

    def _end(self, why: str) -> None:
        self.close()
        self._warn(f"--record {self._path}: the recording ends: {why}")


def _ends_with_newline(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _check_same(path: Path, head: Mapping[str, Any]) -> None:
    """Raise RequestError unless a file is a recording of the same model and options."""
    try:
        with path.open("rb") as file:
            first = _parse(file.readline(MAX_LINE), f"{path}:1")
    except OSError as error:
        raise RequestError(f"--record {path}: {error.strerror}") from None
    if first.get("recording") != FORMAT:
        raise RequestError(f"--record {path}: the file exists and is no recording")
    for name, value in json.loads(json.dumps(head)).items():
        if first.get(name) != value:
            was = quote(first.get(name))
            raise RequestError(
                f"--record {path}: the file has a recording with {name} = {was}, not {quote(value)}"
            )


# ------------------------------------------------------------------------------------------ reading


@dataclass
class RecordedRequest:
    """A request of a recording.

    Attributes:
        where: name of the file and number of the line.
        prompt: ids, or a text.
        sampling: settings, with the seed.
        tokens: ids of each sample; None if the recording has no answer.
        finish_reasons: of each sample.
        error: what ended the request, or empty.
    """

    where: str
    prompt: str | list[int]
    sampling: Sampling
    tokens: list[list[int]] | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class RecordedTraffic:
    """What a recording has.

    Attributes:
        version: version of graphllm that wrote its first session.
        model: the model, as the server's command line had it.
        options: options of loading that differ from their defaults.
        device: the device that was used; empty if the recording does not name it.
        speculate: ``--speculate`` of the server.
        requests: the requests, in the order of arrival.
        torn: lines that were cut off.
    """

    version: str
    model: str
    options: dict[str, Any]
    device: str
    speculate: str
    requests: list[RecordedRequest]
    torn: list[str]


def read_recording(path: Path) -> RecordedTraffic:
    """Read a recording; the last line of a session may be cut off.

    RequestError: the file cannot be read, or a line is invalid.
    """
    found: RecordedTraffic | None = None
    session: dict[int, RecordedRequest] = {}
    torn: tuple[str, RequestError] | None = None
    for where, data in _lines(path):
        try:
            value = _parse(data, where)
        except RequestError as error:
            if torn is not None:
                raise torn[1] from None
            torn = where, error
            continue
        if "recording" in value:
            found, session = _add_session(found, value, where), {}
        elif torn is not None:
            raise torn[1]  # in the middle of a session
        elif found is None:
            raise RequestError(f"{where}: not the head of a recording")
        else:
            _add(found, session, value, where)
        if torn is not None:
            found.torn.append(torn[0])
            torn = None
    if found is None:
        raise torn[1] if torn else RequestError(f"{path}: the file is empty")
    if torn is not None:
        found.torn.append(torn[0])
    return found


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE):
                number += 1
                yield f"{path}:{number}", data
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def _parse(data: bytes, where: str) -> dict[str, Any]:
    """Return the object of a line. RequestError: it has none, or no end."""
    if len(data) >= MAX_LINE:
        raise RequestError(f"{where}: the line has more than {MAX_LINE} bytes")
    if not data.endswith(b"\n"):
        raise RequestError(f"{where}: the line is cut off")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: not an object")
    return value


def _add_session(
    found: RecordedTraffic | None, head: Mapping[str, Any], where: str
) -> RecordedTraffic:
    """Begin a session. RequestError: its head is invalid, or is not that of the others."""
    if head["recording"] != FORMAT:
        raise RequestError(
            f"{where}: recording = {quote(head['recording'])}, this version reads {FORMAT}"
        )
    model, options, version = (head.get(name) for name in ("model", "options", "graphllm"))
    if not isinstance(model, str) or not isinstance(options, dict) or not isinstance(version, str):
        raise RequestError(f"{where}: the head has no model, options and graphllm")
    device, speculate = (str(head.get(name, "")) for name in ("device", "speculate"))
    if found is None:
        return RecordedTraffic(version, model, options, device, speculate or "off", [], [])
    if (model, options, device) != (found.model, found.options, found.device):
        raise RequestError(f"{where}: the session has another model, device, or other options")
    return found


def _add(
    found: RecordedTraffic, session: dict[int, RecordedRequest], value: Mapping[str, Any],
    where: str,
) -> None:  # fmt: skip
    """Add a request or an answer. RequestError: the line is neither, or is invalid."""
    number = value.get("request", value.get("answer"))
    if type(number) is not int or ("request" in value) == (number in session):
        raise RequestError(f"{where}: not a new request, nor the answer to one")
    if "request" in value:
        session[number] = _request(value, where)
        found.requests.append(session[number])
        return
    request, tokens, reasons = session[number], value.get("tokens"), value.get("finish_reason")
    if not isinstance(tokens, list) or not all(map(_are_ids, tokens)):
        raise RequestError(f"{where}: tokens is no list of lists of token ids")
    if not isinstance(reasons, list) or len(reasons) != len(tokens):
        raise RequestError(f"{where}: finish_reason is no list with one for each sample")
    if request.tokens is not None or not tokens:
        raise RequestError(f"{where}: request {number} is answered before, or has no sample")
    request.tokens, request.finish_reasons = tokens, [str(each) for each in reasons]
    request.error = str(value.get("error", ""))


def _request(value: Mapping[str, Any], where: str) -> RecordedRequest:
    prompt, settings = value.get("prompt"), value.get("sampling")
    if not isinstance(settings, dict) or not (isinstance(prompt, str) or _are_ids(prompt)):
        raise RequestError(f"{where}: the request has no prompt and sampling")
    try:
        biases = settings.get("logit_bias") or {}
        settings["logit_bias"] = {int(token): bias for token, bias in biases.items()}
        sampling = Sampling.from_arguments("a recording", settings)
    except (RequestError, ValueError, AttributeError) as error:
        raise RequestError(f"{where}: {error}") from None
    if sampling.seed is None:
        raise RequestError(f"{where}: the request has no seed")
    return RecordedRequest(where, prompt or [], sampling)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
