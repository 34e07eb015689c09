"""Rates at which draft tokens are accepted, by their place in a step."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

# Initial rates at which the first, second, third and fourth, fifth to eighth, and further
# drafts of a step are accepted if those before them are, and the weight of the last outcome.
_INITIAL_RATES = (0.3, 0.8, 0.9, 0.9, 0.9)
_WEIGHT = 1 / 16


class AcceptanceRates:
    """How often the drafts of a request are accepted, in all of its steps.

    Once a draft is accepted, the next one mostly is. Of a step without drafts, the first prediction
    counts as one.
    """

    def __init__(self) -> None:
        self._rates = [*_INITIAL_RATES]

    def note(self, drafts: int, accepted: int) -> None:
        """Note how many of the ``drafts`` of a step were accepted."""
        for place in range(min(drafts, accepted + 1)):
            group = _group(place)
            self._rates[group] += ((place < accepted) - self._rates[group]) * _WEIGHT

    def rates(self, count: int) -> list[float]:
        """Return the rates at which the first 1, 2, ..., ``count`` drafts are all accepted."""
        return [*accumulate((self._rates[_group(place)] for place in range(count)), mul)]


def _group(place: int) -> int:
    """Return the index of the rate of a draft."""
    return min(place.bit_length(), len(_INITIAL_RATES) - 1)
