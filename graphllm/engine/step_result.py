"""What a step returns for the sequences that it samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import RequestError
from .sampler import STAGES

if TYPE_CHECKING:
    from .sampling_feeds import Row

LOGPROBS = ("logprobs", "top_ids", "top_logprobs")  # fields of `StepResult`
CANDIDATES = ["candidate_ids", "candidate_logprobs"]  # fields of `StepResult`, and outputs


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position of a sequence.

    They are those of the model, before biases, penalties, filters and temperature.

    Attributes:
        id: id of the token at the position.
        logprob: log-probability of ``id`` after the tokens before it.
        top: (id, log-probability) of the most likely tokens, most likely first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the object that JSON output shows; None for a value that is not finite."""
        entries = [(self.id, self.logprob), *self.top]
        own, *top = (
            {"id": each, "logprob": value if math.isfinite(value) else None}
            for each, value in entries
        )
        return {**own, "top": top}


class StepResult(NamedTuple):
    """What a step samples; row r belongs to its r-th chunk that samples.

    All but ``ids`` is None unless a request of the step asks for log-probabilities, which are those
    of the logits before biases, penalties, filters and temperature.

    Attributes:
        ids: sampled ids [R]; -1 if the logits are not finite. There may be more rows.
        logprobs: log-probabilities of the sampled ids [R, 1].
        top_ids: the most likely ids [R, K], with K = `Limits.top_logprobs`.
        top_logprobs: their log-probabilities [R, K].
        prompts: log-probabilities of tokens of prompts, by the index of the chunk, for requests
            with `Sampling.prompt_logprobs`.
        errors: errors of logits processors by row, whose requests end.
        candidate_ids: for beam search, the most likely ids after biases [R, C], with C =
            `Limits.candidates`.
        candidate_logprobs: their log-probabilities [R, C], with biases added.
    """

    ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompts: Mapping[int, list[TokenLogprobs]] | None = None
    errors: Mapping[int, RequestError] | None = None
    candidate_ids: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> StepResult:
        """Return the result of outputs by name; ``sampled`` is ``ids``, and suffixes do not count.

        See `graphllm.engine.sampler.sampling_outputs`.
        """
        fields: dict[str, Any] = {name.split(".")[0]: each for name, each in arrays.items()}
        ids = fields.pop("sampled") if "sampled" in fields else fields.pop("ids")
        return cls(ids, **fields)

    def at(self, rows: Sequence[int]) -> StepResult:
        """Return these rows of a decode step's result."""
        return StepResult(
            *(each[rows] if isinstance(each, np.ndarray) else None for each in self)  # type: ignore[arg-type]
        )

    def candidate_faults(self) -> Collection[int]:
        """Return the rows whose candidates are of logits that are not finite."""
        if self.candidate_logprobs is None:
            return ()
        return set(np.flatnonzero(np.isnan(self.candidate_logprobs[:, 0])).tolist())

    def token(self, row: int, count: int) -> TokenLogprobs:
        """Return the log-probabilities of a row, with the ``count`` most likely tokens."""
        assert self.logprobs is not None
        assert self.top_ids is not None and self.top_logprobs is not None
        ids, values = self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist()
        return TokenLogprobs(int(self.ids[row]), float(self.logprobs[row, 0]), (*zip(ids, values),))


def stages_of(rows: Sequence[Row]) -> int:
    """Return the number of stages of the sampling program that the rows need."""
    return max(row.stages for row in rows)


def result_outputs(name: str, rows: Sequence[Row]) -> list[str]:
    """Return the names of the outputs of a `StepResult`; ``name``: that of the sampled ids."""
    suffix = STAGES[stages_of(rows)]
    asked = if_asked(rows, ["logprobs" + suffix, "top_ids", "top_logprobs"])
    return [name + suffix, *asked, *candidate_outputs(rows)]


def candidate_outputs(rows: Sequence[Row]) -> list[str]:
    """Return the outputs of which the host chooses the tokens of a row, if there is such a row."""
    return CANDIDATES if any(row.asks_candidates for row in rows) else []


def if_asked(rows: Sequence[Row], names: list[str]) -> list[str]:
    """Return ``names`` if a row asks for log-probabilities."""
    return names if any(row.asks_logprobs for row in rows) else []
