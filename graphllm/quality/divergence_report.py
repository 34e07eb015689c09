"""Statistics of the divergence from a base model, those of llama.cpp's perplexity tool."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .perplexity import Perplexity, finite_or_none, standard_error

_KLD_QUANTILES = (1, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, 0)
_PROBABILITY_QUANTILES = (
    1, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0
)  # fmt: skip
_NAMES = {1: "maximum", 0.5: "median", 0: "minimum"}


class Statistic(NamedTuple):
    """A statistic, and its standard error if it has one."""

    name: str
    value: float
    error: float | None = None


@dataclass(frozen=True)
class Divergence:
    """What each predicted token shows about a model and its base; arrays [chunks, tokens of each].

    Attributes:
        context: tokens of a chunk.
        logprobs: log-probabilities of the tokens under the model.
        base_logprobs: those under the base model.
        kld: KL divergence of the model's distribution from the base's.
        same_top: 1 where both have the same most likely token, otherwise 0.
    """

    context: int
    logprobs: np.ndarray = field(repr=False)
    base_logprobs: np.ndarray = field(repr=False)
    kld: np.ndarray = field(repr=False)
    same_top: np.ndarray = field(repr=False)

    @property
    def mean_kld(self) -> float:
        """Mean KL divergence."""
        return float(self.kld.mean())

    @property
    def probability_differences(self) -> np.ndarray:
        """Probability of each token under the model minus that under the base."""
        return np.exp(self.logprobs) - np.exp(self.base_logprobs)

    def perplexities(self) -> list[Statistic]:
        """Return statistics of the perplexities of the model (Q) and the base.

        The errors of ratio and difference take into account that both have the same text.
        """
        own, base = (Perplexity.of(v, self.context) for v in (self.logprobs, self.base_logprobs))
        errors = standard_error(self.logprobs), standard_error(self.base_logprobs)
        n = self.logprobs.size
        covariance = float(np.cov(self.logprobs.ravel(), self.base_logprobs.ravel(), ddof=0)[0, 1])
        covariance /= max(1, n - 1)
        ln_ratio = float((self.base_logprobs - self.logprobs).mean())
        ln_error = _root(errors[0] ** 2 + errors[1] ** 2 - 2 * covariance)
        ratio = math.exp(min(ln_ratio, 700.0))
        difference_error = _root(
            own.standard_error**2 + base.standard_error**2
            - 2 * own.value * base.value * covariance
        )  # fmt: skip
        spread = errors[0] * errors[1]
        return [
            Statistic("PPL(Q)", own.value, own.standard_error),
            Statistic("PPL(base)", base.value, base.standard_error),
            Statistic("correlation of ln PPL", covariance / spread if spread else math.nan),
            Statistic("ln(PPL(Q)/PPL(base))", ln_ratio, ln_error),
            Statistic("PPL(Q)/PPL(base)", ratio, ratio * ln_error),
            Statistic("PPL(Q)-PPL(base)", own.value - base.value, difference_error),
        ]

    def divergences(self) -> list[Statistic]:
        """Return statistics of the KL divergence."""
        mean = Statistic("mean", self.mean_kld, standard_error(self.kld))
        return [mean, *_quantiles(self.kld, _KLD_QUANTILES)]

    def probabilities(self) -> list[Statistic]:
        """Return statistics of `probability_differences` and of `same_top`, as shares of 1."""
        differences = self.probability_differences
        squares, same = differences**2, float(self.same_top.mean())
        rms = math.sqrt(float(squares.mean()))
        rms_error = 0.5 / rms * standard_error(squares) if rms else 0.0
        return [
            Statistic("mean", float(differences.mean()), standard_error(differences)),
            *_quantiles(differences, _PROBABILITY_QUANTILES),
            Statistic("RMS", rms, rms_error),
            Statistic("same top token", same, standard_error(self.same_top)),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm perplexity --kl-divergence --json`` prints.

        A statistic with a standard error is a list of both; a number that is not finite is null.
        """
        groups = {
            "perplexity": self.perplexities(),
            "kl_divergence": self.divergences(),
            "probability_difference": self.probabilities(),
        }
        head = {"context": self.context, "chunks": len(self.kld), "tokens": self.kld.size}
        return head | {
            title: {each.name: _json(each) for each in group} for title, group in groups.items()
        }

    def table(self) -> str:
        """Return the statistics as text, in the order of llama.cpp's table."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (f"{len(self.kld)} chunks of {self.context} tokens, {self.kld.size} tokens predicted")
        yield "\nperplexity"
        for each in self.perplexities():
            if each.error is None:
                yield f"  {each.name:<22} {100 * each.value:>10.2f} %"
            else:
                yield f"  {each.name:<22} {each.value:>10.6f} ± {each.error:.6f}"
        yield "\nKL divergence of Q from the base"
        for each in self.divergences():
            error = "" if each.error is None else f" ± {each.error:.6f}"
            yield f"  {each.name:<22} {each.value:>10.6f}{error}"
        yield "\nprobability of the token, Q minus base"
        for each in self.probabilities():
            error = "" if each.error is None else f" ± {100 * each.error:.3f}"
            yield f"  {each.name:<22} {100 * each.value:>10.3f}{error} %"


def _quantiles(values: np.ndarray, shares: tuple[float, ...]) -> list[Statistic]:
    """Return quantiles with linear interpolation."""
    found = np.quantile(values, shares).tolist()
    return [Statistic(_NAMES.get(s, f"{100 * s:.4g}%"), v) for s, v in zip(shares, found)]


def _root(variance: float) -> float:
    """Return the square root of a variance that rounding may have made negative."""
    return math.sqrt(max(0.0, variance))


def _json(each: Statistic) -> float | list[float | None] | None:
    value = finite_or_none(each.value)
    return value if each.error is None else [value, finite_or_none(each.error)]
