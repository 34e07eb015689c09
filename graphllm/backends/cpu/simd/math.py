"""Elementary functions that LLVM can vectorise, accurate to about one unit in the last place.

The only fast-math flag here is contraction: reassociation would break the reduction of arguments.
NaN propagates. Coefficients were fitted for this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..runtime.jit import as_f64, bits_f32, f32_of_bits, f64_as_bits, linked
from ..runtime.lazy_numba import float32, float64, int32, int64


def _exact(function: Callable[..., Any]) -> Any:
    """Inlined, as a loop that contains a call is not vectorised."""
    return linked(function, fastmath={"contract"}, forceinline=True)


_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693145751953125)  # 16 bits, so that n * it is exact
_LN2_LOW = np.float32(1.42860682030941723212e-6)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_ROUND_BITS = np.int32(0x4B400000)
_E = tuple(np.float32(1.0 / f) for f in (5040, 720, 120, 24, 6, 2))
_ONE, _HALF, _TWO = np.float32(1), np.float32(0.5), np.float32(2)


@_exact
def exp32(x):
    """e^x; 0 below -105, infinite above 89."""
    if x > float32(89.0):
        x = float32(89.0)
    if x < float32(-106.0):
        x = float32(-106.0)
    shifted = x * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _E[0]
    p = p * r + _E[1]
    p = p * r + _E[2]
    p = p * r + _E[3]
    p = p * r + _E[4]
    p = p * r + _E[5]
    p = (p * r + _ONE) * r + _ONE
    k = int32(bits_f32(shifted) - _ROUND_BITS)
    first = int32(k >> int32(1))  # 2^k in two factors: neither leaves the range of exponents
    second = int32(k - first)
    bias = int32(127)
    a = f32_of_bits(int32(int32(first + bias) << int32(23)))
    b = f32_of_bits(int32(int32(second + bias) << int32(23)))
    return p * a * b


_T = tuple(
    np.float32(c) for c in (-0.005473604891449213, 0.020420853048563004, -0.05366738513112068,
                         0.13330447673797607, -0.3333323001861572, 1.0)
)  # fmt: skip


@_exact
def tanh32(x):
    """Hyperbolic tangent."""
    z = abs(x)
    u = z * z
    if u > float32(1.0):  # the polynomial is not used there; keep it finite
        u = _ONE
    p = _T[0]
    p = p * u + _T[1]
    p = p * u + _T[2]
    p = p * u + _T[3]
    p = p * u + _T[4]
    p = p * u + _T[5]
    large = _ONE - _TWO / (exp32(_TWO * z) + _ONE)
    if x < float32(0.0):
        large = -large
    return p * x if z < float32(0.65) else large


@_exact
def silu32(x):
    """x / (1 + e^-x)."""
    return x / (_ONE + exp32(-x))


_U = np.float32(-2 * 0.7978845608028654)


@_exact
def gelu_tanh32(x):
    """x/2 (1 + tanh(u)) as x / (1 + e^-2u), which does not cancel; u = sqrt(2/pi) (x + ..x^3)."""
    u = x * (_ONE + float32(0.044715) * x * x)
    return x / (_ONE + exp32(_U * u))


_C = tuple(
    np.float32(c) for c in (-0.05831824243068695, 0.2811919152736664, -0.4808026850223541,
                         0.271470844745636, -0.022591425105929375, 0.20119665563106537,
                         0.24342681467533112, 0.28233784437179565, 0.28208819031715393)
)  # fmt: skip


@_exact
def gelu_erf32(x):
    """x/2 (1 + erf(x / sqrt 2)), from erfc(z) = t e^(-z^2) p(t), t = 1 / (1 + z/2), z >= 0."""
    z = abs(x) * float32(0.7071067811865476)
    t = _ONE / (_ONE + _HALF * z)
    p = _C[0]
    p = p * t + _C[1]
    p = p * t + _C[2]
    p = p * t + _C[3]
    p = p * t + _C[4]
    p = p * t + _C[5]
    p = p * t + _C[6]
    p = p * t + _C[7]
    p = p * t + _C[8]
    positive = x if x > float32(0.0) else float32(0.0)
    size = float32(16.0) if x > float32(16.0) else abs(x)  # erfc is 0: not infinity times 0
    return positive - _HALF * size * (t * exp32(-z * z) * p)


# ----------------------------------------------------------------------------------------- float64

_ROUND64 = 6755399441055744.0  # 1.5 * 2^52
_ROUND64_BITS = 0x4338000000000000
_QUARTER = (1.5707963267948966, 6.123233995736766e-17)  # pi/2, and the remainder of its rounding
_SIN = tuple(s / f for s, f in ((-1, 39916800), (1, 362880), (-1, 5040), (1, 120), (-1, 6)))
_COS = tuple(s / f for s, f in ((1, 479001600), (-1, 3628800), (1, 40320), (-1, 720), (1, 24)))


@_exact
def cos_sin(angle):
    """Cosine and sine of a float64 as float32, accurate to 1e-9 below a million radians."""
    shifted = angle * (1 / _QUARTER[0]) + _ROUND64
    n = shifted - _ROUND64
    r = (angle - n * _QUARTER[0]) - n * _QUARTER[1]
    z = r * r
    s = (((_SIN[0] * z + _SIN[1]) * z + _SIN[2]) * z + _SIN[3]) * z + _SIN[4]
    s = r + r * z * s
    c = (((_COS[0] * z + _COS[1]) * z + _COS[2]) * z + _COS[3]) * z + _COS[4]
    c = 1.0 - 0.5 * z + z * z * c
    quadrant = f64_as_bits(shifted) & int64(3)
    if quadrant & 1:
        s, c = c, -s
    if quadrant & 2:
        s, c = -s, -c
    return float32(c), float32(s)


_LN2 = (0.6931471803691238, 1.9082149292705877e-10)
_E64 = tuple(
    1.0 / f
    for f in (6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2)
)


@_exact
def exp64(x):
    """e^x for x <= 0; 0 below -708."""
    low = x < -708.0
    if low:
        x = float64(-708.0)
    shifted = x * 1.4426950408889634 + _ROUND64
    n = shifted - _ROUND64
    r = (x - n * _LN2[0]) - n * _LN2[1]
    p = ((((_E64[0] * r + _E64[1]) * r + _E64[2]) * r + _E64[3]) * r + _E64[4]) * r + _E64[5]
    p = ((((p * r + _E64[6]) * r + _E64[7]) * r + _E64[8]) * r + _E64[9]) * r + _E64[10]
    p = ((p * r + _E64[11]) * r + 1.0) * r + 1.0
    power = (f64_as_bits(shifted) - int64(_ROUND64_BITS) + int64(1023)) << int64(52)
    return 0.0 if low else p * as_f64(power)


_ATANH = tuple(2.0 / n for n in (25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3))


@_exact
def log64(x):
    """Natural logarithm of a positive normal float64, also accurate near 1."""
    bits = f64_as_bits(x)
    # 2^n m = x with m in [sqrt(1/2), sqrt(2)): log(m) = 2 atanh((m - 1) / (m + 1)).
    n = (bits - int64(0x3FE6A09E667F3BCD)) >> int64(52)
    f = as_f64(bits - (n << int64(52))) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = ((((_ATANH[0] * z + _ATANH[1]) * z + _ATANH[2]) * z + _ATANH[3]) * z + _ATANH[4]) * z
    p = ((((p + _ATANH[5]) * z + _ATANH[6]) * z + _ATANH[7]) * z + _ATANH[8]) * z + _ATANH[9]
    p = (p * z + _ATANH[10]) * z + _ATANH[11]
    scale = float64(n)
    return scale * _LN2[0] + (2.0 * s + (s * z * p + scale * _LN2[1]))
