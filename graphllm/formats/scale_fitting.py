"""Scales and steps of encoders: NumPy functions in float32, each operation rounding once."""

from __future__ import annotations

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
    table = np.array(values, F32)
    return np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.uint8)


def span_steps(x: Array, most: int) -> tuple[Array, Array, Array]:
    """Map each block's [min(x), max(x)] to 0..most. Returns q uint8 [n, block], the step and the
    minimum, float32 [n, 1]."""
    least = np.take_along_axis(x, x.argmin(axis=-1)[..., None], axis=-1)  # keeps a zero's sign
    d = np.abs(x.max(axis=-1, keepdims=True) - least) / F32(most)
    q = np.minimum((x - least) * inverse(d) + F32(0.5), most).astype(np.uint8)
    return q, d, least


def fit_span(sub: Array, most: int, top: int) -> tuple[Array, Array, Array, Array, Array]:
    """Map each sub-block's [min(x, 0), max(x, 0)] to 0..most; ggml searches for a better fit.

    Args:
        sub: float32 [n, sub-blocks, elements].
        most: largest integer of an element.
        top: largest integer of a scale or a minimum.

    Returns:
        q, scales and minima (uint8), and their units d and dmin (float16 [n, 1]):
        x ~= d * scale * q - dmin * minimum.
    """
    least, highest = sub.min(axis=-1), sub.max(axis=-1)
    least = -np.where(least < 0, least, F32(0))  # never a zero with the other sign
    span = (np.where(highest > 0, highest, F32(0)) + least) / F32(most)
    d = (span.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    dmin = (least.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    scale = np.clip(np.rint(span * inverse(d.astype(F32))), 0, top).astype(np.uint8)
    low = np.clip(np.rint(least * inverse(dmin.astype(F32))), 0, top).astype(np.uint8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    base = (dmin.astype(F32) * low.astype(F32))[..., None]
    q = np.clip(np.rint((sub + base) * inverse(step)), 0, most).astype(np.uint8)
    return q, scale, low, d, dmin


def fit_largest(sub: Array, lowest: int, top: int) -> tuple[Array, Array, Array]:
    """Map the value of largest magnitude of each sub-block to about ``lowest``, which is negative;
    ggml searches for a better fit.

    Args:
        sub: float32 [n, sub-blocks, elements].
        lowest: integer of the value of largest magnitude.
        top: scales are integers in -top..top - 1.

    Returns:
        The elements in steps of their scales (float32, not rounded), the scales (int8) and their
        unit d (float16 [n, 1]).
    """
    span = largest(sub)[..., 0] / F32(lowest)
    d = (largest(span) / F32(-top)).astype("<f2")
    scale = np.clip(np.rint(span * inverse(d.astype(F32))), -top, top - 1).astype(np.int8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    return sub * inverse(step), scale, d
