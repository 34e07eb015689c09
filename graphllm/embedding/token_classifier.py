"""`TokenClassifier`: an encoder that labels the tokens of texts, such as named entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arguments import check
from ..model.encoder_config import TOKEN
from .encoder_model import TRUNCATE, EncoderModel, checked_texts
from .labels import softmax


class TokenLabel(NamedTuple):
    """The best label of a token."""

    token: str  # its text, without spaces around it
    label: str
    score: float  # probability


class TokenClassifier(EncoderModel):
    """An encoder with a head that computes logits for each token."""

    task = TOKEN

    def classify_tokens(  # type: ignore[override]
        self,
        texts: str | Sequence[str],
        *,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> list[list[TokenLabel]]:
        """Return the most probable label of each token of each text, special tokens left out.

        Args:
            texts: the texts; a single string counts as a list of one.
            truncate: truncate texts that exceed `max_length`, with one note; if False, they are an
                error.
            progress: whether to show the progress; by default for many texts at a terminal.

        Raises:
            RequestError: invalid argument, or a text is too long.
        """
        check(TRUNCATE, {"truncate": truncate})
        encoded = [self.encode(text) for text in checked_texts(texts)]
        sequences = self._truncated(encoded, truncate)
        first, after = len(self._prefix), len(self._suffix)

        def labels(index: int, hidden: np.ndarray) -> list[TokenLabel]:
            own = slice(first, max(first, len(hidden) - after))
            scores = softmax(self._logits(hidden[own]))
            best = scores.argmax(axis=-1)
            return [
                TokenLabel(
                    self.tokenizer.piece(token).decode("utf-8", "replace").strip(), self.labels[i],
                    float(row[i]),
                )
                for token, row, i in zip(sequences[index][own], scores, best, strict=True)
            ]  # fmt: skip

        return self._map(labels, sequences, progress=progress)

    def _head_rows(self, hidden: np.ndarray) -> np.ndarray:
        return hidden
