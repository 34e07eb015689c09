"""Expected times of decode steps by their number of rows, from the times of those that ran."""

from __future__ import annotations

_WEIGHT = 1 / 8  # of the last step in a mean
_DOUBT = 0.995  # see `StepTimes.doubt`


class StepTimes:
    """Expected times of decode steps.

    A step of one row has kernels of its own, and so has a mean time of its own. The time of others
    is a linear function of the number of rows, fitted to the last ones by least squares. Both count
    a step as at most twice as long as expected, since other programs may hold it up.

    A step with draft tokens is fed by the host, and so is the one after it, while others continue
    on the device. So a change from the one kind to the other has its own time.
    """

    def __init__(self) -> None:
        self._one = 0.0  # mean seconds of a step of one row; 0: unknown
        self._rows = self._seconds = 0.0  # means over steps of several rows
        self._variance = self._covariance = 0.0  # of the rows, and of rows and seconds
        self._change = 0.0  # by which the first step after one with drafts takes longer
        self._drafted = False  # whether the last step had drafts
        self._run = set[int]()  # bit lengths of the numbers of rows of which a step has run

    def note(self, rows: int, drafted: bool, seconds: float) -> None:
        """Note the time of a step; ``drafted``: whether it had draft tokens."""
        changed, self._drafted = self._drafted and not drafted, drafted
        size, expected = (rows - 1).bit_length(), self.expected(rows)
        seconds = min(seconds, 2 * expected) if expected else seconds
        if size not in self._run:  # the first step of a plan may bind it
            self._run.add(size)
        elif changed:
            self._change += (max(0.0, seconds - expected) - self._change) * _WEIGHT
        elif rows == 1:
            self._one += (seconds - self._one) * (_WEIGHT if self._one else 1)
        else:
            self._fit(rows, seconds)

    def _fit(self, rows: int, seconds: float) -> None:
        """Add a step of several rows to the weighted means, variance and covariance."""
        weight = _WEIGHT if self._seconds else 1
        off, late = rows - self._rows, seconds - self._seconds
        self._rows += weight * off
        self._seconds += weight * late
        self._variance = (1 - weight) * (self._variance + weight * off * off)
        self._covariance = (1 - weight) * (self._covariance + weight * off * late)

    def begin_drafts(self) -> None:
        """Note that a series of steps with drafts begins."""
        self._drafted = True

    def expected(self, rows: int) -> float:
        """Return the expected seconds of a step in a series of its kind; 0 if there was none.

        The time of rows that were never tried is underestimated, so that they are.
        """
        if rows == 1 or not self._seconds:
            return self._one
        return max(self._one, self._seconds + self._slope * (rows - self._rows))

    @property
    def _slope(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance else 0.0

    def plain(self, rows: int) -> float:
        """Return the expected seconds that a step without drafts takes next; 0 if unknown."""
        expected = self.expected(rows)
        return expected + self._change if expected and self._drafted else expected

    def with_drafts(self, rows: range) -> list[float]:
        """Return the expected seconds that a step with drafts takes next, by its number of rows."""
        least, slope = self._one + (0.0 if self._drafted else self._change), self._slope
        first = least - self._one + self._seconds - slope * self._rows
        return [max(least, first + slope * count) if self._seconds else least for count in rows]

    def doubt(self) -> None:
        """Shorten the expected times of drafts, which were too long to try them.

        So an estimate that was once measured under load is measured again.
        """
        self._seconds *= _DOUBT
        self._covariance *= _DOUBT
