"""Prompt look-up: predict the next tokens of a sequence from an earlier occurrence of its end.

Saxena 2023 (prompt lookup decoding). Occurrences of a pair of tokens are chained as in the hash
chains of LZ77 compressors, so a step costs a few comparisons, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHORTEST = 2  # tokens of a match: pairs are indexed
_LONGEST = 32  # most tokens of a match that are compared
_CANDIDATES = 16  # most occurrences that are compared

# Initial rates at which predictions come true, by the bit length of the number of matching tokens
# (2 to 3, 4 to 7, 8 to 15, 16 to 31, more), and the weight of the last outcome in a rate.
_INITIAL_RATES = (0.0, 0.0, 0.3, 0.5, 0.7, 0.85, 0.85)
_HIGHEST = len(_INITIAL_RATES) - 1
_WEIGHT = 1 / 8


class PromptLookup:
    """Predictions of the next tokens of one sequence, and how often they come true.

    Every sampled token is compared with its prediction, whether or not that was computed as a
    draft. So the rates are known also while drafts do not pay.

    Args:
        tokens: the tokens of the sequence, to which the caller appends.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._rates = [*_INITIAL_RATES]
        self._forget()

    def _forget(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # pair -> position behind its last occurrence
        self._previous = [0, 0]  # by position: that behind the occurrence before; 0: there is none
        self._source = 0  # position of the earlier token that predicts the next one; 0: none does
        self._matched = 0  # number of tokens before it that agree with the last tokens

    def update(self) -> None:
        """Take note of the tokens that were appended since the last call."""
        tokens = self._tokens
        if len(tokens) + 1 < len(self._previous):  # some were taken back after a failed step
            self._forget()
        for at in range(len(self._previous) - 1, len(tokens)):
            if self._source:
                self._compare(tokens[at])
            pair = tokens[at - 1], tokens[at]
            self._previous.append(self._last.get(pair, 0))
            self._last[pair] = at + 1
        if not self._source and len(tokens) >= _SHORTEST:
            self._find()

    def _compare(self, token: int) -> None:
        """Compare a new token with its prediction."""
        level = min(self._matched.bit_length(), _HIGHEST)
        hit = token == self._tokens[self._source]
        self._rates[level] += (hit - self._rates[level]) * _WEIGHT
        self._source, self._matched = (self._source + 1, self._matched + 1) if hit else (0, 0)

    def _find(self) -> None:
        """Choose the occurrence of the last pair with the longest match, of equals the latest."""
        tokens, end = self._tokens, len(self._tokens)
        at = self._previous[end]
        for _ in range(_CANDIDATES):
            if not at:
                return
            length, most = _SHORTEST, min(at, _LONGEST)
            while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self._matched:
                self._source, self._matched = at, length
            at = self._previous[at]

    def rates(self, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ..., ``count`` predictions all come true.

        Empty if there is no prediction.
        """
        found, product, rates = list[float](), 1.0, self._rates
        for matched in range(self._matched, self._matched + count) if self._source else ():
            product *= rates[min(matched.bit_length(), _HIGHEST)]
            found.append(product)
        return found

    def predict(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` tokens; a prediction that reaches the end is repeated."""
        found = (*self._tokens[self._source : self._source + count],)
        return (found * count)[:count] if len(found) < count else found
