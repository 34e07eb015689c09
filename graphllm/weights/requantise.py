"""Weights in another format than the file's: each matrix is converted when it is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

import numpy as np

from ..dtype import DTYPES, DType
from ..errors import GraphError, ModelFileError, RequestError
from ..quant import WEIGHT_FORMATS, dequantise, quantise
from ..tensor import Meta
from . import Weights
from .shapes import STAND_INS

KINDS = WEIGHT_FORMATS  # what weights can be converted to: every format has a quantiser
_PLAIN = ("f32", "f16", "bf16")  # what they can be converted from

# Elements of a tile: a thread needs some 30 bytes for each. With smaller ones, NumPy's calls are so
# short that threads wait for one another.
_TILE = 1 << 18
_THREADS = 8  # at most


class Quantised:
    """The weights of another source, with its matrices in the format ``kind``, one of `KINDS`.

    A matrix is an f32, f16 or bf16 weight of two or three axes that is no bias. Where its rows are
    not whole blocks it has a stand-in with smaller blocks, as llama.cpp's quantiser chooses it, or
    stays as it is; so do all other weights, those in block formats among them, and those of which
    ``keep`` says so by name. RequestError lists the kinds.
    """

    def __init__(
        self, weights: Weights, kind: str, keep: Callable[[str], bool] = lambda name: False
    ) -> None:
        if kind not in KINDS:
            raise RequestError(f"unknown type {kind!r} of weights; known: {', '.join(KINDS)}")
        self.kind = DTYPES[kind]
        self._weights, self._keep = weights, keep
        # What was converted is shared for as long as somebody holds it: a head may be an embedding.
        self._made: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def meta(self, name: str) -> Meta | None:
        """Shape and dtype, None when there is no such weight."""
        stored = self._weights.meta(name)
        if stored is None:
            return None
        wanted = self._wanted(name, stored)
        return stored if wanted == stored.dtype else Meta.of(stored.shape, wanted)

    def _wanted(self, name: str, stored: Meta) -> DType:
        """The format that the weight gets."""
        if not self._is_matrix(name, stored) or self._keep(name):
            return stored.dtype
        for form in (self.kind, DTYPES[STAND_INS.get(self.kind.name, self.kind.name)]):
            if stored.shape[-1] % form.block == 0:  # type: ignore[operator]
                return form
        return stored.dtype

    @staticmethod
    def _is_matrix(name: str, stored: Meta) -> bool:
        is_bias = name.endswith("bias")  # of experts: a row for each
        return stored.ndim in (2, 3) and stored.dtype.name in _PLAIN and not is_bias

    def raw(self, name: str) -> np.ndarray:
        """The bytes in the format of `meta`, uint8 [rows, row_bytes]; read-only.

        The source's are released once they are converted. ModelFileError names the tensor and row
        of a value that is not finite, or not within the range of the format.
        """
        stored = self._weights.meta(name)
        if stored is None or self._wanted(name, stored) == stored.dtype:
            return self._weights.raw(name)
        made = self._made.get(name)
        if made is None:
            made = _converted(self._weights.raw(name), stored, self._wanted(name, stored), name)
            self._weights.release(name)
            self._made[name] = made
        return made

    def release(self, name: str) -> None:
        """See `Weights.release`; what was converted is gone with the last view of it."""
        self._weights.release(name)

    def notes(self) -> list[str]:
        """A line for each reason why matrices are not in the format that was asked for."""
        counts = {"instead": 0, "ragged": 0, "blocks": 0}
        for name in self.names():
            stored = self._weights.meta(name)
            assert stored is not None
            if stored.ndim in (2, 3) and stored.dtype.quantised and stored.dtype != self.kind:
                counts["blocks"] += 1
            if not self._is_matrix(name, stored) or self._keep(name):
                continue
            if stored.shape[-1] % self.kind.block:  # type: ignore[operator]
                stays = self._wanted(name, stored) == stored.dtype
                counts["ragged" if stays else "instead"] += 1
        why = f"their rows are not whole blocks of {self.kind.block}"
        texts = {
            "instead": f"{STAND_INS.get(self.kind.name)} in place of {self.kind}: {why}",
            "ragged": f"as stored, not {self.kind}: {why}",
            "blocks": f"as stored, not {self.kind}: they are in blocks already",
        }
        return [f"{count} matrices are {texts[key]}" for key, count in counts.items() if count]


def _converted(raw: np.ndarray, stored: Meta, wanted: DType, name: str) -> np.ndarray:
    """The bytes of a plain matrix as ``wanted``, uint8 [rows, row_bytes], in tiles of rows."""
    *axes, elements = (int(d) for d in stored.shape)  # type: ignore[arg-type]
    rows = math.prod(axes)
    raw = raw.reshape(rows, stored.dtype.row_nbytes(elements))
    made = np.empty((rows, wanted.row_nbytes(elements)), np.uint8)
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    step = max(1, min(_TILE // max(1, elements), -(-rows // threads)))

    def convert(first: int) -> None:
        tile = slice(first, first + step)
        values = dequantise(raw[tile], stored.dtype)
        try:
            with np.errstate(over="ignore"):
                made[tile] = quantise(values, wanted)
        except GraphError:  # a value that is not finite
            raise _beyond(name, first, np.isfinite(values), "infinite or NaN") from None
        if wanted.numpy is not None:
            finite = np.isfinite(made[tile].view(wanted.numpy))
            if not finite.all():
                raise _beyond(name, first, finite, f"beyond the range of {wanted}")

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(convert, range(0, rows, step)):
            pass
    made.flags.writeable = False
    return made


def _beyond(name: str, first: int, good: np.ndarray, what: str) -> ModelFileError:
    """The error for the first row that is not all good."""
    row = first + int(good.all(axis=1).argmin())
    return ModelFileError(f"tensor {name!r}: row {row} has a value that is {what}")
