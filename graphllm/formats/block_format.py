"""Registry of block formats. Each format is declared once, in the module of its family.

A block format stores ``block`` consecutive elements of a row in a fixed number of bytes. Its
declaration states the fields of a block, the NumPy formulas that decode and encode blocks, and the
numbers that file formats give it. The dtype registry, GGUF types, quantisation on load, weight
packing, ops, tests and documentation derive from the declarations. How a backend unpacks a format
is declared in the backend: `graphllm.backends.cpu.formats`, and the CUDA headers `formats_*.cuh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..graph.dtype import BF16, F16, F32, DType, register
from .activations import A8_32, A8_256
from .scale_search import ScaleSearch

Array = np.ndarray
# The fields of a block in order: (name, NumPy type, count).
Fields = tuple[tuple[str, str, int], ...]
Encode = Callable[..., Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """A block format of weights.

    ``layout`` is the structured NumPy dtype of a block, little-endian and without padding.

    ``decode`` takes structured blocks [n] and returns float32 [n, block]. ``encode`` takes float32
    [n, block], finite, and returns the value of every field. A second argument, a
    `scale_fitting.BlockScales`, replaces the scales that fit the extreme values; see `search`.

    ``scales`` are the fields that must be finite: float16, or e8m0 exponents (OCP MX, 2023) where
    their type is uint8. ``planes`` groups the fields into arrays that the CUDA backend stores
    separately, each aligned; the first one holds the low bits of the elements. Without planes the
    CUDA backend does not run the format.

    ``integers``: whether elements are integers times scales (and offsets), which integer kernels
    multiply by int8 activations. Kernels multiply floats by other formats.

    ``gguf_type`` is the number in GGUF's tensor entries (ggml, `ggml_type`), None for a format that
    GGUF does not have. ``file_types`` are GGUF's `general.file_type` numbers and labels of files
    that mostly consist of this format. ``fallback`` is the format that quantisation uses instead
    for rows that are not whole blocks, as in llama.cpp.

    ``search`` finds better scales without importance weights, ``weighted_search`` with them. None:
    no search is made, and `encode` has ggml's scales.

    ``common`` formats appear in most published files; ops declare more samples for them.
    """

    dtype: DType
    layout: np.dtype
    scales: tuple[str, ...]
    decode: Callable[[Array], Array]
    encode: Encode
    planes: tuple[tuple[str, ...], ...] = ()
    integers: bool = True
    gguf_type: int | None = None
    file_types: Mapping[int, str] = field(default_factory=dict)
    fallback: str | None = None
    common: bool = False
    search: ScaleSearch | None = None
    weighted_search: ScaleSearch | None = None

    @property
    def name(self) -> str:
        return self.dtype.name

    @property
    def activation(self) -> DType | None:
        """The int8 activations that integer kernels multiply blocks of this format by, if any."""
        if not self.integers:
            return None
        return A8_32 if self.dtype.block == 32 else A8_256

    def span(self, *fields: str) -> tuple[int, int]:
        """(offset, end) in bytes of neighbouring fields within a block."""
        assert self.layout.fields is not None
        start = self.layout.fields[fields[0]][1]
        kind, last = self.layout.fields[fields[-1]][:2]
        return start, last + kind.itemsize

    def plane_spans(self) -> tuple[tuple[int, int], ...]:
        """(offset, end) in bytes of each of ``planes``."""
        return tuple(self.span(*fields) for fields in self.planes)

    def scale_spans(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of each of ``scales``."""
        spans = (self.span(name) for name in self.scales)
        return tuple((start, end - start) for start, end in spans)


BLOCK_FORMATS: dict[str, BlockFormat] = {}  # by name, in order of declaration

# The dtypes that a weight matrix may be stored in, by name.
WEIGHT_FORMATS: dict[str, DType] = {form.name: form for form in (F32, F16, BF16)}


def declare(
    name: str,
    block: int,
    fields: Fields,
    *,
    scales: tuple[str, ...],
    decode: Callable[[Array], Array],
    encode: Encode,
    planes: tuple[tuple[str, ...], ...] = (),
    integers: bool = True,
    gguf_type: int | None = None,
    file_types: Mapping[int, str] | None = None,
    fallback: str | None = None,
    common: bool = False,
    search: ScaleSearch | None = None,
    weighted_search: ScaleSearch | None = None,
) -> DType:
    """Declare a block format and return its dtype.

    Args:
        name: name in files, on the command line and in reports.
        block: elements of a block, 32 or 256: the blocks of its activations.
        fields: (name, NumPy type, count) of each field of a block, in order.

    The other arguments are fields of `BlockFormat`.
    """
    layout = np.dtype([(label, f"<{kind}", (count,)) for label, kind, count in fields])
    made = register(DType(name, block, layout.itemsize))
    BLOCK_FORMATS[name] = BlockFormat(
        made, layout, scales, decode, encode, planes, integers, gguf_type, file_types or {},
        fallback, common, search, weighted_search or search,
    )  # fmt: skip
    WEIGHT_FORMATS[name] = made
    return made


def blocks_of(block: int, common: bool | None = None) -> tuple[DType, ...]:
    """The block formats with ``block`` elements a block; only (not) the common ones if given."""
    return tuple(
        each.dtype
        for each in BLOCK_FORMATS.values()
        if each.dtype.block == block and common in (None, each.common)
    )


def gguf_formats() -> tuple[str, ...]:
    """Names of the block formats that GGUF has."""
    return tuple(name for name, form in BLOCK_FORMATS.items() if form.gguf_type is not None)
