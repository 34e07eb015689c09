"""The models of the verb ``serve``: their names, and how they are loaded."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import note
from .declarations import Argument, Option
from .options import MODEL, GenerationLoadOptions, Template
from .run import PARALLEL

if TYPE_CHECKING:
    from ..runtime.executor import Progress
    from ..server.app import Model
    from ..server.model_pool import ModelSource


@dataclass
class ServedModels:
    """The models of a server."""

    model: Annotated[str | None, Argument(help=MODEL, show_default=False)] = None
    others: Annotated[
        list[str] | None,
        Option(
            "--model",
            metavar="NAME=MODEL",
            help="A model that is loaded at the first request for its name; may be repeated.",
            show_default=False,
        ),
    ] = None
    alias: Annotated[
        list[str] | None,
        Option(
            "--alias",
            help="Name of MODEL in the API, its file name by default; may be repeated: requests "
            "may use each name, answers have the first one.",
            show_default=False,
        ),
    ] = None
    memory: Annotated[
        str | None,
        Option(
            "--model-memory",
            metavar="SIZE",
            help="Memory of all loaded models, as 24GB: idle models are unloaded, those used "
            "least recently first; unlimited by default.",
            show_default=False,
        ),
    ] = None
    load_timeout: Annotated[
        int,
        Option("--load-timeout", help="Seconds that a request waits for its model to be loaded."),
    ] = 300
    parallel: Annotated[
        int,
        Option("--parallel", help="Number of sequences that a model computes at once."),
    ] = PARALLEL
    chat_template: Template = None
    warm_up: Annotated[
        bool,
        Option(
            "--warmup/--no-warmup",
            help="Prepare batches of all sizes when a model is loaded, instead of when the first "
            "requests need them.",
        ),
    ] = True

    @property
    def names(self) -> list[str]:
        """Names of the models in the API."""
        first = [] if self.model is None else [(self.alias or [_name(self.model)])[0]]
        return [*first, *(each.partition("=")[0] for each in self.others or [])]

    @property
    def aliases(self) -> list[str]:
        """Further names of the first model."""
        return (self.alias or [])[1:]

    @property
    def budget(self) -> int | None:
        """Bytes of all loaded models."""
        from .number_lists import parse_size

        return None if self.memory is None else parse_size("--model-memory", self.memory)

    def check(self, options: GenerationLoadOptions, records: bool) -> None:
        """Raise RequestError if a name or a model is wrong, or options do not fit each other.

        ``records``: whether requests are recorded.
        """
        names, single = self.names, not self.others
        if not names:
            raise RequestError("give a MODEL, or --model NAME=MODEL")
        if self.model is None and self.alias is not None:
            raise RequestError("--alias needs a MODEL")
        if self.load_timeout < 1:
            raise RequestError("--load-timeout must be at least 1")
        if single and self.budget is not None:
            raise RequestError("--model-memory needs --model")
        for each in self.others or []:
            name, _, path = each.partition("=")
            if not name or not name.isprintable() or not path:
                raise RequestError(f"--model {each!r} must be NAME=MODEL")
            if names.count(name) > 1:
                raise RequestError(f"two models have the name {name!r} (--model)")
            _check_exists(path)
        one = {
            "--chat-template": self.chat_template is not None,
            "a second --alias": len(self.aliases) > 0,
            "--model-def": options.model_def is not None,
            "--draft": options.draft is not None,
            "--record": records,
        }
        for flag, given in one.items():
            if given and not single:
                raise RequestError(f"{flag} needs a server of one model, without --model")

    # -- loading
    def load(self, model: str, options: GenerationLoadOptions) -> Model:
        """Load the model of a server that has no other. RequestError: see `_encoder_options`."""
        with progress_line() as show:
            return self._load(model, options, show)

    def sources(self, options: GenerationLoadOptions) -> dict[str, ModelSource]:
        """Return how each model is loaded, by name."""
        from ..server.model_pool import ModelSource

        first = [] if self.model is None else [self.model]
        models = [*first, *(each.partition("=")[2] for each in self.others or [])]
        return {
            name: ModelSource(
                partial(self._predict_bytes, model, options), partial(self._load, model, options)
            )
            for name, model in zip(self.names, models)
        }

    def _arguments(self, options: GenerationLoadOptions) -> dict[str, Any]:
        more = {"chat_template": self.chat_template, "max_sequences": self.parallel}
        return options.arguments() | more

    def _encoder_arguments(self, options: GenerationLoadOptions) -> dict[str, Any]:
        """Return the arguments of loading an encoder.

        Options of decoders are for the decoders among several models. RequestError: one is given,
        and the encoder is the only model.
        """
        from ..loading.loaded_encoder import encoder_arguments

        given = self._arguments(options)
        default = ServedModels()._arguments(GenerationLoadOptions())
        return encoder_arguments(given, given if self.others else default)

    def _load(self, model: str, options: GenerationLoadOptions, progress: Progress) -> Model:
        if _is_encoder(model, options):
            return _load_encoder(model, self._encoder_arguments(options), progress)
        from ..api import LLM

        llm = LLM.load(model, progress=progress, **self._arguments(options))
        for line in [*llm.notes(), *options.notes(llm.limits.context)]:
            note(f"note: {line}")
        # `llm.tokenizer` raises if there is none.
        if llm.tokenizer.eog_ids and find_spec("llguidance") is not None:
            from ..engine.grammar import prepare

            prepare(llm.tokenizer)  # takes up to seconds, in which other requests would wait
        if self.warm_up:
            from ..engine.batch_plans import bind_batch_plans

            with llm.engine.lock.hold("preparing batches"):
                bind_batch_plans(llm.engine, progress)
        # Full collections would stop all requests for 0.1 s, only to find that models are in use.
        gc.collect()
        gc.freeze()
        return llm

    def _predict_bytes(self, model: str, options: GenerationLoadOptions) -> int:
        """Return the memory that a model needs, of the machine and of its devices."""
        from ..profiler.prediction import dry_run

        own = self._arguments(options)
        if _is_encoder(model, options):
            own = self._encoder_arguments(options)
        known = signature(dry_run).parameters
        found = dry_run(model, **{name: own[name] for name in own if name in known})
        return sum(memory.total for memory in found.memory.values())


def _is_encoder(model: str, options: GenerationLoadOptions) -> bool:
    from ..api.loader import encoder_class

    return options.model_def is None and encoder_class(model) is not None


def _load_encoder(model: str, arguments: Mapping[str, Any], progress: Progress) -> Model:
    """Load an encoder. RequestError: the model has a head that the server does not support."""
    from ..api import load
    from ..embedding import EmbeddingModel, SequenceClassifier

    loaded = load(model, progress=progress, **arguments)
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


def _check_exists(model: str) -> None:
    """Raise RequestError if a model is a path without a file; others may be downloaded."""
    from ..checkpoints import hub

    if model not in ("demo", "minilm") and not Path(model).exists() and not hub.is_repo_id(model):
        raise RequestError(f"{model}: no such file (--model)")
