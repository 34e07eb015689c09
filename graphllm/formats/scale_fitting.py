"""Scales and levels of encoders: NumPy functions in float32, each operation rounding once.

The scales fit the extreme values of each block, which takes one pass. `scale_search` has better
ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

F32 = np.float32
Array = np.ndarray


def inverse(d: Array) -> Array:
    """1 / d; 0 where the result is infinite or NaN, so that values next to zero become zero."""
    found = F32(1) / d
    return np.where(np.isfinite(found), found, F32(0))


def largest(x: Array) -> Array:
    """The value of largest magnitude along the last axis, with its sign; the first of several.
    Shape [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def round_away(x: Array) -> Array:
    """Round to the nearest integer, halves away from zero, as C's roundf."""
    return np.trunc(x + np.copysign(F32(0.5), x))


def nearest(x: Array, values: tuple[int, ...]) -> Array:
    """The index of the nearest of ``values``, which ascend; the lower one at a tie."""
    # x lies above a midpoint, which is a multiple of a half, if the ceiling of 2 x does.
    first, last = 2 * values[0], 2 * values[-1]
    index = np.searchsorted(np.add(values[1:], values[:-1]), np.arange(first, last + 1))
    place = np.ceil(np.clip(x * F32(2), F32(first), F32(last))) - F32(first)
    return index.astype(np.uint8)[place.astype(np.int16)]


def _empty() -> Array:
    return np.zeros(0, F32)


@dataclass(frozen=True)
class BlockScales:
    """Scales of n blocks: x ~= d * scale * level - dmin * low.

    ``d`` and ``dmin`` are float16 [n, 1], ``scale`` and ``low`` integers [n, sub-blocks]. Formats
    of one run have no integers: x ~= d * level + dmin. Fields that a format lacks are empty.
    """

    d: Array
    scale: Array = field(default_factory=_empty)
    dmin: Array = field(default_factory=_empty)
    low: Array = field(default_factory=_empty)

    @property
    def step(self) -> Array:
        """The difference between two levels, float32 [n, sub-blocks, 1]."""
        return (self.d.astype(F32) * self.scale.astype(F32))[..., None]

    @property
    def base(self) -> Array:
        """What is subtracted from scaled levels, float32 [n, sub-blocks, 1]."""
        return (self.dmin.astype(F32) * self.low.astype(F32))[..., None]

    def levels(self, sub: Array, low: int, high: int) -> Array:
        """The nearest levels of float32 [n, sub-blocks, elements], within low..high, as float32."""
        if self.dmin.size:
            sub = sub + self.base
        found = sub * inverse(self.step)
        np.rint(found, out=found)
        return np.clip(found, low, high, out=found)


def span_steps(x: Array, most: int, given: BlockScales | None = None) -> tuple[Array, Array, Array]:
    """Map each block's [min(x), max(x)], or the span of ``given``, to 0..most.

    Returns q uint8 [n, block], the step and the minimum, float32 [n, 1].
    """
    if given is None:
        least = np.take_along_axis(x, x.argmin(axis=-1)[..., None], axis=-1)  # keeps a zero's sign
        d = np.abs(x.max(axis=-1, keepdims=True) - least) / F32(most)
    else:
        d, least = given.d.astype(F32), given.dmin.astype(F32)
    q = np.clip((x - least) * inverse(d) + F32(0.5), 0, most).astype(np.uint8)
    return q, d, least


def fit_span(sub: Array, most: int, top: int) -> BlockScales:
    """Map each sub-block's [min(x, 0), max(x, 0)] to 0..most.

    Args:
        sub: float32 [n, sub-blocks, elements].
        most: largest integer of an element.
        top: largest integer of a scale or a minimum.
    """
    least, highest = sub.min(axis=-1), sub.max(axis=-1)
    least = -np.where(least < 0, least, F32(0))  # never a zero with the other sign
    span = (np.where(highest > 0, highest, F32(0)) + least) / F32(most)
    d = (span.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    dmin = (least.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    scale = np.clip(np.rint(span * inverse(d.astype(F32))), 0, top).astype(np.uint8)
    low = np.clip(np.rint(least * inverse(dmin.astype(F32))), 0, top).astype(np.uint8)
    return BlockScales(d, scale, dmin, low)


def fit_largest(sub: Array, lowest: int, top: int) -> BlockScales:
    """Map the value of largest magnitude of each sub-block to about ``lowest``, which is negative.

    Args:
        sub: float32 [n, sub-blocks, elements].
        lowest: integer of the value of largest magnitude.
        top: scales are integers in -top..top - 1.
    """
    span = largest(sub)[..., 0] / F32(lowest)
    d = (largest(span) / F32(-top)).astype("<f2")
    scale = np.clip(np.rint(span * inverse(d.astype(F32))), -top, top - 1).astype(np.int8)
    return BlockScales(d, scale)
