"""`EncoderModel`: an encoder with its tokenizer, which the classes for its uses share."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from ..arguments import Rule, check, flag, invalid_argument
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..errors import ModelFileError, RequestError
from ..loading.load import (
    RULES,
    backend_options,
    build_model,
    executor_arguments,
    model_spec,
)
from ..model.encoder import Encoder, EncoderBatch
from ..model.encoder_config import MASKED_LM, SEQUENCE, TOKEN
from ..progress import Show, progress_line
from ..runtime.executor import Executor, Progress
from ..terminal import note
from .labels import label_names
from .packing import batch_feeds, pack
from .sentence_transformers import EmbeddingSettings

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

BATCH_TOKENS = 1024  # of a batch, unless a single text may be longer
HEAD_ROWS = 64  # that a head computes at once, since a row of a vocabulary's logits is long
_SHOWN_TEXTS = 256  # calls with fewer texts show no progress
TRUNCATE: dict[str, Rule] = {"truncate": flag}

M = TypeVar("M", bound="EncoderModel")
R = TypeVar("R")

# By the end of the name of transformers' class: what the model is, and what it has.
USES = {
    "": ("an embedding model", "embed"),
    SEQUENCE: ("a sequence classifier", "rerank and classify"),
    TOKEN: ("a token classifier", "classify_tokens"),
    MASKED_LM: ("a masked language model", "fill_mask"),
}
_LM_TASKS = (MASKED_LM, "PreTraining")


def _not_here(name: str, needed: str) -> Callable[..., NoReturn]:
    """Return a method that reports that only ``needed`` has the method ``name``."""

    def method(self: EncoderModel, *arguments: Any, **options: Any) -> NoReturn:
        kind, own = USES[self.task]
        raise RequestError(
            f"{name} needs {needed}, but {self.file.path} is {kind} "
            f"({self.file.architecture}): it has {own}"
        )

    return method


def task_of(config: Mapping[str, Any]) -> str:
    """Return the end of ``architectures`` of config.json, such as "MaskedLM"; empty without one."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else ""
    found = re.search(r"For([A-Z]\w+)$", name) if isinstance(name, str) else None
    return found.group(1) if found else ""


