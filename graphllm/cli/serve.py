"""The verb ``serve``: an HTTP server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import escape_control, note
from .declarations import Option, verb
from .options import GenerationLoadOptions, read_text
from .request_defaults import RequestDefaults
from .served_models import ServedModels

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ..api.recording import Recording

# How long the event loop and the engine's thread wait for each other's Python code at most.
_SWITCH_INTERVAL_S = 0.0005
_MODULES = ("prometheus_client", "starlette", "uvicorn", "uvloop")


@dataclass
class ObservationOptions:
    """What a server measures and records of its requests."""

    profile: Annotated[
        bool,
        Option("--profile", help="Count the time of all requests by op in /metrics."),
    ] = False
    record: Annotated[
        Path | None,
        Option("--record", help="Append requests and answers to this file; see `graphllm replay`."),
    ] = None

    def recording(
        self, model: str, options: GenerationLoadOptions, llm: object
    ) -> Recording | None:
        """Begin the recording, if one is asked for.

        Args:
            model: the model of the command line.
            options: options of loading.
            llm: the loaded model.

        Raises:
            RequestError: the file cannot be used, or the model is an encoder.
        """
        from ..api import LLM
        from ..api.recording import Recording
        from .replay import recorded_options

        if self.record is None and not self.profile:
            return None
        if not isinstance(llm, LLM):
            raise RequestError("--record and --profile need a model that generates text")
        if self.record is None:
            return None
        path = Path(model)
        own = str(path.resolve()) if path.exists() else model
        speculate = "auto" if options.draft and options.speculate == "off" else options.speculate
        head = {"model": own, "options": recorded_options(options), "device": llm.device,
                "speculate": speculate}  # fmt: skip
        return Recording(self.record, head, lambda line: note(f"warning: {line}"))


@verb
def serve(
    models: ServedModels,
    load_options: GenerationLoadOptions,
    defaults: RequestDefaults,
    observation: ObservationOptions,
    host: Annotated[str, Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", help="Port; 0 chooses a free one.")] = 8080,
    unix_socket: Annotated[
        Path | None,
        Option("--unix-socket", help="Listen on a Unix socket at this path instead of a port."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        Option(
            "--api-key",
            help="Key that requests need; may be repeated. Other users of the machine can see it "
            "in the list of processes: prefer --api-key-file.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, Option("--api-key-file", help="File with one key per line.")
    ] = None,
    max_body: Annotated[
        int, Option("--max-body", help="Maximum number of bytes of a request body.")
    ] = 10_000_000,
    shutdown_timeout: Annotated[
        int,
        Option(
            "--shutdown-timeout",
            help="Seconds that running requests have to end after SIGTERM or Ctrl-C.",
        ),
    ] = 30,
) -> None:
    """Serve models over HTTP with the APIs of OpenAI and Anthropic.

    graphllm serve demo --port 8080

    graphllm serve model.gguf --parallel 32 --api-key-file keys.txt

    graphllm serve --model chat=model.gguf --model embed=minilm --model-memory 8GB
    """
    if missing := [name for name in _MODULES if find_spec(name) is None]:
        raise RequestError(f"serve needs {', '.join(missing)}: pip install 'graphllm[serve]'")
    if min(port, max_body, shutdown_timeout) < 0:
        raise RequestError("--port, --max-body and --shutdown-timeout must be at least 0")
    keys = _keys(api_key or [], api_key_file)
    models.check(load_options, observation.record is not None)
    settings = defaults.settings()
    from ..server.run_server import Server, bind, bind_unix

    # Before a model is loaded, which takes longer.
    with bind(host, port) if unix_socket is None else bind_unix(unix_socket) as bound:
        app, close = _application(models, load_options, observation, keys, max_body, settings)
        where = _address(bound, bool(keys))
        listed = escape_control(", ".join(models.names))
        line = f"{listed} {'are' if models.others else 'is'} served at {where}"
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        Server(app, bound, lambda: note(line), shutdown_timeout).run_until_stopped()
        close()


def _address(bound: socket.socket, has_keys: bool) -> str:
    """Return where clients find the server; print a note if others can use it without a key."""
    if bound.family == socket.AF_UNIX:
        return f"the Unix socket {escape_control(bound.getsockname())}"
    address, port = bound.getsockname()[:2]
    if not has_keys and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        note(f"note: no API key is set: anyone who can reach {address} can use the model")
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"


def _application(
    models: ServedModels, options: GenerationLoadOptions, observation: ObservationOptions,
    keys: list[str], max_body: int, defaults: dict[str, Any],
) -> tuple[ASGIApp, Callable[[], None]]:  # fmt: skip
    """Return the application of the models, and what closes them."""
    if models.others:
        from ..server.model_router import ModelRouter

        router = ModelRouter(
            models.sources(options), keys, max_body, observation.profile, models.budget,
            models.load_timeout, defaults,
        )  # fmt: skip
        if models.model is not None:
            with progress_line() as show:
                router.pool.load_first(models.names[0], show)
        return router.app, router.pool.close
    from ..server.app import create_app

    assert models.model is not None
    llm = models.load(models.model, options)
    recording = observation.recording(models.model, options, llm)
    app = create_app(
        llm, models.names[0], keys, max_body, observation.profile, recording, models.aliases,
        defaults,
    )  # fmt: skip

    def close() -> None:
        llm.close()
        if recording is not None:
            recording.close()

    return app, close


def _keys(given: list[str], file: Path | None) -> list[str]:
    """Return all API keys. RequestError: a key is empty or no plain text, or a file has none."""
    listed = [] if file is None else [line.strip() for line in read_text(file).splitlines()]
    keys = [*given, *filter(None, listed)]
    for key in keys:
        if not key.isascii() or not key.isprintable() or not key or " " in key:
            raise RequestError("an API key must be printable ASCII characters without spaces")
    if file is not None and not any(listed):
        raise RequestError(f"{file} has no API key")
    return keys
