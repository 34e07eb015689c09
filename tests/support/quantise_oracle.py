"""What `quantise` gives, block by block in plain loops: scales from the definitions of the formats,
and each number put at its bits of the block, one by one (ggml, `ggml-common.h`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import packed_checkpoints

from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import DTYPES

F32, F16 = np.float32, np.float16
Place = tuple[int, int]  # byte and lowest bit
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NF4 = tuple(np.array(packed_checkpoints.NF4).astype(np.float16).astype(float))
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves


class Bits:
    """The bytes of a block, zero at first."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def put(self, place: Place, value: int) -> None:
        """``value``, which is not negative, from a bit on; what is above a byte's end is lost."""
        self.data[place[0]] |= value << place[1] & 0xFF

    def half(self, at: int, value: Any) -> None:
        self.data[at : at + 2] = F16(value).tobytes()

    def all(self, place: Callable[[int], Place], values: Iterable[int]) -> None:
        for i, value in enumerate(values):
            self.put(place(i), value)


def one_over(d: Any) -> Any:
    inverse = F32(1) / F32(d)
    return inverse if np.isfinite(inverse) else F32(0)


def largest(x: np.ndarray) -> Any:
    return max(x, key=abs)  # of several the first


def clipped(value: Any, low: int, high: int) -> int:
    return int(min(max(np.rint(value), low), high))


def closest(value: Any, table: tuple[int, ...]) -> int:
    return min(range(len(table)), key=lambda i: abs(float(value) - table[i]))


