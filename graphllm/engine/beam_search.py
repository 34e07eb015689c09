"""Beam search: which hypotheses go on, which are finished, and when the search ends.

Nothing here knows the engine: `advance` takes the candidates of all live hypotheses of several
searches, chooses in arrays, and returns the next states. The rules are those of transformers' beam
search (its version 5), for each group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

Tokens = tuple[int, ...]
NEVER = "never"  # a value of `early_stopping`


class Hypothesis(NamedTuple):
    """A finished hypothesis.

    Attributes:
        tokens: generated token ids, the end token included.
        logprob: sum of their log-probabilities, less the diversity penalties.
        score: ``logprob`` / length ** length penalty.
    """

    tokens: Tokens
    logprob: float
    score: float


class Group(NamedTuple):
    """State of one group of beams.

    Attributes:
        live: hypotheses that go on, best first, as indices of `State.last`; none once the group has
            ended.
        logprobs: the sum of the log-probabilities of each, less the diversity penalties.
        finished: the best finished hypotheses, best first.
    """

    live: list[int]
    logprobs: list[float]
    finished: list[Hypothesis]


class State(NamedTuple):
    """State of one search.

    Attributes:
        length: number of tokens of the live hypotheses.
        last: of each live hypothesis, whichever groups have it, the index in ``before.last`` of the
            hypothesis that it continues, and its last token.
        groups: the groups.
        before: the state one token earlier; None at the start.
    """

    length: int
    last: list[tuple[int, int]]
    groups: list[Group]
    before: State | None

    def tokens(self, index: int) -> Tokens:
        """Return the tokens of a live hypothesis."""
        found, state = list[int](), self
        while state.before is not None:
            index, token = state.last[index]
            found.append(token)
            state = state.before
        return tuple(reversed(found))

    def live_tokens(self) -> list[Tokens]:
        """Return the tokens of all live hypotheses."""
        return [self.tokens(index) for index in range(len(self.last))]

    def best(self, count: int) -> list[Hypothesis]:
        """Return the ``count`` best finished hypotheses, or all if there are fewer."""
        finished = [hypothesis for group in self.groups for hypothesis in group.finished]
        return sorted(finished, key=_worst_last)[:count]


def _worst_last(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


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

    @cached_property
    def width(self) -> int:
        """Number of beams of a group."""
        return self.beams // self.groups

    @cached_property
    def candidates(self) -> int:
        """Number of candidates of each hypothesis that `advance` needs for an exact result.

        Of one hypothesis, the best ``width`` candidates that do not end it can go on, and only
        those among its best ``width`` can finish. A penalty moves other groups' tokens back.
        """
        others = self.beams - self.width if self.diversity_penalty else 0
        return self.width + len(self._all_ends) + others

    @cached_property
    def _all_ends(self) -> frozenset[int]:
        return frozenset((*self.end_ids, *self.stop_ids))

    def start(self) -> State:
        """Return the state before the first token: one hypothesis, which all groups have."""
        return State(0, [(0, -1)], [Group([0], [0.0], [])] * self.groups, None)

    def ends(self, length: int) -> Collection[int]:
        """Return the ids that end a hypothesis as its token number ``length``."""
        return self._all_ends if length > self.min_tokens else self.end_ids

    def forces_end(self, length: int) -> bool:
        """Whether token number ``length`` must be ``forced_eos_id``."""
        return self.forced_eos_id is not None and length == self.most

    def ended(self, logprobs: Sequence[float], finished: Sequence[Hypothesis], length: int) -> bool:
        """Whether a group ends once its hypotheses have ``length`` tokens, see `Group`."""
        if not logprobs or len(finished) < self.width:
            return not logprobs
        if self.early_stopping is True:
            return True
        if self.early_stopping == NEVER and self.length_penalty > 0:
            length = self.most
        return self.score(logprobs[0], length) <= finished[-1].score

    def score(self, logprob: float, length: int) -> float:
        """Return the score of a hypothesis."""
        return logprob / (length + self.forced) ** self.length_penalty


class _Step:
    """One search while its next state is made, group by group.

    Attributes:
        rules: its rules.
        state: the state before.
        first: row of the candidates of its first hypothesis.
        length: number of tokens of the hypotheses being made.
        groups: the groups of the next state, as far as they are made; the others as before.
        chosen: last tokens of the live hypotheses of the groups that are made.
    """

    def __init__(self, rules: BeamSearch, state: State, first: int) -> None:
        self.rules, self.state, self.first, self.length = rules, state, first, state.length + 1
        self.groups = [*state.groups]
        self.chosen: list[int] = []
        self._made: dict[tuple[int, int], int] = {}  # indices of `State.last`, by what it has

    def set_group(self, index: int, live: _Continuations, ends: _Continuations) -> None:
        """Set group ``index``, given what goes on and what finishes, each best first."""
        made, finished = self._made, self.groups[index].finished
        if ends.tokens:
            finished = sorted([*finished, *map(self._finished, *ends)], key=_worst_last)
            finished = finished[: self.rules.width]
        if self.rules.ended(live.logprobs, finished, self.length):
            self.groups[index] = Group([], [], finished)
            return
        last = zip(live.parents, live.tokens)
        indices = [made.setdefault(each, len(made)) for each in last]
        self.groups[index] = Group(indices, live.logprobs, finished)
        self.chosen += live.tokens

    def _finished(self, parent: int, token: int, logprob: float) -> Hypothesis:
        tokens = (*self.state.tokens(parent), token)
        return Hypothesis(tokens, logprob, self.rules.score(logprob, self.length))

    def next_state(self) -> State:
        """Return the next state, all groups of which are made."""
        return State(self.length, [*self._made], self.groups, self.state)


class _Continuations(NamedTuple):
    """Continuations of the hypotheses of one group, best first.

    Attributes:
        parents: what they continue, as indices of `State.last`.
        tokens: their last tokens.
        logprobs: see `Group`.
    """

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]


def advance(
    searches: Sequence[tuple[BeamSearch, State]], ids: np.ndarray, logprobs: np.ndarray
) -> list[State]:
    """Return the states of several searches one token later.

    Groups of equal sizes are chosen together: the number of calls of NumPy does not depend on the
    number of searches.

    Args:
        searches: rules and state of each search, none of which has ended.
        ids: the most likely next tokens of each live hypothesis, best first: integers [R, C], with
            a row for each entry of `State.last` of the first search, then of the second one, ...
        logprobs: their log-probabilities f32 [R, C]. Candidates with -inf or NaN are ignored, so a
            group may have fewer hypotheses than beams.
    """
    steps, first = list[_Step](), 0
    for rules, state in searches:
        steps.append(_Step(rules, state, first))
        first += len(state.last)
    for index in range(max(len(step.groups) for step in steps)):
        alike: dict[tuple[int, int, bool], list[_Step]] = {}
        for step in steps:
            if index < len(step.groups) and (live := step.groups[index].live):
                key = len(live), step.rules.width, step.rules.forces_end(step.length)
                alike.setdefault(key, []).append(step)
        for some in alike.values():
            _advance_groups(some, index, ids, logprobs)
    return [step.next_state() for step in steps]


def _advance_groups(
    steps: Sequence[_Step], index: int, ids: np.ndarray, logprobs: np.ndarray
) -> None:
    """Make group ``index`` of searches [S], in which it has as many live hypotheses [L] and beams.

    Candidates are ranked over all hypotheses of a group: [S, L * C].
    """
    count, width = len(steps), steps[0].rules.width
    groups = [step.groups[index] for step in steps]
    parents, sums = np.array([g.live for g in groups]), np.array([g.logprobs for g in groups])
    rows = parents + np.array([[step.first] for step in steps])
    if steps[0].rules.forces_end(steps[0].length):
        tokens = np.array([[[step.rules.forced_eos_id]] for step in steps]).repeat(len(rows[0]), 1)
        totals = sums[:, :, None]
    else:
        needed = max(step.rules.candidates for step in steps)
        tokens = ids[rows, :needed]
        totals = logprobs[rows, :needed] + sums[:, :, None]
    if index:
        totals = totals - _diversity_penalties(steps, tokens)
    each = tokens.shape[2]
    tokens, totals = tokens.reshape(count, -1), totals.reshape(count, -1)
    totals = np.where(np.isfinite(totals), totals, -np.inf)
    order = np.argsort(-totals, axis=1, kind="stable")
    tokens, totals = (np.take_along_axis(x, order, 1) for x in (tokens, totals))
    parents = np.take_along_axis(parents, order // each, 1)
    ends, possible = _are_ends(steps, tokens), totals > -np.inf
    goes_on = possible & ~ends
    goes_on &= np.cumsum(goes_on, axis=1) <= width
    finishes = (possible & ends)[:, :width]
    chosen = _split(goes_on, parents, tokens, totals)
    finished = _split(finishes, *(x[:, :width] for x in (parents, tokens, totals)))
    for step, live, over in zip(steps, chosen, finished):
        step.set_group(index, live, over)


def _diversity_penalties(steps: Sequence[_Step], tokens: np.ndarray) -> np.ndarray:
    """Return what the tokens [S, L, C] lose for the earlier groups."""
    most = max(len(step.chosen) for step in steps)
    chosen = np.array([[*step.chosen, *[-1] * (most - len(step.chosen))] for step in steps])
    counts = (tokens[..., None] == chosen[:, None, None, :]).sum(-1)
    return counts * np.array([step.rules.diversity_penalty for step in steps])[:, None, None]


def _are_ends(steps: Sequence[_Step], tokens: np.ndarray) -> np.ndarray:
    """Return whether each of the tokens [S, N] ends a hypothesis."""
    ends = [step.rules.ends(step.length) for step in steps]
    most = max(map(len, ends))
    padded = np.array([[*own, *[-1] * (most - len(own))] for own in ends])
    last = np.array([[step.length == step.rules.most] for step in steps])
    return (tokens[:, :, None] == padded[:, None, :]).any(-1) | last


def _split(chosen: np.ndarray, *values: np.ndarray) -> list[_Continuations]:
    """Return the values [S, N] each at which ``chosen`` is true, by row."""
    if not chosen.any():
        return [_Continuations([], [], [])] * len(chosen)
    flat = [x[chosen].tolist() for x in values]
    stops = np.cumsum(chosen.sum(1)).tolist()
    starts = [0, *stops]
    return [_Continuations(*(x[a:b] for x in flat)) for a, b in zip(starts, stops)]