class EncoderModel:
    """An encoder with its tokenizer, ready to run. Create one of its subclasses with `load`.

    Several threads may use it; their calls run one after the other. `close`, or the end of a
    ``with`` block, frees the memory.

    Attributes:
        task: end of the name of transformers' class with the same head; empty for no head.
        file: the model file.
        encoder: the model over the weights of the file.
        executor: runs the model's plans.
        settings: pooling, maximum length and prompts of a sentence-transformers directory.
        max_length: maximum number of tokens of a text, special tokens included.
    """

    task: ClassVar[str] = ""
    generate, stream, submit, chat, chat_stream, logits = (
        _not_here(name, "a decoder")
        for name in ("generate", "stream", "submit", "chat", "chat_stream", "logits")
    )
    embed, rerank, classify, classify_tokens, fill_mask = (
        _not_here(name, USES[task][0])
        for task, name in (
            ("", "embed"), (SEQUENCE, "rerank"), (SEQUENCE, "classify"),
            (TOKEN, "classify_tokens"), (MASKED_LM, "fill_mask"),
        )
    )  # fmt: skip

    def __init__(
        self,
        file: Checkpoint,
        encoder: Encoder,
        executor_options: Mapping[str, Any],
        owns_file: bool = False,
    ) -> None:
        """Place the model and prepare its plans; see `load`."""
        self.file, self.encoder, self.settings = file, encoder, self._read_settings(file.path)
        self.max_length = min(encoder.cfg.context, self.settings.max_length or encoder.cfg.context)
        self._owns_file, self._lock, self._closed = owns_file, threading.RLock(), False
        self.tokenizer: Tokenizer = file.tokenizer()
        self._check_vocabulary()
        self._prefix, self._suffix = _special_tokens(self.tokenizer)
        self.executor = Executor(encoder.weights, **executor_options)
        self._budget = max(BATCH_TOKENS, self.max_length)
        outputs = encoder.build(EncoderBatch(self._budget, self._budget, HEAD_ROWS))
        self.executor.place_model(outputs)
        self._plans = {name: self.executor.compile({name: node}) for name, node in outputs.items()}
        for plan in self._plans.values():
            self.executor.bind(plan)
        self._label_count = outputs["logits"].meta.inner[0] if "logits" in outputs else 0
        self._labels = self._read_labels() if self.task in (SEQUENCE, TOKEN) else ()
        self.load_s = 0.0

    def _read_settings(self, folder: Path) -> EmbeddingSettings:
        """Return the settings of the directory that matter to this class."""
        return EmbeddingSettings()

    def _read_labels(self) -> tuple[str, ...]:
        where = self.file.path / "config.json"
        return label_names(self.file.metadata, self._label_count, where)

    def _check_vocabulary(self) -> None:
        """Raise ModelFileError if the tokenizer has tokens without a row of the embedding."""
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
            model: a Hugging Face or sentence-transformers directory, ``minilm``, ``org/name`` of
                the Hugging Face hub, or an open `Checkpoint`.
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
        options = backend_options({"deterministic": False, **own})
        executor = executor_arguments(own, options, progress)
        file = open_checkpoint(model)
        spec = model_spec(file, model_def)
        if not spec.is_encoder:
            raise RequestError(f"{file.path}: {spec.name} is a decoder, not {USES[cls.task][0]}")
        cls._check_task(file)
        encoder = build_model(file, spec, type, executor["backends"], options, cls.task)
        assert isinstance(encoder, Encoder)
        found = cls(file, encoder, executor, file is not model)
        found.load_s = time.perf_counter() - start
        return found

    @classmethod
    def _check_task(cls, file: Checkpoint) -> None:
        """Raise RequestError if the file's head is for another use.

        An embedding model may have any head that computes tokens, which is left out.
        """
        task = task_of(file.metadata)
        allowed = {"": (task,) if task not in (SEQUENCE, TOKEN) else (), MASKED_LM: _LM_TASKS}
        if task not in allowed.get(cls.task, (cls.task,)):
            name = file.metadata["architectures"][0] if task else file.architecture
            kind, own = USES.get(task, ("for another use", "none of the methods of this package"))
            raise RequestError(
                f"{file.path}: {name} is {kind}, not {USES[cls.task][0]}: it has {own}"
            )

    # -- texts
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included, not truncated."""
        text = text.lower() if self.settings.lowercase else text
        return self.tokenizer.encode(text, add_special=True)

    def _truncated(self, sequences: Sequence[list[int]], truncate: bool) -> list[list[int]]:
        """Return sequences of at most `max_length` tokens, each with its last special tokens."""
        self._check_lengths([len(ids) for ids in sequences], truncate)
        return [self._cut(ids) for ids in sequences]

    def _cut(self, ids: list[int]) -> list[int]:
        most, suffix = self.max_length, self._suffix
        return ids if len(ids) <= most else ids[: most - len(suffix)] + suffix

    def _check_lengths(self, lengths: Sequence[int], truncate: bool) -> None:
        """Note that texts are truncated. RequestError if ``truncate`` is False."""
        most = self.max_length
        long = [i for i, length in enumerate(lengths) if length > most]
        if long and not truncate:
            raise RequestError(
                f"texts[{long[0]}] has {lengths[long[0]]} tokens, the model takes {most}",
                "truncate",
            )
        if long:
            note(f"{len(long)} of {len(lengths)} texts exceed {most} tokens and are truncated")

    # -- computing
    def _map(
        self,
        reduce: Callable[[int, np.ndarray], R],
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        progress: bool | None = None,
    ) -> list[R]:
        """Return ``reduce(index, hidden states [tokens, dim])`` of each sequence.

        Args:
            reduce: called in any order; a sequence without tokens has no hidden states.
            sequences: token ids.
            types: token types of each sequence; zeros by default.
            progress: whether to show the progress; by default for many sequences at a terminal.
        """
        empty, lengths = np.zeros((0, self.encoder.cfg.dim), np.float32), [*map(len, sequences)]
        found = {i: reduce(i, empty) for i, length in enumerate(lengths) if not length}
        with self._open(), _progress(len(sequences), progress) as show:
            for batch in pack(lengths, self._budget):
                own = [types[i] for i in batch] if types is not None else None
                hidden = self._hidden([sequences[i] for i in batch], own)
                found |= {i: reduce(i, rows) for i, rows in zip(batch, hidden, strict=True)}
                show("computing", len(found), len(sequences))
        return [found[i] for i in range(len(sequences))]

    def _hidden(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[np.ndarray]:
        """Return the hidden states [tokens, dim] of each sequence of a batch."""
        feeds = batch_feeds(sequences, self.encoder.cfg.position_offset, types)
        pairs = sum(len(ids) ** 2 for ids in sequences)
        hidden = self.executor.run(self._plans["hidden"], feeds, {"kv_sum": pairs})["hidden"]
        return np.split(hidden, feeds["q_start"][1:-1])

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the head's logits [R, labels] for hidden states [R, dim]."""
        with self._open():
            parts = [
                self.executor.run(self._plans["logits"], {"rows": rows[at : at + HEAD_ROWS]})
                for at in range(0, len(rows), HEAD_ROWS)
            ]
        none = np.zeros((0, self._label_count), np.float32)
        return np.concatenate([none, *(part["logits"] for part in parts)])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of a classifier, in the order of its logits; empty without labels."""
        return self._labels

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
            for plan in self._plans.values()
            for (op, backend, why), count in plan.misses().items()
        ]

    # -- lifetime
    def close(self) -> None:
        """Free weights and buffers; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._plans.clear()
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


def checked_texts(texts: str | Sequence[str], name: str = "texts") -> list[str]:
    """Return the texts of the argument ``name``. RequestError."""
    found = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise invalid_argument(name, texts, "a string or a sequence of strings")
    return list(found)


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text, such as [CLS]."""
    text = "a"
    bare, whole = tokenizer.encode(text), tokenizer.encode(text, add_special=True)
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    return whole[:at], whole[at + len(bare) :]


def _progress(texts: int, wanted: bool | None) -> AbstractContextManager[Show]:
    """Return the context of a progress display, or of a callback that shows nothing."""
    if wanted is None:
        wanted = texts >= _SHOWN_TEXTS and sys.stderr.isatty()
    return progress_line("embedding") if wanted else nullcontext(_show_nothing)


def _show_nothing(what: str, done: int, total: int, rate: str = "") -> None:
    pass
