"""`EmbeddingModel`: an encoder with its tokenizer, which turns texts into vectors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..arguments import OneOf, Optional, Rule, check, flag, invalid_argument, quote
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
from ..progress import Show, progress_line
from ..runtime.executor import Executor, Progress
from ..terminal import note
from .packing import batch_feeds, pack
from .pooling import POOLINGS, normalize, pool
from .sentence_transformers import EmbeddingSettings, read_settings

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

BATCH_TOKENS = 1024  # of a batch, unless a single text may be longer
_SHOWN_TEXTS = 256  # calls with fewer texts show no progress
_RULES: dict[str, Rule] = {
    "normalize": flag,
    "pooling": Optional(OneOf(tuple(POOLINGS))),
    "truncate": flag,
}


def _decoder_only(name: str) -> Callable[..., NoReturn]:
    """Return a method that reports that an encoder does not have the method ``name`` of `LLM`."""

    def method(self: EmbeddingModel, *arguments: Any, **options: Any) -> NoReturn:
        raise RequestError(
            f"{name} needs a decoder, but {self.file.path} is an encoder "
            f"({self.file.architecture}): it has embed"
        )

    return method


class EmbeddingModel:
    """An encoder with its tokenizer, ready to embed texts. Create it with `load`.

    Several threads may use it; their calls run one after the other. `close`, or the end of a
    ``with`` block, frees the memory.

    Attributes:
        file: the model file.
        encoder: the model over the weights of the file.
        executor: runs the model's plan.
        settings: pooling, maximum length and prompts of the directory.
        max_length: maximum number of tokens of a text, special tokens included.
    """

    generate, stream, submit = map(_decoder_only, ("generate", "stream", "submit"))
    chat, chat_stream, logits = map(_decoder_only, ("chat", "chat_stream", "logits"))

    def __init__(
        self,
        file: Checkpoint,
        encoder: Encoder,
        executor_options: Mapping[str, Any],
        settings: EmbeddingSettings,
        owns_file: bool = False,
    ) -> None:
        """Place the model and prepare its plan; see `load`."""
        self.file, self.encoder, self.settings = file, encoder, settings
        self.max_length = min(encoder.cfg.context, settings.max_length or encoder.cfg.context)
        self._owns_file, self._lock, self._closed = owns_file, threading.Lock(), False
        self.tokenizer: Tokenizer = file.tokenizer()
        self._check_vocabulary()
        self._suffix = _suffix(self.tokenizer)
        self.executor = Executor(encoder.weights, **executor_options)
        self._budget = max(BATCH_TOKENS, self.max_length)
        outputs = encoder.build(EncoderBatch(self._budget, self._budget))
        self.executor.place_model(outputs)
        self._plan = self.executor.compile(outputs)
        self.executor.bind(self._plan)
        self.load_s = 0.0

    def _check_vocabulary(self) -> None:
        """Raise ModelFileError if the tokenizer has tokens without a row of the embedding."""
        tokens, rows = self.tokenizer.vocab_size, self.encoder.cfg.vocab
        if tokens > rows:
            raise ModelFileError(
                f"{self.file.path}: the tokenizer has {tokens} tokens, the embedding {rows} rows"
            )

    @classmethod
    def load(
        cls,
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
    ) -> EmbeddingModel:
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
            RequestError: invalid argument, or the model is a decoder.
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
            raise RequestError(
                f"{file.path}: {spec.name} has a decoder; only encoders compute embeddings"
            )
        encoder = build_model(file, spec, type, executor["backends"], options)
        assert isinstance(encoder, Encoder)
        found = cls(file, encoder, executor, read_settings(file.path), file is not model)
        found.load_s = time.perf_counter() - start
        return found

    # -- embeddings
    @property
    def dim(self) -> int:
        """Number of columns of the embeddings."""
        return len(self.settings.pooling) * self.encoder.cfg.dim

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        normalize: bool = True,
        pooling: str | None = None,
        prompt: str | None = None,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of texts, float32 [n, dim].

        Texts are sorted by length and packed into batches without padding. The embedding of a text
        does not depend on the other texts. A text without tokens has an embedding of zeros.

        Args:
            texts: the texts; a single string counts as a list of one.
            normalize: whether to scale each embedding to length one.
            pooling: cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken; that of the
                directory by default, mean if it states none.
            prompt: name of one of the directory's prompts, which is put before each text; its
                default prompt, if it has one, by default. ``""``: no prompt.
            truncate: truncate texts that exceed `max_length`, with one note; if False, they are an
                error.
            progress: whether to show the progress; by default for many texts at a terminal.

        Raises:
            RequestError: invalid argument, or a text is too long.
        """
        given = {"normalize": normalize, "pooling": pooling, "truncate": truncate}
        own = check(_RULES, given)
        names = (own["pooling"],) if own["pooling"] else self.settings.pooling
        before = self._prompt(prompt)
        sequences = self._truncated([self.encode(before + t) for t in _texts(texts)], truncate)
        vectors = np.zeros((len(sequences), len(names) * self.encoder.cfg.dim), np.float32)
        done = 0
        with self._lock, _progress(len(sequences), progress) as show:
            if self._closed:
                raise RequestError("the model is closed")
            for batch in pack([len(ids) for ids in sequences], self._budget):
                hidden = self._hidden([sequences[i] for i in batch])
                for index, rows in zip(batch, hidden, strict=True):
                    vectors[index] = _vector(rows, names, normalize)
                done += len(batch)
                show("embedding", done, len(sequences))
        return vectors

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the hidden states [tokens, dim] of each sequence of a batch."""
        feeds = batch_feeds(sequences, self.encoder.cfg.position_offset)
        pairs = sum(len(ids) ** 2 for ids in sequences)
        hidden = self.executor.run(self._plan, feeds, {"kv_sum": pairs})["hidden"]
        return np.split(hidden, feeds["q_start"][1:-1])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included, not truncated."""
        text = text.lower() if self.settings.lowercase else text
        return self.tokenizer.encode(text, add_special=True)

    def _truncated(self, sequences: list[list[int]], truncate: bool) -> list[list[int]]:
        """Return sequences of at most `max_length` tokens, each with its last special tokens."""
        most, suffix = self.max_length, self._suffix
        long = [i for i, ids in enumerate(sequences) if len(ids) > most]
        if long and not truncate:
            raise RequestError(
                f"texts[{long[0]}] has {len(sequences[long[0]])} tokens, the model takes {most}",
                "truncate",
            )
        if long:
            count = f"{len(long)} of {len(sequences)} texts"
            note(f"{count} exceed {most} tokens and are truncated")
        for i in long:
            sequences[i] = sequences[i][: most - len(suffix)] + suffix
        return sequences

    def _prompt(self, name: str | None) -> str:
        """Return the text of a prompt. RequestError: unknown name."""
        prompts = self.settings.prompts
        name = self.settings.default_prompt if name is None else name
        if not name:
            return ""
        if name not in prompts:
            known = ", ".join(map(quote, prompts)) or "no prompts"
            raise RequestError(f"prompt = {quote(name)} is unknown; the model has {known}")
        return prompts[name]

    # -- placement
    @property
    def device(self) -> str:
        """Name of the first usable backend."""
        return self.executor.backends[0].name

    def misses(self) -> list[str]:
        """Return one line for each op that missed the first backend, with the reason."""
        return [
            f"{op} ran on {backend} ({count} steps per batch): {why}"
            for (op, backend, why), count in self._plan.misses().items()
        ]

    # -- lifetime
    def close(self) -> None:
        """Free weights and buffers; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                del self._plan
                self.executor.close()
                if self._owns_file:
                    self.file.close()

    def __enter__(self) -> EmbeddingModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.dim} columns, on {self.device}"
        return f"<EmbeddingModel {self.file.architecture} {self.file.path}, {state}>"


def _texts(texts: str | Sequence[str]) -> list[str]:
    """Return checked texts. RequestError."""
    found = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise invalid_argument("texts", texts, "a string or a sequence of strings")
    return list(found)


def _suffix(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer adds after a text, such as [SEP]."""
    text = "a"
    bare, whole = tokenizer.encode(text), tokenizer.encode(text, add_special=True)
    starts = range(len(whole) - len(bare) + 1)
    at = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    return whole[at + len(bare) :]


def _vector(hidden: np.ndarray, pooling: Sequence[str], normalized: bool) -> np.ndarray:
    vector = pool(hidden, pooling)
    return normalize(vector) if normalized else vector


def _progress(texts: int, wanted: bool | None) -> AbstractContextManager[Show]:
    """Return the context of a progress display, or of a callback that shows nothing."""
    if wanted is None:
        wanted = texts >= _SHOWN_TEXTS and sys.stderr.isatty()
    return progress_line("embedding") if wanted else nullcontext(_show_nothing)


def _show_nothing(what: str, done: int, total: int, rate: str = "") -> None:
    pass
