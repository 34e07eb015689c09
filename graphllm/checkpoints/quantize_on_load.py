"""Quantization on load: matrices are converted to another format when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from .. import backends as registry
from .. import ops
from ..backends import Backend, Bound, Device, Header, Kernel, Operand, Options
from ..errors import GraphllmError, ModelFileError, PlacementError, RequestError, quote
from ..formats import BLOCK_FORMATS, ROW_FORMATS, WEIGHT_FORMATS, activation_of, fallback_of
from ..formats.activations import LAYOUTS, rotate_blocks
from ..formats.quantization import Blocks, check_scales, dequantise
from ..graph.dtype import DTYPES, F32, DType
from ..graph.tensor import Meta, Tensor, weight
from ..model.config import EncoderConfig, EncoderDecoderConfig
from ..weights import Weights

if TYPE_CHECKING:
    from ..model.config import ModelConfig

KINDS = WEIGHT_FORMATS  # formats that weights can be converted to
_PLAIN = ("f32", "f16", "bf16")  # formats that they can be converted from

_TILE = 1 << 24  # elements converted at once; Ctrl-C takes effect between tiles
_CHECKED = 1 << 18  # floats checked for infinity and NaN at once
EXPONENT = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}  # bits of infinity and NaN


def kept_as_stored(config: ModelConfig, kind: str) -> Callable[[str], bool]:
    """Return whether a weight is not converted to the format ``kind``.

    Routers are small, and sensitive to rounding. The embedding and the output head are not
    converted to row formats, as in published W8A8 and FP8 checkpoints.
    """
    names = config.names
    suffixes = [names.router]
    if kind in ROW_FORMATS:
        suffixes += [names.embed, names.head]
        if isinstance(config, EncoderDecoderConfig) and config.encoder is not None:
            suffixes.append(config.encoder.names.embed)
    ends = tuple(f".{suffix}.weight" for suffix in suffixes)
    return lambda name: f".{name}".endswith(ends)


def rotated_rows(
    config: ModelConfig, kind: str, backends: Sequence[str] | None
) -> Callable[[str], bool]:
    """Return whether the rows of a weight are rotated before they are quantised; `ops.hadamard`.

    Those of an encoder's layers are, if ``kind`` has int8 activations and at least 8 bits: with
    fewer bits the error of the weights dominates. The first usable backend must work in host
    memory, as GPUs do not quantise the activations of many tokens.
    """
    form = DTYPES[kind] if kind in BLOCK_FORMATS or kind in ROW_FORMATS else None
    activation = form and activation_of(form)
    exact = form is not None and form.nbytes >= form.block
    applies = exact and activation in LAYOUTS and LAYOUTS[activation].q == np.int8
    first = registry.select_usable(backends or registry.names())[0][0]
    if not (applies and isinstance(config, EncoderConfig) and first.memory == "host"):
        return lambda name: False
    prefix = f"{config.names.model}.{config.names.layers}.".lstrip(".")
    return lambda name: name.startswith(prefix)


class QuantizedWeights:
    """Weights of another source, with matrices converted to the format ``kind``.

    A matrix is an f32, f16 or bf16 weight with two or three axes that is not a bias. If its rows
    are not whole blocks of the format, it gets the format's fallback with smaller blocks, which
    llama.cpp's quantiser would choose, or stays as stored. All other weights stay as stored, block
    formats included.

    Args:
        weights: Source.
        kind: One of `KINDS`.
        keep: Whether the weight with this name stays as stored.
        rotate: Whether a matrix with this name is rotated if it becomes a quantised one.
        backends: Names of backends to convert on, by preference; all by default. Backends with
            their own memory are skipped.
        options: Options of the backends.

    Raises:
        RequestError: ``kind`` is unknown.
    """

    def __init__(
        self,
        weights: Weights,
        kind: str,
        keep: Callable[[str], bool] = lambda name: False,
        backends: Sequence[str] | None = None,
        options: Options | None = None,
        rotate: Callable[[str], bool] = lambda name: False,
    ) -> None:
        if kind not in KINDS:
            raise RequestError(f"unknown type {quote(kind)} of weights; known: {', '.join(KINDS)}")
        self.kind = DTYPES[kind]
        self._weights, self._keep, self._rotate = weights, keep, rotate
        self._convert = Converter(backends, options or Options())
        # Converted matrices are shared while in use: a tied head and the embedding are one matrix.
        self._made: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def meta(self, name: str) -> Meta | None:
        """Return shape and dtype after conversion; None if there is no such weight."""
        stored = self._weights.meta(name)
        if stored is None:
            return None
        wanted = self._wanted(name, stored)
        return stored if wanted == stored.dtype else Meta.of(stored.shape, wanted)

    def _wanted(self, name: str, stored: Meta) -> DType:
        """Return the format of the weight after conversion."""
        if not self._is_matrix(name, stored) or self._keep(name):
            return stored.dtype
        for form in (self.kind, self._fallback()):
            if stored.shape[-1] % form.block == 0:  # type: ignore[operator]
                same_size = form != self.kind and form.nbytes == stored.dtype.nbytes
                return stored.dtype if same_size else form  # f16 has no reason to become bf16
        return stored.dtype

    def is_rotated(self, name: str) -> bool:
        """Return whether the linear of a weight must rotate its input, too."""
        stored = self._weights.meta(name)
        if stored is None or not self._rotate(name):
            return False
        return self._wanted(name, stored) == self.kind != stored.dtype

    def _fallback(self) -> DType:
        """Return the format of matrices whose rows are not whole blocks of ``kind``."""
        return fallback_of(self.kind) or self.kind

    @staticmethod
    def _is_matrix(name: str, stored: Meta) -> bool:
        is_bias = name.endswith("bias")  # biases of experts have two axes
        return stored.ndim in (2, 3) and stored.dtype.name in _PLAIN and not is_bias

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes in the format of `meta`, read-only uint8 [rows, row_bytes].

        The source's bytes are released after conversion. ModelFileError names the tensor and row of
        a value that is not finite or not in the range of the format.
        """
        stored = self._weights.meta(name)
        if stored is None or self._wanted(name, stored) == stored.dtype:
            return self._weights.raw(name)
        made = self._made.get(name)
        if made is None:
            made = self._convert(
                self._weights.raw(name), stored, self._wanted(name, stored), name,
                rotated=self.is_rotated(name),
            )  # fmt: skip
            self._weights.release(name)
            self._made[name] = made
        return made

    def release(self, name: str) -> None:
        """See `Weights.release`. Converted bytes are freed with their last view."""
        self._weights.release(name)

    def notes(self) -> list[str]:
        """Return a line for each reason why matrices have another format than requested, or were
        not converted on the preferred backend."""
        counts = {"fallback": 0, "unaligned": 0, "blocks": 0}
        for name in self.names():
            stored = self._weights.meta(name)
            assert stored is not None
            if stored.ndim in (2, 3) and stored.dtype.quantised and stored.dtype != self.kind:
                counts["blocks"] += 1
            if not self._is_matrix(name, stored) or self._keep(name):
                continue
            if stored.shape[-1] % self.kind.block:  # type: ignore[operator]
                stays = self._wanted(name, stored) == stored.dtype
                counts["unaligned" if stays else "fallback"] += 1
        why = f"their rows are not whole blocks of {self.kind.block}"
        texts = {
            "fallback": f"{self._fallback()} in place of {self.kind}: {why}",
            "unaligned": f"as stored, not {self.kind}: {why}",
            "blocks": f"as stored, not {self.kind}: they have a block format already",
        }
        lines = [f"{count} matrices are {texts[key]}" for key, count in counts.items() if count]
        return [*lines, *self._convert.notes, *getattr(self._weights, "notes", list)()]


