"""Feeds of the sampling program: settings, and the recent token ids of each sequence."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import RequestError
from ..model.decoder import Limits
from ..ops.penalties import FACTORS, WINDOWS
from ..ops.sampling_filters import FILTERS
from .logits_processors import LogitsProcessor
from .request import Sampling
from .sequence import ActiveSequence
from .sequence_blocks import SequenceBlocks

if TYPE_CHECKING:
    from .grammar import GrammarState

INT32_MAX = 2**31 - 1


class Row(Protocol):
    """A row of a step: a sequence with its settings.

    Attributes:
        sequence: its tokens.
        sampling: the settings.
        settings: their feeds, see `sampling_row`.
        stages: number of stages before `ops.sample` that the request needs; see `Sampling.stages`.
        processors: logits processors, which the host applies.
        grammar: restricts the tokens that may follow; None if all may.
        asks_logprobs: whether the step returns the log-probabilities of `StepResult`.
        asks_candidates: whether it returns the candidates of `StepResult`.
    """

    sequence: ActiveSequence
    sampling: Sampling
    settings: Mapping[str, np.ndarray]
    stages: int
    processors: Sequence[LogitsProcessor]
    grammar: GrammarState | None
    asks_logprobs: bool
    asks_candidates: bool

    @property
    def count(self) -> int:
        """Number of tokens after the prompt."""

    @property
    def blocks(self) -> SequenceBlocks:
        """The cache blocks of a running sequence."""

    def prompt_positions(self, start: int, stop: int) -> range:
        """Return the positions of a chunk whose hidden states the host needs."""


def sampling_row(
    limits: Limits, sampling: Sampling, eos_ids: Sequence[int], sample_index: int = 0
) -> dict[str, np.ndarray]:
    """Return the feeds of the sampling program that one request does not change, [1, ...] each.

    See `graphllm.engine.sampler.sampler_variables`.

    Args:
        limits: limits of the graph.
        sampling: settings.
        eos_ids: token ids that ``min_tokens`` and ``ignore_eos`` forbid.
        sample_index: index among the samples of the request.

    Raises:
        RequestError: a list or a window is larger than the limits.
    """
    if len(eos_ids) > limits.stops:
        raise RequestError(
            f"the model has {len(eos_ids)} EOS ids; at most {limits.stops} are supported"
        )
    banned = dict.fromkeys(sampling.banned_ids, -np.inf)
    bias = {**sampling.logit_bias, **banned}
    _check_lengths(
        {
            "logit_bias and banned_ids": (len(bias), limits.biases),
            "allowed_ids": (len(sampling.allowed_ids), limits.allowed),
            "dry_breaker_ids": (len(sampling.dry_breaker_ids), limits.breakers),
        }
    )
    min_tokens = INT32_MAX if sampling.ignore_eos else sampling.min_tokens
    return {
        "min_tokens": np.array([min_tokens], np.int32),
        "sample_index": np.array([sample_index], np.int32),
        **_filter_feeds(sampling),
        **_penalty_feeds(limits, sampling),
        "seed": np.array([sampling.seed or 0], np.int64),
        "early_stop": _padded(eos_ids, limits.stops),
        "bias_ids": _padded(list(bias), limits.biases),
        "bias": _padded(list(bias.values()), limits.biases, 0.0, np.float32),
        "allowed": _padded(sampling.allowed_ids, limits.allowed),
    }


def sampling_feeds(
    limits: Limits, rows: Sequence[Row], names: Container[str], history: bool
) -> dict[str, np.ndarray]:
    """Return the feeds of the sampling program for a step, one row for each request.

    Args:
        limits: limits of the graph.
        rows: the requests.
        names: names of the leaves that the plan has.
        history: whether the plan reads the last tokens of the sequences.
    """
    return settings_feeds(rows, names) | token_feeds(limits, rows, history)


def token_feeds(limits: Limits, rows: Sequence[Row], history: bool) -> dict[str, np.ndarray]:
    """Return those of `sampling_feeds` that change with each token."""
    feeds = {"count": np.array([row.count for row in rows], np.int32)}
    if history:
        feeds["history"] = np.empty((len(rows), limits.history), np.int32)
        for ring, row in zip(feeds["history"], rows):
            stop = row.sequence.prompt_tokens + row.count
            ring[:] = history_ring(row.sequence.tokens, stop, limits.history)
    return feeds


def settings_feeds(rows: Sequence[Row], names: Container[str]) -> dict[str, np.ndarray]:
    """Return those of `sampling_feeds` that stay the same during a request."""
    settings, places = list[Mapping[str, np.ndarray]](), list[int]()
    for row in rows:  # the beams of a request and its draft tokens share its settings
        if not settings or row.settings is not settings[-1]:
            settings.append(row.settings)
        places.append(len(settings) - 1)
    return {
        name: np.concatenate([each[name] for each in settings])[places]
        for name in rows[0].settings
        if name in names
    }


def mask_feed(rows: Sequence[Row], room: np.ndarray) -> np.ndarray:
    """Return bitmaps of the ids that the grammar of each row allows: the first rows of ``room``.

    ``room``: i32 [sequences, words], overwritten; see `ops.sample`.
    """
    masks = room[: len(rows)]
    if not any(row.grammar for row in rows):
        masks[:] = -1
        return masks
    from .grammar import fill_masks  # needs the extra ``structured``

    for row in rows:
        if row.grammar is not None:  # it is behind if the last step was interrupted
            row.grammar.follow(row.sequence)
    fill_masks([row.grammar for row in rows], masks)
    return masks


def _filter_feeds(sampling: Sampling) -> dict[str, np.ndarray]:
    """Return the feeds of `ops.sample`'s filters, and of those of `ops.filter_logits`.

    The filters of one of the ops are off: of `sample`'s, if `filter_logits` applies them before.
    """
    quick = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    here, before = (off, quick) if sampling.filters_logits else (quick, off)
    row = {
        "top_n_sigma": sampling.top_n_sigma,
        "typical_p": sampling.typical_p,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        **before,
    }
    return {
        "temperature": np.array([sampling.temperature], np.float32),
        "top_k": np.array([here["top_k"]], np.int32),
        "top_p": np.array([here["top_p"]], np.float32),
        "min_p": np.array([here["min_p"]], np.float32),
        "filters": np.array([[row[name] for name in FILTERS]], np.float32),
        "filter_top_k": np.array([before["top_k"]], np.int32),
    }


def _penalty_feeds(limits: Limits, sampling: Sampling) -> dict[str, np.ndarray]:
    """Return the feeds of `ops.penalise`, without the history."""
    for name in ("penalty_last_n", "dry_penalty_last_n"):
        if getattr(sampling, name) > limits.history:
            raise RequestError(
                f"{name} = {getattr(sampling, name)} must be at most {limits.history}, the number "
                "of last tokens that are kept",
                name,
            )
    row = {
        "repeat": sampling.repeat_penalty,
        "presence": sampling.presence_penalty,
        "frequency": sampling.frequency_penalty,
        **{name: getattr(sampling, name) for name in (*FACTORS[3:], *WINDOWS)},
    }
    return {
        "penalty_factors": np.array([[row[name] for name in FACTORS]], np.float32),
        "penalty_windows": np.array([[row[name] for name in WINDOWS]], np.int32),
        "breakers": _padded(sampling.dry_breaker_ids, limits.breakers),
    }


def _check_lengths(lengths: Mapping[str, tuple[int, int]]) -> None:
    """Raise RequestError if a list is longer than its limit."""
    for name, (length, most) in lengths.items():
        if length > most:
            text = f"{name} has {length} token ids; at most {most} are supported"
            raise RequestError(text, name.partition(" ")[0])


def _padded(
    values: Sequence[float], width: int, fill: float = -1, kind: type = np.int32
) -> np.ndarray:
    """Return an array [1, width] that begins with ``values``."""
    empty = _filled(width, fill, kind)
    if not values:
        return empty
    found = empty.copy()
    found[0, : len(values)] = values
    return found


@lru_cache
def _filled(width: int, fill: float, kind: type) -> np.ndarray:
    found: np.ndarray = np.full((1, width), fill, kind)
    found.flags.writeable = False  # many requests have it
    return found


def history_ring(tokens: Sequence[int], stop: int, width: int) -> np.ndarray:
    """Return the last ids before ``stop`` as a ring: position p in column p % width, else -1.

    Tokens of a source count as empty.
    """
    ring = np.full(width, -1, np.int32)
    first = max(0, stop - width)
    ring[np.arange(first, stop) % width] = tokens[first:stop]
    return np.maximum(ring, -1)
