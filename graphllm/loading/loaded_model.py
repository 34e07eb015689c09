"""A loaded model: file, tokenizer, chat template, engine, and where its ops run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from .. import backends as registry
from ..arguments import as_int, check, invalid_argument, quote
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..engine.engine import Engine
from ..errors import ModelFileError, PlacementError, RequestError
from ..model.batch import Limits
from ..model.decoder import Decoder
from ..runtime.executor import Executor, Progress
from ..runtime.gpu_offload import AUTO, GpuOffload
from .load import DEFAULT_CONTEXT, RULES, backend_options, build_decoder, graph_limits

if TYPE_CHECKING:
    from ..chat import ChatTemplate
    from ..tokenizer import Tokenizer

# Tokens that a tokenizer may have beyond the embedding's rows: Gemma 3's has one, for pictures.
MAX_EXTRA_TOKENS = 16


M = TypeVar("M", bound="LoadedModel")


class LoadedModel:
    """A model with its tokenizer, placed and ready to run; made by `load`.

    `close`, or the end of a ``with`` block, frees the memory.
    """

    # Attributes that `close` deletes.
    _freed: ClassVar[set[str]] = {
        "file", "decoder", "executor", "engine", "tokenizer", "_template"
    }  # fmt: skip

    def __init__(
        self,
        file: Checkpoint,
        decoder: Decoder,
        executor_options: Mapping[str, Any],
        limits: Limits,
        chat_template: str | Path | None = None,
        owns_file: bool = False,
    ) -> None:
        """``executor_options``: of the `Executor`. ``owns_file``: `close` closes the file, too."""
        self._name = f"{file.architecture} {file.path}"
        self.file, self.decoder = file, decoder
        self._template_choice, self._owns_file = chat_template, owns_file
        self._template: ChatTemplate | None = None
        self.limits = self.decoder.limits(limits)
        if file.has_vocabulary:  # a bad one is told now
            tokens, rows = self.tokenizer.vocab_size, decoder.cfg.vocab
            if tokens > rows + MAX_EXTRA_TOKENS:
                raise ModelFileError(
                    f"{file.path}: the tokenizer has {tokens} tokens, the embedding {rows} rows"
                )
        self.executor = Executor(self.decoder.weights, **executor_options)
        self.engine = Engine(self.decoder, self.executor, self.limits)
        self.load_s = 0.0
        if chat_template is not None:
            _ = self.template  # raises now if it is invalid

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. ModelFileError where it has none, or a bad one."""
        return self.file.tokenizer()

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids, with the begin-of-text token if the model wants one."""
        if not isinstance(prompt, str):
            raise invalid_argument("prompt", prompt, "a text")
        return self.tokenizer.encode(prompt, add_special=True)

    def check_ids(self, ids: Iterable[int]) -> None:
        """RequestError names an id that the model does not have."""
        vocab = self.decoder.cfg.vocab
        for token in ids:
            if as_int(token) is None or not 0 <= token < vocab:
                raise RequestError(f"token id {quote(token)} is not in 0..{vocab - 1}")

    @classmethod
    def load(
        cls: type[M],
        model: str | Path | Checkpoint,
        *,
        model_def: str | Path | None = None,
        type: str | None = None,
        device: str = "auto",
        gpu_layers: int | str = "auto",
        context: int = DEFAULT_CONTEXT,
        kv_type: str | None = None,
        linear: str = "auto",
        threads: int = 0,
        place: Mapping[str, str] | None = None,
        strict: bool = False,
        no_fuse: str | Sequence[str] = (),
        no_kernels: str | Sequence[str] = (),
        chat_template: str | Path | None = None,
        progress: Progress | None = None,
    ) -> M:
        """Load a model and prepare it to run.

        Args:
            model: a GGUF file, a Hugging Face directory, ``demo``, ``org/name`` of the Hugging Face
                hub, or an open `Checkpoint`, such as a `RandomCheckpoint`.
            model_def: a model file of your own, used instead of one of `graphllm.models`.
            type: weight format, such as ``q8_0``, to which float matrices are quantised on load.
            device: ``auto`` (the first backend that can run each op) or the name of a backend; ops
                that it cannot run go to the backends behind it in the order.
            gpu_layers: number of layers, counted from the last, on a device with a memory of its
                own; ``auto`` (as many as fit) or ``all``.
            context: maximum number of tokens of prompt and answer; at most the model's own.
            kv_type: dtype of the KV cache; f16 by default (f32 on the reference backend).
            linear: ``auto``, ``integer``, or ``float`` (activations are not quantised).
            threads: number of CPU threads; 0 means one per core.
            place: backends by scope pattern: ``{"model.layers.3.*": "cpu"}``.
            strict: raise PlacementError when an op misses the first backend.
            no_fuse: names of fusion rules to disable, or ``all``.
            no_kernels: kernels to disable, such as ``cuda:softmax``.
            chat_template: a file or one of gemma, chatml, llama3, mistral, phi3, zephyr, instead of
                the model's own template.
            progress: called with what is being done, how much is done, and the total.

        Raises:
            RequestError, ModelFileError, ConfigError, PlacementError, OutOfMemory: each with one
                line that names the argument, file, key or tensor.
        """
        start = time.perf_counter()
        own = check(RULES, {name: value for name, value in locals().items() if name in RULES})
        options = backend_options(own)
        usable, reason = (True, "") if device == "auto" else registry.find(device).available()
        if not usable:
            raise PlacementError(f"device = {device!r} cannot be used: {reason}", "device")
        file = open_checkpoint(model) if isinstance(model, (str, os.PathLike)) else model
        order = None if device == "auto" else registry.fallbacks(device)
        executor = {
            "backends": order,
            "options": options,
            "pins": own["place"],
            "strict": own["strict"],
            "progress": progress,
        }
        decoder = build_decoder(file, model_def, type, order, options)
        limits = graph_limits(own["context"], kv_type, device)
        llm = cls(file, decoder, executor, limits, chat_template, owns_file=file is not model)
        llm.engine.offload_layers(own["gpu_layers"])
        llm.engine.prepare()
        llm.load_s = time.perf_counter() - start
        return llm

    # -- chat template
    @property
    def template(self) -> ChatTemplate:
        """The chat template that `load` was given, or the model's own. RequestError if none.

        ModelFileError when it is no valid template.
        """
        if self._template is None:
            from ..chat import find_template, template_tokens

            own, tokens = self.file.chat_template, template_tokens(self.tokenizer)
            self._template = find_template(self._template_choice, own, str(self.file.path), tokens)
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether the file brings a chat template."""
        return bool(self.file.chat_template)

    # -- placement
    @property
    def device(self) -> str:
        """The first usable backend."""
        return self.executor.backends[0].name

    def placement(self) -> dict[str, dict[str, int]]:
        """Steps of one token, by backend and op."""
        counts: dict[str, dict[str, int]] = {}
        for step in self.engine.decode_plan().steps:
            ops = counts.setdefault(step.backend.name, {})
            ops[step.node.op] = ops.get(step.node.op, 0) + 1
        return counts

    def misses(self) -> list[str]:
        """A line for each kind of op that missed the first backend, with the reason; then one for
        what is copied between memories."""
        plan = self.engine.decode_plan()
        lines = [
            f"{op} ran on {backend} ({count} steps a token): {why}"
            for (op, backend, why), count in plan.misses().items()
        ]
        return lines + [f"a token needs {copies}" for copies in plan.copies()]

    @property
    def gpu_offload(self) -> GpuOffload | None:
        """How many layers went to a device with a memory of its own; None without one."""
        return self.engine.gpu_offload

    def notes(self) -> list[str]:
        """Notes for the user on the tokenizer and on placement, a line each."""
        skipped, requested = self.executor.skipped.items(), self.engine.requested_gpu_layers
        lines = list(self.tokenizer.notes) if self.file.has_vocabulary else []
        lines += [
            f"{name} is not used: {why}" for name, why in skipped if registry.find(name).expected()
        ]
        lines += getattr(self.decoder.weights.source, "notes", list)()  # of quantised ones
        if self.gpu_offload:
            return [*lines, str(self.gpu_offload)]
        if requested != AUTO:
            why = f"{self.device} works in the host's memory"
            lines.append(f"gpu_layers = {requested} has no effect: {why}")
        return lines

    # -- its end
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return "engine" not in vars(self)

    def close(self) -> None:
        """Free weights, cache and buffers now, after the request that runs. May be called again.

        Streams that are left half way end in a RequestError when they are continued.
        """
        if self.closed:
            return
        with self.engine.lock.hold("llm.close"):
            self.engine.close()
            file = self.file
            for name in self._freed & vars(self).keys():
                delattr(self, name)
            if self._owns_file:
                file.close()

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self.closed:
            return f"<{kind} {self._name}, closed>"
        return f"<{kind} {self._name}, context {self.limits.context}, on {self.device}>"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"an {kind} cannot be pickled or copied; load the model in each process")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """What `close` has let go of is missing."""
            if name in self._freed and self.closed:
                raise RequestError("the model is closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
