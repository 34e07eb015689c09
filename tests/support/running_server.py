"""An HTTP server of a loaded model, in a thread."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from typing import Any

from starlette.types import ASGIApp

import graphllm
from graphllm.server.app import create_app
from graphllm.server.run_server import Server, bind

KEY, MODEL = "secret", "tiny"


class Running:
    """A server in a thread, of a model or of another application."""

    def __init__(
        self, llm: graphllm.LLM, shutdown_s: int = 10, app: ASGIApp | None = None, **options: Any
    ) -> None:
        bound = bind("127.0.0.1", 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of each connection
        self.port, ready = bound.getsockname()[1], threading.Event()
        self.server = Server(app or create_app(llm, MODEL, **options), bound, ready.set, shutdown_s)
        self.thread = threading.Thread(target=self.server.run_until_stopped, daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(
        self, path: str, body: Any = None, key: str | None = KEY, **headers: str
    ) -> tuple[int, Any]:
        """Status and JSON value (or text) of a response; ``body``: JSON, or bytes as they are."""
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | headers
        sent |= {} if key is None else {"Authorization": f"Bearer {key}"}
        connection = self.connect()
        connection.request("GET" if body is None else "POST", path, data, sent)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        kind = response.headers["content-type"]
        return response.status, json.loads(text) if kind == "application/json" else text

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The objects of a stream, which ends with [DONE]."""
        status, text = self.call(path, {**body, "stream": True})
        assert status == 200 and text.endswith("\n\ndata: [DONE]\n\n")
        return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
