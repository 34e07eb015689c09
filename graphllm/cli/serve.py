"""The verb ``serve``: an HTTP server with the API of OpenAI."""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import escape_control, note
from .declarations import Option, verb
from .options import GenerationLoadOptions, Model, Template, read_text
from .run import PARALLEL

if TYPE_CHECKING:
    from ..api import LLM
    from ..api.recording import Recording
    from ..embedding import EmbeddingModel, SequenceClassifier

# How long the event loop and the engine's thread wait for each other's Python code at most.
_SWITCH_INTERVAL_S = 0.0005
_MODULES = ("prometheus_client", "starlette", "uvicorn")


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

        if not isinstance(llm, LLM) and (self.profile or self.record is not None):
            raise RequestError("--record and --profile need a model that generates text")
        if self.record is None:
            return None
        path = Path(model)
        own = str(path.resolve()) if path.exists() else model
        head = {"model": own, "options": recorded_options(options)}
        return Recording(self.record, head, lambda line: note(f"warning: {line}"))


@verb
def serve(
    model: Model,
    load_options: GenerationLoadOptions,
    observation: ObservationOptions,
    host: Annotated[str, Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", help="Port; 0 chooses a free one.")] = 8080,
    parallel: Annotated[
        int, Option("--parallel", help="Number of sequences that are computed at once.")
    ] = PARALLEL,
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
    alias: Annotated[
        str | None,
        Option("--alias", help="Name of the model in the API; its file name by default."),
    ] = None,
    chat_template: Template = None,
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
    """Serve a model over HTTP with the API of OpenAI.

    graphllm serve demo --port 8080

    graphllm serve model.gguf --parallel 32 --api-key-file keys.txt
    """
    if missing := [name for name in _MODULES if find_spec(name) is None]:
        raise RequestError(f"serve needs {', '.join(missing)}: pip install 'graphllm[serve]'")
    if min(port, max_body, shutdown_timeout) < 0:
        raise RequestError("--port, --max-body and --shutdown-timeout must be at least 0")
    keys = _keys(api_key or [], api_key_file)
    from ..server.app import create_app
    from ..server.run_server import Server, bind

    bound = bind(host, port)  # before the model is loaded, which takes longer
    llm = _load(model, load_options, chat_template, parallel)
    name = alias or _name(model)
    address, own_port = bound.getsockname()[:2]
    if not keys and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        note(f"note: no API key is set: anyone who can reach {address} can use the model")
    where = f"[{address}]" if ":" in address else address
    line = f"{escape_control(name)} is served at http://{where}:{own_port}/v1"
    recording = observation.recording(model, load_options, llm)
    app = create_app(llm, name, keys, max_body, observation.profile, recording)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    Server(app, bound, lambda: note(line), shutdown_timeout).run_until_stopped()
    llm.close()
    if recording is not None:
        recording.close()


def _load(
    model: str, options: GenerationLoadOptions, chat_template: str | None, parallel: int
) -> LLM | EmbeddingModel | SequenceClassifier:
    from ..api.loader import encoder_class

    if options.model_def is None and encoder_class(model) is not None:
        return _load_encoder(model, options, chat_template, parallel)
    llm = options.load(model, chat_template=chat_template, max_sequences=parallel)
    # `llm.tokenizer` raises if there is none.
    if llm.tokenizer.eog_ids and find_spec("llguidance") is not None:
        from ..engine.grammar import prepare

        prepare(llm.tokenizer)  # takes up to seconds, in which other requests would wait
    return llm


def _load_encoder(
    model: str, options: GenerationLoadOptions, chat_template: str | None, parallel: int
) -> EmbeddingModel | SequenceClassifier:
    """Load an encoder.

    Raises:
        RequestError: an option is given that only decoders have, or the model has a head.
    """
    from ..api import load
    from ..embedding import EmbeddingModel, SequenceClassifier

    given = {**options.arguments(), "chat_template": chat_template, "max_sequences": parallel}
    defaults = {
        **GenerationLoadOptions().arguments(),
        "chat_template": None,
        "max_sequences": PARALLEL,
    }
    changed = {name: value for name, value in given.items() if value != defaults.get(name)}
    with progress_line() as show:
        loaded = load(model, progress=show, **changed)
    ranks = isinstance(loaded, SequenceClassifier) and len(loaded.labels) == 1
    if not isinstance(loaded, EmbeddingModel) and not ranks:
        what = f"{model} is a {type(loaded).__name__} with {len(loaded.labels)} labels"
        raise RequestError(f"{what}: of encoders, serve supports embeddings and rerankers")
    for line in loaded.misses():
        note(f"note: {line}")
    return loaded


def _name(model: str) -> str:
    """Return the name of a model in the API, which shows no folder of this machine."""
    path = Path(model)
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else model


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
