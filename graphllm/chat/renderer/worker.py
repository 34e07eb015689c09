"""Main loop of the rendering process, which serves requests on standard input and output.

The operating system enforces the limits of each request: CPU time by a timer whose signal ends the
process, memory by the limit of the address space. They hold for everything that a template does,
including its compilation.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import sys
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError

from .protocol import LENGTH_BYTES, MAX_CPU_S, MAX_MEMORY_BYTES, MAX_TEXT_BYTES, OUT_OF_MEMORY
from .provenance import caller_spans, concat, track
from .sandbox import TemplateEnvironment

MAX_TEMPLATES = 8  # compiled templates kept
MAX_ERROR_CHARS = 1000

# Roles that a template may use in control tokens, as in '<|' + message.role + '|>'.
ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython",
     "observation", "environment")
)  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE_TEXT = "probe7Q"


class Renderer:
    """Compiles and caches templates, and renders chats."""

    def __init__(self) -> None:
        self._environment = TemplateEnvironment()
        self._templates: dict[str, Template] = {}
        self._forms: dict[str, str] = {}

    def reply(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request: its header and the rendered text."""
        try:
            template = self._compiled(request["source"])
            if "messages" not in request:
                return {}, b""
            text = self._render(template, request)
        except TemplateSyntaxError as error:
            return {"syntax": True, "error": f"line {error.lineno}: {_line(error)}"}, b""
        except MemoryError:
            raise
        except Exception as error:  # a template's expressions may raise anything
            return {"error": _line(error)}, b""
        origin = caller_spans(text)
        data = _SURROGATE.sub("\ufffd", text).encode()
        if len(data) > MAX_TEXT_BYTES:
            return {"error": f"the prompt is larger than {MAX_TEXT_BYTES} bytes"}, b""
        return {"content": origin}, data

    def warm_up(self) -> None:
        """Trigger the lazy imports of Jinja2 and Python: later no file can be opened."""
        values = {"tokens": {}, "variables": {}, "messages": [{"role": "user", "content": ""}]}
        for source in (
            "{{ strftime_now('%c') ~ lipsum(1) ~ messages | pprint | wordwrap | striptags }}",
            "{{ 'é\\n'.x.y }}",  # raises an error
        ):
            self.reply({"source": source, **values})

    def _compiled(self, source: str) -> Template:
        if source not in self._templates:
            if len(self._templates) == MAX_TEMPLATES:
                self._templates.clear()
                self._forms.clear()
            self._templates[source] = self._environment.from_string(source)
        return self._templates[source]

    def _render(self, template: Template, request: dict[str, Any]) -> str:
        tokens, source = request["tokens"], request["source"]
        if source not in self._forms:
            self._forms[source] = _content_form(template, tokens)
        messages = [
            {**track(message), "role": message["role"]}
            if message["role"] in ROLES
            else track(message)
            for message in to_content_form(request["messages"], self._forms[source])
        ]
        return _text(template, messages, {**tokens, **track(request["variables"])})


def _text(template: Template, messages: list[Any], values: dict[str, Any]) -> str:
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **values}
    return concat(template.generate(messages=messages, **given))


def _content_form(template: Template, tokens: dict[str, str]) -> str:
    """Return the form of message content that the template reads: ``text``, ``parts`` or ``any``.

    A message is rendered in both forms to find out. A template that rejects both gets ``text``.
    """
    shown = []
    for content in (_PROBE_TEXT, [{"type": "text", "text": _PROBE_TEXT}]):
        try:
            text = _text(template, [{"role": "user", "content": content}], tokens)
        except Exception:
            text = ""
        shown.append(text if text.count(_PROBE_TEXT) and "'type'" not in text else "")
    as_text, as_parts = shown
    if as_parts and not as_text:
        return "parts"
    return "any" if as_text and as_parts == as_text else "text"


def to_content_form(messages: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Return the messages with their contents in the form that the template reads."""
    changed = []
    for message in messages:
        content = message.get("content")
        if form == "text" and isinstance(content, list):
            message = {**message, "content": "\n".join([part["text"] for part in content])}
        elif form == "parts" and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        changed.append(message)
    return changed


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (TemplateError, SyntaxError)):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


class ResourceLimits:
    """Context manager that limits CPU time and memory while a request runs.

    Enter it once the request is in memory: the memory limit is relative to the current size.
    """

    def __init__(self) -> None:
        self._pages = os.open("/proc/self/statm", os.O_RDONLY)
        self._start = self._used()
        for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC"):
            resource.setrlimit(getattr(resource, name), (0, 0))  # files already open stay usable

    def _used(self) -> int:
        """Return the size of the address space in bytes."""
        return int(os.pread(self._pages, 100, 0).split()[0]) * resource.getpagesize()

    def __enter__(self) -> None:
        limit, most = self._used() + MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    @property
    def exceeded_growth(self) -> bool:
        """Whether earlier requests have grown the process so much that it must be replaced."""
        return self._used() > self._start + MAX_MEMORY_BYTES


def _read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(size - len(data), 1 << 20))
        if not piece:  # the client has ended
            sys.exit()
        data += piece
    return bytes(data)


def _write(header: dict[str, Any], text: bytes = b"") -> None:
    head = json.dumps(header).encode()
    data = memoryview(
        b"".join([len(part).to_bytes(LENGTH_BYTES, "little") for part in (head, text)])
        + head
        + text
    )
    while data:
        data = data[os.write(1, data) :]


def main() -> NoReturn:
    """Serve requests until standard input is closed."""
    for number in (signal.SIGINT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    renderer = Renderer()
    renderer.warm_up()
    limits = ResourceLimits()
    gc.freeze()
    _write({"ready": True})
    while True:
        size = int.from_bytes(_read(LENGTH_BYTES), "little")
        request = json.loads(_read(size))
        try:
            with limits:
                header, text = renderer.reply(request)
                header["last"] = limits.exceeded_growth
                _write(header, text)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        if header["last"]:
            sys.exit()
        del request, text
