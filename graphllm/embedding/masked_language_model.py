"""`MaskedLanguageModel`: an encoder that predicts masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arguments import Integer, check
from ..engine.encoder_engine import HEAD_ROWS
from ..errors import ModelFileError, RequestError
from ..model.encoder_config import MASKED_LM
from .encoder_model import TRUNCATE, EncoderModel, checked_texts
from .labels import softmax


class Filling(NamedTuple):
    """A prediction for a masked token."""

    text: str
    token: int  # its id
    score: float  # probability


class MaskedLanguageModel(EncoderModel):
    """An encoder with a head that computes the logits of the vocabulary for each token."""

    task = MASKED_LM

    def fill_mask(  # type: ignore[override]
        self,
        texts: str | Sequence[str],
        *,
        top_k: int = 5,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> list[list[list[Filling]]]:
        """Return the most probable tokens for each mask of each text, the highest first.

        Args:
            texts: texts with the tokenizer's mask token, such as ``[MASK]``; a single string counts
                as a list of one. No other special token is parsed.
            top_k: number of predictions for each mask.
            truncate: truncate texts that exceed `max_length`, with one note; if False, they are an
                error.
            progress: whether to show the progress; by default for many texts at a terminal.

        Raises:
            RequestError: invalid argument, a text without a mask, or a text is too long.
            ModelFileError: the tokenizer has no mask token.
        """
        check({**TRUNCATE, "top_k": Integer(1)}, {"truncate": truncate, "top_k": top_k})
        mask = getattr(self.tokenizer, "mask_id", None)
        if mask is None:
            raise ModelFileError(f"{self.file.path}: the tokenizer has no mask token")
        encoded = [self._encode_with_masks(text, mask) for text in checked_texts(texts)]
        sequences = self._truncated(encoded, truncate)
        for i, ids in enumerate(sequences):
            if mask not in ids:
                name = self.tokenizer.piece(mask).decode()
                raise RequestError(f"texts[{i}] has no {name} within {self.max_length} tokens")

        def fill(index: int, hidden: np.ndarray) -> list[list[Filling]]:
            rows = hidden[np.array(sequences[index]) == mask]
            return [
                [self._filling(row, i) for i in _best(row, top_k)]
                for at in range(0, len(rows), HEAD_ROWS)
                for row in softmax(self._logits(rows[at : at + HEAD_ROWS]))
            ]

        return self._map(fill, sequences, progress=progress)

    def _encode_with_masks(self, text: str, mask: int) -> list[int]:
        """Return the ids of a text in which only the mask token's text is a special token."""
        name = self.tokenizer.piece(mask).decode()
        spans, at = [], 0
        while (found := text.find(name, at)) >= 0:
            spans.append((at, found))
            at = found + len(name)
        return self.tokenizer.encode(
            text, add_special=True, parse_special=True, literal=[*spans, (at, len(text))]
        )

    def _filling(self, scores: np.ndarray, token: int) -> Filling:
        known = token < self.tokenizer.vocab_size
        text = self.tokenizer.decode([token], skip_special=False) if known else ""
        return Filling(text, token, float(scores[token]))


def _best(scores: np.ndarray, count: int) -> list[int]:
    """Return the indices of the largest scores, the largest first; of equal ones the first."""
    count = min(count, len(scores))
    found = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return [int(i) for i in found[np.argsort(-scores[found], kind="stable")][:count]]
