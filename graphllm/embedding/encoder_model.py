"""`EncoderModel`: an encoder with its tokenizer, which the classes for its uses share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from ..arguments import (
    Integer,
    Optional,
    Rule,
    check,
    flag,
    function,
    invalid_argument,
    mapping,
)
from ..arguments import texts as names
from ..checkpoints.checkpoint import Checkpoint, states_pooling
from ..checkpoints.sentence_transformers import EmbeddingSettings, tokenizer_limit
from ..engine.trace import Patch, Tracer
from ..errors import RequestError
from ..loading.loaded_encoder import LoadedEncoder, task_of
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..model.encoder_config import MASKED_LM, SEQUENCE, TOKEN
from ..model.spec import ModelSpec
from ..progress import Show, progress_line
from ..runtime.executor import Progress
from ..terminal import note
from .labels import label_names

if TYPE_CHECKING:
    from ..profiler.profile import Profile
    from ..tokenizer import Tokenizer

_SHOWN_TEXTS = 256  # calls with fewer texts show no progress
TRUNCATE: dict[str, Rule] = {"truncate": flag}

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


class EncoderModel(LoadedEncoder):
    """An encoder with its tokenizer, ready to run. Create one of its subclasses with `load`.

    Several threads may use it; their calls run one after the other. `close`, or the end of a
    ``with`` block, frees the memory.

    Attributes:
        settings: pooling, maximum length and prompts of a sentence-transformers directory.
    """

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
        encoder: Encoder | Decoder,
        executor_options: Mapping[str, Any],
        owns_file: bool = False,
    ) -> None:
        """See `LoadedEncoder`."""
        self.settings = self._read_settings(file)
        super().__init__(file, encoder, executor_options, owns_file)
        self._prefix, self._suffix = _special_tokens(self.tokenizer)
        outputs = self.engine.outputs
        self._label_count = outputs["logits"].meta.inner[0] if "logits" in outputs else 0
        self._labels = self._read_labels() if self.task in (SEQUENCE, TOKEN) else ()

    def _maximum_length(self) -> int:
        limits = self.settings.max_length, tokenizer_limit(self.file.path)
        return next(filter(None, limits), self.encoder.cfg.context)

    def _read_settings(self, file: Checkpoint) -> EmbeddingSettings:
        """Return the settings of the model that matter to this class."""
        return EmbeddingSettings()

    def _read_labels(self) -> tuple[str, ...]:
        where = self.file.path / "config.json"
        return label_names(self.file.metadata, self._label_count, where)

    @classmethod
    def _check(cls, file: Checkpoint, spec: ModelSpec) -> None:
        """Raise RequestError if the model is no encoder, or its head is for another use.

        An embedding model may have any head that computes tokens, which is left out.
        """
        pooled = not cls.task and states_pooling(file.path, file.metadata)
        if not spec.is_encoder and not (spec.is_decoder and pooled):
            raise RequestError(f"{file.path}: {spec.name} is a decoder, not {USES[cls.task][0]}")
        task = task_of(file.metadata)
        allowed = {"": (task,) if task not in (SEQUENCE, TOKEN) else (), MASKED_LM: _LM_TASKS}
        if task not in allowed.get(cls.task, (cls.task,)):
            name = file.metadata["architectures"][0] if task else file.architecture
            kind, own = USES.get(task, ("for another use", "none of the methods of this package"))
            raise RequestError(
                f"{file.path}: {name} is {kind}, not {USES[cls.task][0]}: it has {own}"
            )

    @classmethod
    def _head(cls, file: Checkpoint, spec: ModelSpec) -> str:
        return cls.task

    # -- texts
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens included, not truncated."""
        text = text.lower() if self.settings.lowercase else text
        return self.tokenizer.encode(text, add_special=True)

    def given_ids(self, texts: Any) -> list[list[int]]:
        """Return the token ids of texts that are given as such; empty for other texts.

        RequestError: an id is not in the vocabulary.
        """
        if not isinstance(texts, (list, tuple)) or not texts or isinstance(texts[0], str):
            return []
        if not all(isinstance(ids, (list, tuple)) for ids in texts):
            raise invalid_argument("texts", texts, "texts, or token ids of each text")
        for ids in texts:
            self.check_ids(ids)
        return [list(ids) for ids in texts]

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
        empty = np.zeros((0, self.encoder.cfg.dim), np.float32)
        found = {i: reduce(i, empty) for i, ids in enumerate(sequences) if not len(ids)}
        with self._open(), _progress(len(sequences), progress) as show:
            for batch, hidden in self.engine.hidden_by_batch(sequences, types):
                found |= {i: reduce(i, rows) for i, rows in zip(batch, hidden, strict=True)}
                show("computing", len(found), len(sequences))
        return [found[i] for i in range(len(sequences))]

    def _pooled(
        self,
        kinds: Sequence[str],
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Return the pooled hidden states of each sequence, float32 [n, len(kinds) * dim].

        Those of a sequence without tokens are zeros. Arguments as for `_map`; ``kinds``: see
        `engine.pooling.pool`.
        """
        found = np.zeros((len(sequences), len(kinds) * self.encoder.cfg.dim), np.float32)
        done = 0
        with self._open(), _progress(len(sequences), progress) as show:
            for batch, rows in self.engine.pooled_by_batch(kinds, sequences, types):
                found[batch] = rows
                done += len(batch)
                show("computing", done, len(sequences))
        return found

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the head's logits [R, labels] for hidden states [R, dim]."""
        with self._open():
            return self.engine.logits(rows)

    # -- values and times
    def scopes(self) -> list[str]:
        """Return the scopes that `trace` accepts, in order of execution; a head has none."""
        return list(self.engine.scope_values)

    def trace(
        self,
        text: str | Sequence[int],
        scopes: str | Iterable[str],
        patch: Mapping[str, Patch] | None = None,
    ) -> dict[str, np.ndarray]:
        """Compute a text and return the values of modules; optionally replace values.

        Args:
            text: a text or token ids; truncated if it is too long.
            scopes: see `LLM.trace`.
            patch: see `LLM.trace`.

        Returns:
            Arrays [T, ...] by scope, see `LLM.trace`.

        Raises:
            RequestError: unknown scope (the nearest names are listed), or invalid replacement.
        """
        own = check({"scopes": names, "patch": Optional(mapping)},
                    {"scopes": scopes, "patch": patch})  # fmt: skip
        ids = self.encode(text) if isinstance(text, str) else list(text)
        self.check_ids(ids)
        with self._open():
            return self._tracer.trace(self._cut(ids), **own)

    @cached_property
    def _tracer(self) -> Tracer:
        return Tracer(self.engine)

    def profile(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        repeat: int = 3,
        show: Progress = lambda what, done, total: None,
        ramps: bool = False,
    ) -> Profile:
        """Profile the computation of texts, op by op.

        Each pass tokenises the texts, packs them into batches and computes what the model is for:
        embeddings, or the logits of its head (of a masked language model those of one token of each
        text). Profiled passes are interleaved with passes without profiling.

        Args:
            texts: texts, or token ids of each text; those that are too long are truncated.
            repeat: number of profiled passes.
            show: called with (description, passes done, total).
            ramps: as in `graphllm.LLM.profile`.

        Raises:
            RequestError: invalid argument, or there are no tokens.
        """
        from ..profiler.capture import profile_encoder

        rules: dict[str, Rule] = {"repeat": Integer(1), "show": function, "ramps": flag}
        own = check(rules, {"repeat": repeat, "show": show, "ramps": ramps})
        ids = self.given_ids(texts)
        given = [] if ids else checked_texts(texts)  # type: ignore[arg-type]

        def sequences() -> list[list[int]]:
            return [self._cut(each) for each in ids or map(self.encode, given)]

        with self._open():
            counts = [len(ids) for ids in sequences()]
            if not sum(counts):
                raise RequestError("the texts have no tokens", "texts")
            return profile_encoder(self, lambda: self._compute(sequences()), counts, **own)

    def _compute(self, sequences: Sequence[Sequence[int]]) -> None:
        """Compute what the model is for, from token ids."""
        rows = self._map(lambda index, hidden: self._head_rows(hidden), sequences, progress=False)
        if self._label_count:
            self._logits(np.concatenate(rows))

    def _head_rows(self, hidden: np.ndarray) -> np.ndarray:
        """Return what the head computes for a text with hidden states [tokens, dim]: [R, dim]."""
        return hidden[:1]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of a classifier, in the order of its logits; empty without labels."""
        return self._labels


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