def halves(at: int, apart: int = 16) -> Callable[[int], Place]:
    """Nibbles: the low ones of so many elements, then their high ones, and so on."""
    return lambda i: (at + i // (2 * apart) * apart + i % apart, i // apart % 2 * 4)


def pairs(at: int) -> Callable[[int], Place]:
    return lambda i: (at + i // 128 * 32 + i % 32, i // 32 % 4 * 2)


def bits(at: int) -> Callable[[int], Place]:
    return lambda i: (at + i % 32, i // 32)


# --------------------------------------------------------------------------------- blocks of 32


def q8_0(b: Bits, x: np.ndarray) -> None:
    d = abs(largest(x)) / F32(127)
    b.half(0, d)
    for i, value in enumerate(x * one_over(d)):
        whole = int(abs(value) + F32(0.5))
        b.data[2 + i] = (whole if value > 0 else -whole) & 0xFF


def fives(b: Bits, at: int, q: list[int]) -> None:
    b.all(lambda i: (at + i // 8, i % 8), (v >> 4 for v in q))
    b.all(halves(at + 4), (v & 15 for v in q))


def centred(b: Bits, x: np.ndarray, lowest: int) -> None:
    d = largest(x) / F32(lowest)
    b.half(0, d)
    q = [min(int(v * one_over(d) + F32(0.5 - lowest)), -2 * lowest - 1) for v in x]
    b.all(halves(2), q) if lowest == -8 else fives(b, 2, q)


def from_least(b: Bits, x: np.ndarray, most: int) -> None:
    least = min(x)  # of several zeros the first
    d = abs(max(x) - least) / F32(most)
    b.half(0, d)
    b.half(2, least)
    q = [min(int((v - least) * one_over(d) + F32(0.5)), most) for v in x]
    b.all(halves(4), q) if most == 15 else fives(b, 4, q)


def iq4_nl(b: Bits, x: np.ndarray) -> None:
    d = largest(x) / F32(-127)
    b.half(0, d)
    b.all(halves(2), (closest(v * one_over(d), IQ4) for v in x))


def nf4(b: Bits, x: np.ndarray) -> None:
    d = abs(largest(x))
    b.half(0, d)
    b.all(halves(2), (closest(v * one_over(d), NF4) for v in x))


def mxfp4(b: Bits, x: np.ndarray) -> None:
    amax = float(abs(largest(x)))
    e = max(0, int(np.floor(np.log2(amax))) + 125) if amax else 0
    b.data[0] = e
    q = [closest(abs(float(v)) * 2.0 ** (128 - e), E2M1) for v in x]
    b.all(halves(1), (c | 8 if c and v < 0 else c for c, v in zip(q, x)))


# -------------------------------------------------------------------------------- blocks of 256


def in_halves(spans: list[Any], top: int, low: int, high: int) -> tuple[Any, list[int], list[Any]]:
    """A float16, the spans in steps of it, and what those stand for."""
    d = F16(largest(np.array(spans)) / F32(top))
    scales = [clipped(s * one_over(d), low, high) for s in spans]
    return d, scales, [F32(d) * F32(s) for s in scales]


def with_minima(x: np.ndarray, run: int, most: int, top: int) -> tuple[Any, ...]:
    """d, dmin, scales, minima and q, of runs from their least value, or 0, on."""
    runs = x.reshape(-1, run)
    least = [-min(F32(0), min(r)) for r in runs]  # of two zeros the first
    spans = [(max(F32(0), max(r)) + low) / F32(most) for r, low in zip(runs, least)]
    d, scales, steps = in_halves(spans, top, 0, top)
    dmin, minima, bases = in_halves(least, top, 0, top)
    q = [
        clipped((v + base) * one_over(step), 0, most)
        for r, step, base in zip(runs, steps, bases)
        for v in r
    ]
    return d, dmin, scales, minima, q


def q2_k(b: Bits, x: np.ndarray) -> None:
    d, dmin, scales, minima, q = with_minima(x, 16, 3, 15)
    b.all(lambda k: (k, 0), scales)
    b.all(lambda k: (k, 4), minima)
    b.all(pairs(16), q)
    b.half(80, d)
    b.half(82, dmin)


def q45_k(b: Bits, x: np.ndarray, most: int) -> None:
    d, dmin, scales, minima, q = with_minima(x, 32, most, 63)
    b.half(0, d)
    b.half(2, dmin)
    for k in range(4):
        b.put((4 + k, 0), scales[k])
        b.put((8 + k, 0), minima[k])
        b.put((4 + k, 6), scales[k + 4] >> 4)
        b.put((8 + k, 6), minima[k + 4] >> 4)
        b.put((12 + k, 0), scales[k + 4] & 15)
        b.put((12 + k, 4), minima[k + 4] & 15)
    if most == 31:
        b.all(bits(16), (v >> 4 for v in q))
    b.all(halves(48 if most == 31 else 16, 32), (v & 15 for v in q))


def centred_runs(x: np.ndarray, run: int, lowest: int, top: int) -> tuple[Any, list[int], Any]:
    """d, scales, and the elements in steps of their runs."""
    runs = x.reshape(-1, run)
    spans = [largest(r) / F32(lowest) for r in runs]
    d, scales, steps = in_halves(spans, -top, -top, top - 1)
    return d, scales, [v * one_over(step) for r, step in zip(runs, steps) for v in r]


def q3_k(b: Bits, x: np.ndarray) -> None:
    d, scales, steps = centred_runs(x, 16, -4, 32)
    b.all(lambda k: (96 + k % 8, k // 8 * 4), (s + 32 & 15 for s in scales))
    b.all(lambda k: (104 + k % 4, k // 4 * 2), (s + 32 >> 4 for s in scales))
    b.half(108, d)
    q = [clipped(v, -4, 3) + 4 for v in steps]
    b.all(bits(0), (v >> 2 for v in q))
    b.all(pairs(32), (v & 3 for v in q))


def q6_k(b: Bits, x: np.ndarray) -> None:
    d, scales, steps = centred_runs(x, 16, -32, 128)
    b.all(lambda k: (192 + k, 0), (s & 0xFF for s in scales))
    b.half(208, d)
    q = [clipped(v, -32, 31) + 32 for v in steps]
    b.all(halves(0, 64), (v & 15 for v in q))
    b.all(pairs(128), (v >> 4 for v in q))


def iq4_xs(b: Bits, x: np.ndarray) -> None:
    d, scales, steps = centred_runs(x, 32, -127, 32)
    b.half(0, d)
    b.all(lambda k: (2 + k // 4, k % 4 * 2), (s + 32 >> 4 for s in scales))
    b.all(lambda k: (4 + k // 2, k % 2 * 4), (s + 32 & 15 for s in scales))
    b.all(halves(8), (closest(v, IQ4) for v in steps))


FORMATS: dict[str, Callable[[Bits, np.ndarray], None]] = {
    "q8_0": q8_0,
    "q4_0": lambda b, x: centred(b, x, -8),
    "q5_0": lambda b, x: centred(b, x, -16),
    "q4_1": lambda b, x: from_least(b, x, 15),
    "q5_1": lambda b, x: from_least(b, x, 31),
    "iq4_nl": iq4_nl,
    "nf4": nf4,
    "mxfp4": mxfp4,
    "q2_k": q2_k,
    "q3_k": q3_k,
    "q4_k": lambda b, x: q45_k(b, x, 15),
    "q5_k": lambda b, x: q45_k(b, x, 31),
    "q6_k": q6_k,
    "iq4_xs": iq4_xs,
}


def quantise(x: np.ndarray, dtype: str) -> Blocks:
    """The bytes of each row."""
    kind, made = DTYPES[dtype], []
    with np.errstate(all="ignore"):
        for block in x.astype(F32).reshape(-1, kind.block):
            b = Bits(kind.nbytes)
            FORMATS[dtype](b, block)
            made.append(bytes(b.data))
    shape = x.shape[0], kind.row_nbytes(x.shape[1])
    return Blocks(np.frombuffer(b"".join(made), np.uint8).reshape(shape), kind, x.shape[1])
