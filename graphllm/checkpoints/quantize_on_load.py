"""Weights in another format than the file's: each matrix is converted when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np

from .. import backends as registry
from .. import ops
from ..backends import Backend, Bound, Device, Header, Kernel, Operand, Options
from ..errors import GraphllmError, ModelFileError, PlacementError, RequestError, quote
from ..formats import BLOCK_FORMATS, WEIGHT_FORMATS
from ..formats.quantization import Blocks
from ..graph.dtype import DTYPES, DType
from ..graph.tensor import Meta, Tensor, weight
from ..weights import Weights

KINDS = WEIGHT_FORMATS  # what weights can be converted to: every format has a quantiser
_PLAIN = ("f32", "f16", "bf16")  # what they can be converted from

_TILE = 1 << 24  # elements that are converted at a time, so that Ctrl-C is seen between two
_CHECKED = 1 << 18  # floats that are looked at in one go
_EXPONENT = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}  # of infinity and NaN


class QuantizedWeights:
    """The weights of another source, with its matrices in the format ``kind``, one of `KINDS`.

    A matrix is an f32, f16 or bf16 weight of two or three axes that is no bias. Where its rows are
    not whole blocks it has a stand-in with smaller blocks, as llama.cpp's quantiser chooses it, or
    stays as it is; so do all other weights, those in block formats among them, and those of which
    ``keep`` says so by name. ``backends``: who is asked to convert, in order, all by default; those
    with a memory of their own are passed over. RequestError lists the kinds.
    """

    def __init__(
        self,
        weights: Weights,
        kind: str,
        keep: Callable[[str], bool] = lambda name: False,
        backends: Sequence[str] | None = None,
        options: Options | None = None,
    ) -> None:
        if kind not in KINDS:
            raise RequestError(f"unknown type {quote(kind)} of weights; known: {', '.join(KINDS)}")
        self.kind = DTYPES[kind]
        self._weights, self._keep = weights, keep
        self._convert = _Converter(backends, options or Options())
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
        for form in (self.kind, self._fallback()):
            if stored.shape[-1] % form.block == 0:  # type: ignore[operator]
                return form
        return stored.dtype

    def _fallback(self) -> DType:
        """The format of matrices whose rows are not whole blocks of ``kind``."""
        form = BLOCK_FORMATS.get(self.kind.name)
        return DTYPES[form.fallback] if form and form.fallback else self.kind

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
            made = self._convert(self._weights.raw(name), stored, self._wanted(name, stored), name)
            self._weights.release(name)
            self._made[name] = made
        return made

    def release(self, name: str) -> None:
        """See `Weights.release`; what was converted is gone with the last view of it."""
        self._weights.release(name)

    def notes(self) -> list[str]:
        """A line for each reason why matrices are not in the format that was asked for, or were
        not converted by the first backend."""
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
            "instead": f"{self._fallback()} in place of {self.kind}: {why}",
            "ragged": f"as stored, not {self.kind}: {why}",
            "blocks": f"as stored, not {self.kind}: they are in blocks already",
        }
        lines = [f"{count} matrices are {texts[key]}" for key, count in counts.items() if count]
        return [*lines, *self._convert.notes]


class _Converter:
    """Converts matrices of floats on the first backend of an order that works in the host's memory
    and can. ``notes``: why that was not the first of these, a line each."""

    def __init__(self, backends: Sequence[str] | None, options: Options) -> None:
        self._order, self._options = backends, options
        self._devices: dict[str, Device] = {}
        self.notes: dict[str, None] = {}

    def __call__(self, raw: np.ndarray, stored: Meta, wanted: DType, name: str) -> np.ndarray:
        """The bytes of a plain matrix as ``wanted``, uint8 [rows, row_bytes], in tiles of rows."""
        *axes, elements = (int(d) for d in stored.shape)  # type: ignore[arg-type]
        rows = math.prod(axes)
        raw = raw.reshape(rows, stored.dtype.row_nbytes(elements))
        made = np.empty((rows, wanted.row_nbytes(elements)), np.uint8)
        step = max(1, _TILE // max(1, elements))
        for first in range(0, rows if elements else 0, step):
            tile = slice(first, first + step)
            values = Blocks(np.ascontiguousarray(raw[tile]), stored.dtype, elements)
            try:
                self._convert(values, wanted, made[tile])
            except GraphllmError:
                _refuse(values, name, first, "infinite or NaN")
                raise
            if wanted.name in _EXPONENT and _has_endless(made[tile], wanted):
                _refuse(values, name, first, "infinite or NaN")
                results = Blocks(made[tile], wanted, elements)
                _refuse(results, name, first, f"beyond the range of {wanted}")
        made.flags.writeable = False
        return made

    def _convert(self, values: Blocks, wanted: DType, made: np.ndarray) -> None:
        """One step by itself: its operands are where they lie."""
        x = weight("x", values.shape, values.dtype)
        node = (ops.cast if wanted.name in _EXPONENT else ops.quantise)(x, dtype=wanted.name)
        device, kernel = self._select(node)
        inputs = (Operand(x.meta, values.raw.reshape(-1)),)
        step = Bound(node, kernel, inputs, Operand(node.meta, made.reshape(-1)))
        device.build([step], Header()).run(None)

    @cached_property
    def _near(self) -> list[Backend]:
        """The backends that are usable and work in the host's memory."""
        names = self._order or registry.names()
        return registry.select_usable([n for n in names if registry.find(n).memory == "host"])[0]

    def _select(self, node: Tensor) -> tuple[Device, Kernel]:
        reasons: list[str] = []
        for backend in self._near:
            kernel = backend.select(node, self._options)
            if isinstance(kernel, Kernel):
                where = f"matrices are converted on {backend.name}"
                self.notes |= dict.fromkeys(f"{where}: {reason}" for reason in reasons)
                if backend.name not in self._devices:
                    self._devices[backend.name] = backend.open_device(self._options)
                return self._devices[backend.name], kernel
            reasons.append(kernel)
        raise PlacementError(f"{node.op}: {'; '.join(reasons)}")


def _has_endless(made: np.ndarray, dtype: DType) -> bool:
    """Whether one of the floats is infinite or NaN: an exponent of ones."""
    every = _EXPONENT[dtype.name]
    words = made.reshape(-1).view(f"<u{dtype.nbytes}")
    parts = range(0, len(words), _CHECKED)
    return any((words[i : i + _CHECKED] & every).max() == every for i in parts)


def _refuse(values: Blocks, name: str, first: int, what: str) -> None:
    """ModelFileError for the first row with a value that is not finite, if there is one."""
    for start, tile in values.tiles():
        good = np.isfinite(tile).all(axis=1)
        if not good.all():
            row = first + start + int(good.argmin())
            raise ModelFileError(f"tensor {quote(name)}: row {row} has a value that is {what}")
