"""A loaded encoder: file, tokenizer, engine and placement."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..arguments import check, check_token_ids
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..engine.encoder_engine import EncoderEngine
from ..errors import ModelFileError, RequestError
from ..model.config import EncoderConfig
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..runtime.executor import Executor, Progress
from .load import (
    DEFAULT_CONTEXT,
    RULES,
    backend_options,
    build_model,
    executor_arguments,
    model_spec,
)

if TYPE_CHECKING:
    from ..model.spec import ModelSpec
    from ..tokenizer import Tokenizer

M = TypeVar("M", bound="LoadedEncoder")


def encoder_arguments(given: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LoadedEncoder.load` among those of loading any model.

    Args:
        given: arguments by name.
        default: values of arguments that count as not given.

    Raises:
        RequestError: an argument that encoders do not take.
    """
    known = signature(LoadedEncoder.load).parameters
    for name, value in given.items():
        if name in RULES and name not in known and (name not in default or value != default[name]):
            raise RequestError(f"{name} has no meaning for an encoder", name)
    return {name: value for name, value in given.items() if name in known}


def task_of(config: Mapping[str, Any]) -> str:
    """Return the end of ``architectures`` of config.json, such as "MaskedLM"; empty without one."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else ""
    found = re.search(r"For([A-Z]\w+)$", name) if isinstance(name, str) else None
    return found.group(1) if found else ""


def head_of(file: Checkpoint, spec: ModelSpec) -> str:
    """Return the name of a file's head; empty if the family has no such head."""
    task, config = task_of(file.metadata), spec.config(file.keys(spec))
    return task if isinstance(config, EncoderConfig) and task in config.heads else ""


