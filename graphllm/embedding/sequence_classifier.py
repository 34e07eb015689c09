"""`SequenceClassifier`: an encoder that scores texts and pairs, such as a reranker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..arguments import Integer, Optional, check, invalid_argument
from ..errors import ConfigError, RequestError, quote
from ..model.encoder import Encoder
from ..model.encoder_config import SEQUENCE
from .encoder_model import TRUNCATE, EncoderModel, checked_texts
from .labels import sigmoid, softmax
from .pairs import PairTemplate, longest_first

# Keys of config.json in which sentence-transformers states the function of a reranker's score.
_ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")
_ACTIVATIONS = {"Sigmoid": sigmoid, "Identity": lambda logits: logits}

Pair = tuple[str, str]


@dataclass(frozen=True)
class RankedDocument:
    """A document of `SequenceClassifier.rerank`."""

    index: int  # in the list of documents
    score: float


class SequenceClassifier(EncoderModel):
    """An encoder with a head that computes logits for a text or for a pair of texts."""

    task = SEQUENCE

    @cached_property
    def _pairs(self) -> PairTemplate:
        assert isinstance(self.encoder, Encoder)
        return PairTemplate(self.tokenizer, self.encoder.cfg.token_types)

    def rerank(  # type: ignore[override]
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> list[RankedDocument]:
        """Return documents with their scores for a query, the highest first.

        The score is the head's only logit after the function that sentence-transformers applies:
        what config.json states, a sigmoid by default. It does not depend on the other documents.

        Args:
            query: the query.
            documents: the documents.
            top_k: number of documents to return; all by default.
            truncate: truncate the longer text of a pair that exceeds `max_length` tokens, with one
                note; if False, such a pair is an error.
            progress: whether to show the progress; by default for many documents at a terminal.

        Raises:
            RequestError: invalid argument, a pair is too long, or the model has several labels.
        """
        check({**TRUNCATE, "top_k": Optional(Integer(1))}, {"truncate": truncate, "top_k": top_k})
        if not isinstance(query, str):
            raise invalid_argument("query", query, "a string")
        if isinstance(documents, str):
            raise invalid_argument("documents", documents, "a sequence of strings")
        if len(self.labels) != 1:
            raise RequestError(
                f"rerank needs a model with one label, but {self.file.path} has "
                f"{len(self.labels)}: it has classify"
            )
        pairs = [(query, text) for text in checked_texts(documents, "documents")]
        scores = self._activation()(self._scores(pairs, truncate, progress))[:, 0]
        order = np.argsort(-scores, kind="stable")[:top_k]
        return [RankedDocument(int(i), float(scores[i])) for i in order]

    def classify(  # type: ignore[override]
        self,
        texts: str | Sequence[str | Pair],
        *,
        truncate: bool = True,
        progress: bool | None = None,
    ) -> list[dict[str, float]]:
        """Return the probability of each label for texts, the highest first.

        Probabilities are a softmax over the labels; a sigmoid for one label or ``problem_type``
        ``multi_label_classification``; the logits for ``regression``.

        Args:
            texts: texts, or tuples of two texts; a single string counts as a list of one.
            truncate: truncate texts that exceed `max_length`, with one note; if False, they are an
                error.
            progress: whether to show the progress; by default for many texts at a terminal.

        Raises:
            RequestError: invalid argument, or a text is too long.
        """
        check(TRUNCATE, {"truncate": truncate})
        problem = self.file.metadata.get("problem_type")
        several = problem == "multi_label_classification" or len(self.labels) == 1
        logits = self._scores(_texts_or_pairs(texts), truncate, progress)
        scores = logits if problem == "regression" else (sigmoid if several else softmax)(logits)
        order = np.argsort(-scores, axis=1, kind="stable")
        return [
            {self.labels[i]: float(row[i]) for i in best}
            for row, best in zip(scores, order, strict=True)
        ]

    def count_tokens(self, texts: Sequence[str | Pair]) -> int:
        """Return the number of tokens of texts and pairs, after truncation to `max_length`."""
        return sum(map(len, self._joined(_texts_or_pairs(texts), True)[0]))

    def _activation(self) -> Any:
        """Return the function of a reranker's logits. ConfigError: it is not supported."""
        config = self.file.metadata
        own = config.get("sentence_transformers")
        stated = {**config, **(own if isinstance(own, dict) else {})}
        name = next((stated[key] for key in _ACTIVATION_KEYS if stated.get(key)), "Sigmoid")
        kind = name.rpartition(".")[2] if isinstance(name, str) else ""
        if kind not in _ACTIVATIONS:
            where, known = self.file.path / "config.json", " and ".join(_ACTIVATIONS)
            raise ConfigError(
                f"{where}: activation_fn = {quote(name)} is not supported, only {known}"
            )
        return _ACTIVATIONS[kind]

    def _scores(
        self, texts: Sequence[str | Pair], truncate: bool, progress: bool | None
    ) -> np.ndarray:
        """Return the logits [n, labels]."""
        sequences, types = self._joined(texts, truncate)
        return self._sequence_logits(sequences, types, progress)

    def _sequence_logits(
        self,
        sequences: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        progress: bool | None = None,
    ) -> np.ndarray:
        """Return the logits [n, labels] of token ids."""
        assert isinstance(self.encoder, Encoder)
        head = self.encoder.cfg.head
        assert head is not None
        return self._logits(self._pooled((head.pooling,), sequences, types, progress))

    def _compute(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequence_logits(sequences, progress=False)

    def _joined(
        self, texts: Sequence[str | Pair], truncate: bool
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return token ids and token types of texts and pairs, truncated to `max_length`."""
        encode = cache(self.tokenizer.encode)  # a query is encoded once
        parts = [
            (self.encode(text),) if isinstance(text, str) else tuple(map(encode, text))
            for text in texts
        ]
        special = self._pairs.special if any(len(each) == 2 for each in parts) else 0
        lengths = [sum(map(len, each)) + special * (len(each) == 2) for each in parts]
        self._check_lengths(lengths, truncate)
        joined = []
        for each in parts:
            if len(each) == 1:
                ids = self._cut(each[0])
                joined.append((ids, [0] * len(ids)))
            else:
                first, second = each
                keep = longest_first(len(first), len(second), self.max_length - special)
                joined.append(self._pairs.join(first[: keep[0]], second[: keep[1]]))
        return [ids for ids, _ in joined], [types for _, types in joined]


def _texts_or_pairs(texts: Any) -> list[str | Pair]:
    """Return checked texts. RequestError."""
    found = [texts] if isinstance(texts, str) else texts

    def fits(text: Any) -> bool:
        pair = isinstance(text, (tuple, list)) and len(text) == 2
        return isinstance(text, str) or (pair and all(isinstance(each, str) for each in text))

    if not isinstance(found, Sequence) or not all(map(fits, found)):
        raise invalid_argument("texts", texts, "a string or a sequence of strings or pairs of them")
    return list(found)