class Converter:
    """Converts float matrices on the first capable backend that works in host memory.

    ``notes``: a line for each backend that was skipped, with the reason.
    """

    def __init__(self, backends: Sequence[str] | None, options: Options) -> None:
        self._order, self._options = backends, options
        self._devices: dict[str, Device] = {}
        self.notes: dict[str, None] = {}

    def __call__(
        self, raw: np.ndarray, stored: Meta, wanted: DType, name: str, row: int = 0,
        rotated: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Convert a float matrix to ``wanted`` in tiles of rows: uint8 [rows, row_bytes].

        ``row`` is the number of the first row in messages; ``rotated``: rows are rotated before.
        """
        *axes, elements = (int(d) for d in stored.shape)  # type: ignore[arg-type]
        rows = math.prod(axes)
        raw = raw.reshape(rows, stored.dtype.row_nbytes(elements))
        made = np.empty((rows, wanted.row_nbytes(elements)), np.uint8)
        step = max(1, _TILE // max(1, elements))
        for first in range(0, rows if elements else 0, step):
            tile = slice(first, first + step)
            values = Blocks(np.ascontiguousarray(raw[tile]), stored.dtype, elements)
            try:
                self._convert(_rotated(values) if rotated else values, wanted, made[tile])
            except GraphllmError:
                check_finite(values, name, row + first)
                raise
            if wanted.name in EXPONENT and has_nonfinite(made[tile], wanted):
                check_finite(values, name, row + first)
                results = Blocks(made[tile], wanted, elements)
                check_finite(results, name, row + first, f"beyond the range of {wanted}")
            elif wanted.name not in EXPONENT:
                check_range(Blocks(made[tile], wanted, elements), name, row + first)
        made.flags.writeable = False
        return made

    def _convert(self, values: Blocks, wanted: DType, made: np.ndarray) -> None:
        """Run one step without a plan, on operands in place."""
        x = weight("x", values.shape, values.dtype)
        node = (ops.cast if wanted.name in EXPONENT else ops.quantise)(x, dtype=wanted.name)
        device, kernel = self._select(node)
        inputs = (Operand(x.meta, values.raw.reshape(-1)),)
        step = Bound(node, kernel, inputs, Operand(node.meta, made.reshape(-1)))
        device.build([step], Header()).run(None)

    @cached_property
    def _host_backends(self) -> list[Backend]:
        """Usable backends that work in host memory."""
        names = self._order or registry.names()
        return registry.select_usable([n for n in names if registry.find(n).memory == "host"])[0]

    def _select(self, node: Tensor) -> tuple[Device, Kernel]:
        reasons: list[str] = []
        for backend in self._host_backends:
            kernel = backend.select(node, self._options)
            if isinstance(kernel, Kernel):
                where = f"matrices are converted on {backend.name}"
                self.notes |= dict.fromkeys(f"{where}: {reason}" for reason in reasons)
                if backend.name not in self._devices:
                    self._devices[backend.name] = backend.open_device(self._options)
                return self._devices[backend.name], kernel
            reasons.append(kernel)
        raise PlacementError(f"{node.op}: {'; '.join(reasons)}")


def _rotated(values: Blocks) -> Blocks:
    rows = rotate_blocks(dequantise(values.raw, values.dtype))
    return Blocks(rows.view(np.uint8), F32, values.elements)


def has_nonfinite(made: np.ndarray, dtype: DType) -> bool:
    """Return whether a float is infinite or NaN, that is, has an exponent of ones."""
    ones = EXPONENT[dtype.name]
    words = made.reshape(-1).view(f"<u{dtype.nbytes}")
    parts = range(0, len(words), _CHECKED)
    return any((words[i : i + _CHECKED] & ones).max() == ones for i in parts)


def check_range(made: Blocks, name: str, first: int = 0) -> None:
    """Raise ModelFileError for the first row of blocks with a scale that is infinite, if any.

    The values of such a row exceed what the scales of the format can express.
    """
    try:
        check_scales(made.raw, made.dtype)
    except GraphllmError:
        check_finite(made, name, first, f"beyond the range of {made.dtype}")
        raise


def check_finite(values: Blocks, name: str, first: int = 0, what: str = "infinite or NaN") -> None:
    """Raise ModelFileError for the first row with a value that is not finite, if there is one.

    Args:
        values: Rows of a tensor.
        name: The tensor.
        first: Number of the first row.
        what: What such a value is, for the message.
    """
    for start, tile in values.tiles():
        good = np.isfinite(tile).all(axis=1)
        if not good.all():
            row = first + start + int(good.argmin())
            raise ModelFileError(f"tensor {quote(name)}: row {row} has a value that is {what}")
