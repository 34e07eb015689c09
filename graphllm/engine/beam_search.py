"""Beam search: which hypotheses go on, which are finished, and when the search ends.

Nothing here knows the engine: `advance` takes the candidates of each live hypothesis, and returns
the next state. The rules are those of transformers' beam search (its version 5), for each group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

Tokens = tuple[int, ...]
NEVER = "never"  # a value of `early_stopping`


class Candidates(NamedTuple):
    """The most likely next tokens of a hypothesis, best first.

    Attributes:
        ids: token ids i32 [K].
        logprobs: their log-probabilities f32 [K]; -inf for ids that are never chosen.
    """

    ids: np.ndarray
    logprobs: np.ndarray


class Hypothesis(NamedTuple):
    """Generated tokens, the end token included.

    Attributes:
        tokens: token ids.
        logprob: sum of their log-probabilities, less the diversity penalties.
        score: ``logprob`` / length ** length penalty.
    """

    tokens: Tokens
    logprob: float
    score: float


class Group(NamedTuple):
    """State of one group of beams.

    Attributes:
        live: hypotheses that go on, best first; none once the group has ended.
        finished: the best finished hypotheses, best first.
    """

    live: tuple[Hypothesis, ...]
    finished: tuple[Hypothesis, ...]


@dataclass(frozen=True)
class BeamSearch:
    """Rules of one search.

    Attributes:
        beams: number of hypotheses that go on, in all groups together.
        most: maximum number of generated tokens.
        end_ids: token ids that end a hypothesis.
        stop_ids: token ids that end a hypothesis once it has ``min_tokens`` tokens before them.
        min_tokens: see ``stop_ids``.
        length_penalty: exponent of the length in the score; above 0 it favours long hypotheses.
        early_stopping: when a group that has as many finished hypotheses as beams ends. True: at
            once. False: when its best live hypothesis, were it finished now, is no better than the
            worst finished one. "never": when no live hypothesis can become better, which with a
            positive length penalty is judged by the maximum length.
        groups: number of groups of diverse beam search (Vijayakumar et al. 2016); a divisor of
            ``beams``.
        diversity_penalty: what a candidate loses for each live hypothesis of an earlier group
            that was continued by the same token in the same step.
        forced_eos_id: the last of ``most`` tokens; None: any token.
        forced: number of tokens before the generated ones that count in the length (forced first
            tokens of an encoder-decoder, which transformers generates).
    """

    beams: int
    most: int
    end_ids: Collection[int] = ()
    stop_ids: Collection[int] = ()
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    groups: int = 1
    diversity_penalty: float = 0.0
    forced_eos_id: int | None = None
    forced: int = 0

    @property
    def width(self) -> int:
        """Number of beams of a group."""
        return self.beams // self.groups

    @property
    def candidates(self) -> int:
        """Number of candidates of each hypothesis that `advance` needs for an exact result.

        Of one hypothesis, the best ``width`` candidates that do not end it can go on, and only
        those among its best ``width`` can finish. A penalty moves other groups' tokens back.
        """
        ends = len({*self.end_ids, *self.stop_ids})
        others = self.beams - self.width if self.diversity_penalty else 0
        return self.width + ends + others

    def start(self) -> tuple[Group, ...]:
        """Return the state before the first token."""
        return (Group((Hypothesis((), 0.0, 0.0),), ()),) * self.groups

    def advance(
        self, state: tuple[Group, ...], candidates: Mapping[Tokens, Candidates]
    ) -> tuple[Group, ...]:
        """Return the state one token later.

        Args:
            state: the state.
            candidates: candidates of each live hypothesis, by its tokens. Candidates with a
                log-probability of -inf or NaN are ignored, so a group may have fewer hypotheses
                than beams.
        """
        chosen: Counter[int] = Counter()  # last tokens of the live hypotheses of earlier groups
        found = []
        for group in state:
            if group.live:
                group = self._advance(group, candidates, chosen)
                if self.diversity_penalty:
                    chosen.update(hypothesis.tokens[-1] for hypothesis in group.live)
            found.append(group)
        return tuple(found)

    def _advance(
        self, group: Group, candidates: Mapping[Tokens, Candidates], chosen: Counter[int]
    ) -> Group:
        length = len(group.live[0].tokens) + 1
        parts = [candidates[hypothesis.tokens] for hypothesis in group.live]
        if self.forced_eos_id is not None and length == self.most:
            last = Candidates(np.array([self.forced_eos_id], np.int32), np.zeros(1, np.float32))
            parts = [last] * len(parts)
        ranked: list[tuple[float, Tokens, int]] = []  # few: NumPy's calls would take longer
        for hypothesis, part in zip(group.live, parts, strict=True):
            for token, logprob in zip(part.ids.tolist(), part.logprobs.tolist(), strict=True):
                total = logprob + hypothesis.logprob
                if chosen:
                    total -= self.diversity_penalty * chosen[token]
                if math.isfinite(total):
                    ranked.append((total, hypothesis.tokens, token))
        ranked.sort(key=itemgetter(0), reverse=True)
        ends = self.ends(length)
        live, finished = list[Hypothesis](), list(group.finished)
        for rank, (total, before, token) in enumerate(ranked):
            end = length == self.most or token in ends
            if len(live) == self.width and rank >= self.width:
                break
            if rank < self.width if end else len(live) < self.width:
                made = Hypothesis((*before, token), total, self._score(total, length))
                (finished if end else live).append(made)
        finished = sorted(finished, key=lambda each: -each.score)[: self.width]
        return Group(() if self._ended(live, finished) else tuple(live), tuple(finished))

    def ends(self, length: int) -> Collection[int]:
        """Return the ids that end a hypothesis as its token number ``length``."""
        return {*self.end_ids, *self.stop_ids} if length > self.min_tokens else self.end_ids

    def _ended(self, live: list[Hypothesis], finished: list[Hypothesis]) -> bool:
        """Whether a group ends after the step that gave these hypotheses."""
        if not live or len(finished) < self.width:
            return not live
        if self.early_stopping is True:
            return True
        length = len(live[0].tokens)
        if self.early_stopping == NEVER and self.length_penalty > 0:
            length = self.most
        return self._score(live[0].logprob, length) <= finished[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / (length + self.forced) ** self.length_penalty


def best(state: tuple[Group, ...], count: int) -> list[Hypothesis]:
    """Return the ``count`` best finished hypotheses of all groups, or all if there are fewer."""
    finished = [hypothesis for group in state for hypothesis in group.finished]
    return sorted(finished, key=lambda each: -each.score)[:count]


def live_tokens(state: tuple[Group, ...]) -> list[Tokens]:
    """Return the tokens of all live hypotheses, each once, in order."""
    return list(dict.fromkeys(each.tokens for group in state for each in group.live))
