"""`EmbeddingModel`: an encoder that turns texts into vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arguments import Integer, OneOf, Optional, Rule, check, flag, quote
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.sentence_transformers import EmbeddingSettings, read_settings
from ..engine.pooling import normalize
from ..errors import ModelFileError, RequestError
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..ops.pooling import POOLINGS
from .encoder_model import TRUNCATE, EncoderModel, checked_texts

_RULES: dict[str, Rule] = {
    "normalize": flag,
    "pooling": Optional(OneOf(tuple(POOLINGS))),
    "truncate_dim": Optional(Integer(1)),
    **TRUNCATE,
}
_normalize = normalize  # of which an argument of `embed` has the name


class EmbeddingModel(EncoderModel):
    """An encoder whose hidden states are pooled to one vector for each text."""

    def _read_settings(self, file: Checkpoint) -> EmbeddingSettings:
        return read_settings(file)

    def __init__(
        self,
        file: Checkpoint,
        encoder: Encoder | Decoder,
        executor_options: Mapping[str, Any],
        owns_file: bool = False,
    ) -> None:
        """See `EncoderModel`. ModelFileError: a Dense module has another number of columns."""
        super().__init__(file, encoder, executor_options, owns_file)
        if self.settings.width not in (None, encoder.cfg.dim):
            raise ModelFileError(
                f"{file.path}: the Pooling module states {self.settings.width} columns, the model "
                f"has {encoder.cfg.dim}"
            )
        width = len(self.settings.pooling) * encoder.cfg.dim
        for layer in self.settings.dense:
            if layer.weight.shape[1] != width:
                raise ModelFileError(
                    f"{file.path}: a Dense module has {layer.weight.shape[1]} columns, its input "
                    f"has {width}"
                )
            width = len(layer.weight)
        self._dim = width

    @property
    def dim(self) -> int:
        """Number of columns of the embeddings, unless `embed` gets another pooling."""
        return self._dim

    def embed(  # type: ignore[override]
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        normalize: bool = True,
        pooling: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of texts, float32 [n, dim].

        Texts are sorted by length and packed into batches without padding. The embedding of a text
        does not depend on the other texts. A text without tokens has an embedding of zeros.

        Args:
            texts: the texts; a single string counts as a list of one. Or token ids of each text, as
                `tokens` returns them; they get no prompt.
            normalize: whether to scale each embedding to length one.
            pooling: cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken; that of the
                directory by default, mean if it states none.
            prompt: name of one of the directory's prompts, which is put before each text; its
                default prompt, if it has one, by default. ``""``: no prompt.
            truncate_dim: number of columns to keep, the first ones, before normalisation, for
                models that were trained so (Matryoshka; Kusupati et al. 2022); all by default.
            truncate: truncate texts that exceed `max_length`, with one note; if False, they are an
                error.
            progress: whether to show the progress; by default for many texts at a terminal.

        Raises:
            RequestError: invalid argument, or a text is too long.
        """
        given = {"normalize": normalize, "pooling": pooling, "truncate": truncate}
        own = check(_RULES, {**given, "truncate_dim": truncate_dim})
        names = (own["pooling"],) if own["pooling"] else self.settings.pooling
        width = self._width(names, truncate_dim)
        ids = self.given_ids(texts)
        if ids and prompt:
            raise RequestError("prompt: token ids get no prompt", "prompt")
        encoded = ids or self.tokens(texts, prompt)  # type: ignore[arg-type]

        vectors = self._vectors(self._truncated(encoded, truncate), names, progress)
        found = [vector[:width] for vector in vectors]
        if not found:
            return np.zeros((0, width), np.float32)
        return np.stack([*map(_normalize, found)] if normalize else found)

    def tokens(self, texts: str | Sequence[str], prompt: str | None = None) -> list[list[int]]:
        """Return the token ids of texts, with prompt and special tokens, not truncated.

        ``prompt``: see `embed`. RequestError: unknown prompt.
        """
        before = self._prompt(prompt)
        return [self.encode(before + text) for text in checked_texts(texts)]

    def _vectors(
        self, sequences: Sequence[Sequence[int]], pooling: Sequence[str], progress: bool | None
    ) -> Iterator[np.ndarray]:
        """Yield the vector of each sequence, not normalised."""
        for vector in self._pooled(pooling, sequences, progress=progress):
            for layer in self.settings.dense:
                vector = layer(vector)
            yield vector

    def _compute(self, sequences: Sequence[Sequence[int]]) -> None:
        for vector in self._vectors(sequences, self.settings.pooling, progress=False):
            normalize(vector)

    def _width(self, pooling: Sequence[str], wanted: int | None) -> int:
        """Return the number of columns of the embeddings with a pooling. RequestError."""
        own = len(pooling) * self.encoder.cfg.dim
        if self.settings.dense:
            if len(pooling) != len(self.settings.pooling):
                raise RequestError(f"pooling: the Dense module has no {own} columns", "pooling")
            own = self._dim
        if wanted is not None and wanted > own:
            raise RequestError(f"truncate_dim = {wanted} exceeds the {own} columns", "truncate_dim")
        return wanted or own

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