class LoadedEncoder:
    """An encoder with its tokenizer, placed on backends and ready to run. Create it with `load`.

    `close`, or the end of a ``with`` block, frees its memory.

    Attributes:
        task: end of the name of transformers' class with the same head; empty for no head.
        file: the model file.
        encoder: the model over the weights of the file; a decoder whose texts are embedded, too.
        executor: runs the model's plans.
        engine: runs batches.
        max_length: maximum number of tokens of a text, special tokens included.
        load_s: seconds that `load` took.
    """

    task: ClassVar[str] = ""

    def __init__(
        self,
        file: Checkpoint,
        encoder: Encoder | Decoder,
        executor_options: Mapping[str, Any],
        owns_file: bool = False,
    ) -> None:
        """Place the model and prepare its plans.

        Args:
            file: the model file.
            encoder: encoder, or decoder for embeddings, over the weights of the file.
            executor_options: keyword arguments of `Executor`.
            owns_file: whether `close` closes the file, too.

        Raises:
            ModelFileError: the tokenizer is invalid or does not match the embedding.
        """
        self.file, self.encoder = file, encoder
        self._owns_file, self._lock, self._closed = owns_file, threading.RLock(), False
        self._check_vocabulary()
        most = encoder.cfg.context
        if isinstance(encoder, Decoder):
            most = min(most, DEFAULT_CONTEXT)  # a step computes, and caches, a whole text
        self.max_length = min(most, self._maximum_length())
        self.executor = Executor(encoder.weights, **executor_options)
        self.engine = self._make_engine()
        self.engine.prepare()
        self.load_s = 0.0

    def _make_engine(self) -> EncoderEngine:
        if isinstance(self.encoder, Encoder):
            return EncoderEngine(self.encoder, self.executor, self.max_length)
        from ..engine.decoder_states import DecoderStates

        return DecoderStates(self.encoder, self.executor, self.max_length)

    def _maximum_length(self) -> int:
        """Return the maximum number of tokens of a text that the file states."""
        return self.encoder.cfg.context

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. ModelFileError: the file has none, or an invalid one."""
        return self.file.tokenizer()

    def _check_vocabulary(self) -> None:
        """Raise ModelFileError if the tokenizer has tokens without a row of the embedding."""
        if not self.file.has_vocabulary:
            return
        tokens, rows = self.tokenizer.vocab_size, self.encoder.cfg.vocab
        if tokens > rows:
            raise ModelFileError(
                f"{self.file.path}: the tokenizer has {tokens} tokens, the embedding {rows} rows"
            )

    @classmethod
    def load(
        cls: type[M],
        model: str | Path | Checkpoint,
        *,
        model_def: str | Path | None = None,
        type: str | None = None,
        device: str = "auto",
        linear: str = "auto",
        threads: int = 0,
        place: Mapping[str, str] | None = None,
        strict: bool = False,
        no_fuse: str | Sequence[str] = (),
        no_kernels: str | Sequence[str] = (),
        progress: Progress | None = None,
    ) -> M:
        """Load an encoder and prepare it to run.

        Args:
            model: a GGUF file, a Hugging Face or sentence-transformers directory, ``minilm``,
                ``org/name`` of the Hugging Face hub, or an open `Checkpoint`.
            model_def: Python file that defines the model, instead of a built-in family.
            type: block format to quantise float matrices to while loading; None keeps them.
            device: ``auto`` (for each op the first backend that supports it) or the name of a
                backend; ops that it does not support run on the backends after it.
            linear: matrix products with quantised weights: ``integer``, ``float`` or ``auto``.
            threads: number of CPU threads; 0 uses every performance core.
            place: backends by scope pattern: ``{"bert.encoder.layer.3.*": "cpu"}``.
            strict: raise PlacementError if an op does not run on the first usable backend.
            no_fuse: names of fusion rules to disable, or ``all``.
            no_kernels: kernels to disable, such as ``cuda:softmax``.
            progress: called with (description, amount done, total) while the model loads.

        Raises:
            RequestError: invalid argument, or a model for another use.
            ModelFileError: invalid or unsupported model file.
            ConfigError: missing, unknown or invalid configuration key.
            PlacementError: the device cannot be used, or an op cannot be placed as requested.
            OutOfMemory: not enough memory.
        """
        start = time.perf_counter()
        own = check(RULES, {name: value for name, value in locals().items() if name in RULES})
        options = backend_options(
            {"deterministic": False, "low_mem": False, "prefill": "auto", **own}
        )
        executor = executor_arguments(own, options, progress)
        file = open_checkpoint(model)
        spec = model_spec(file, model_def)
        cls._check(file, spec)
        head = cls._head(file, spec)
        encoder = build_model(file, spec, type, executor["backends"], options, head)
        found = cls(file, encoder, executor, file is not model)
        found.load_s = time.perf_counter() - start
        return found

    @classmethod
    def _check(cls, file: Checkpoint, spec: ModelSpec) -> None:
        """Raise RequestError if the model cannot be loaded as this class."""
        if not spec.is_encoder:
            raise RequestError(f"{file.path}: {spec.name} is not an encoder")

    @classmethod
    def _head(cls, file: Checkpoint, spec: ModelSpec) -> str:
        """Return the name of the head to compute."""
        return head_of(file, spec)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included, not truncated."""
        return self.tokenizer.encode(text, add_special=True)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise RequestError if an id is not in the vocabulary."""
        check_token_ids(ids, self.encoder.cfg.vocab)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock. RequestError: the model is closed."""
        with self._lock:
            if self._closed:
                raise RequestError("the model is closed")
            yield

    # -- placement
    @property
    def device(self) -> str:
        """Name of the first usable backend."""
        return self.executor.backends[0].name

    def misses(self) -> list[str]:
        """Return one line for each op that missed the first backend, with the reason."""
        return [
            f"{op} ran on {backend} ({count} steps per batch): {why}"
            for plan in self.engine.plans().values()
            for (op, backend, why), count in plan.misses().items()
        ]

    # -- lifetime
    def close(self) -> None:
        """Free weights and buffers; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.executor.close()
                if self._owns_file:
                    self.file.close()

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind, state = type(self).__name__, "closed" if self._closed else f"on {self.device}"
        return f"<{kind} {self.file.architecture} {self.file.path}, {state}>"
