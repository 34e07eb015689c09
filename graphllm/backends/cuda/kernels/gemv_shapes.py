"""How gemv.cu divides a matrix among warps, by format: the fastest shapes measured on an H200.

Those for one token were measured in decode steps of Mistral-7B, those for shallow matrices also in
smaller models; docs/design/cuda.md has the results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....graph.dtype import dtype
from . import split_norm
from .gemm import PLAIN

_BUSY = 20  # warps that keep a multiprocessor busy


@dataclass(frozen=True)
class Shape:
    """Values of the macros of gemv.cu, by their names in lower case.

    ``split``: warps of a multiprocessor below which several warps share a row (SHARED_BY).
    ``lanes``: ROW_LANES.
    """

    rows: int
    depth: int
    next: int
    warps: int = 4
    ahead: bool = False
    staged: bool = False
    resident: int = 1
    split: int = 0
    lanes: int = 32


_ANY = 1 << 31  # more than any depth
_SAME = {"bf16": "f16", "w8a8": "q8_0"}  # formats that have the shapes of another one
_SHAPES: dict[tuple[str, bool], dict[int, Shape]] = {  # by (format, gated), then below which depth
    ("f16", True): {4096: Shape(4, 1, 1, ahead=True), _ANY: Shape(2, 1, 2, ahead=True)},
    ("f16", False): {8192: Shape(4, 1, 1, split=_BUSY)},
    ("q8_0", True): {_ANY: Shape(1, 4, 1, staged=True)},
    ("q8_0", False): {
        800: Shape(2, 3, 1, lanes=16),
        1024: Shape(2, 4, 1, lanes=16),
        4096: Shape(1, 2, 1, split=_BUSY),
        8192: Shape(1, 4, 1, split=_BUSY),
        _ANY: Shape(2, 4, 1, warps=8, staged=True),
    },
    ("q4_0", True): {_ANY: Shape(2, 1, 1, staged=True)},
    ("q4_0", False): {8192: Shape(2, 2, 1), _ANY: Shape(1, 2, 1, ahead=True)},
    ("q5_0", True): {1024: Shape(1, 1, 1)},
    ("q4_k", True): {_ANY: Shape(2, 1, 1, staged=True)},
    ("q4_k", False): {
        8192: Shape(2, 2, 0, staged=True, split=12),
        _ANY: Shape(2, 2, 0, warps=8, staged=True),
    },
    ("q6_k", False): {
        4096: Shape(2, 2, 1),
        8192: Shape(2, 1, 1, ahead=True, split=_BUSY),
        _ANY: Shape(2, 2, 1, warps=8),
    },
}
_BEFORE_NORM = {"q4_0": Shape(1, 2, 1), "q8_0": Shape(1, 4, 1)}  # of 1,024 to 8,191 elements
DEPTHS = (0, *sorted({end for ends in _SHAPES.values() for end in ends} - {_ANY}))  # of all shapes


def shape(name: str, integer: bool, k: int, gated: bool, tokens: int = 1) -> Shape:
    """The shape for a matrix.

    Args:
        name: dtype of the weight.
        integer: whether activations are int8.
        k: depth of the matrix.
        gated: whether the kernel computes a gated unit.
        tokens: tokens that the kernel takes at a time.
    """
    rows, depth = default_tile(name, integer, tokens, gated)
    if tokens > 1:
        return Shape(rows, depth, 0)
    default = Shape(
        rows, depth, default_next(name), split=_BUSY if name in PLAIN and not gated else 0
    )
    if not integer and name not in ("f16", "bf16"):
        return default
    shapes = _SHAPES.get((_SAME.get(name, name), gated), {})
    return next((found for end, found in shapes.items() if k < end), default)


def before_norm(name: str, k: int) -> Shape:
    """The shape for one token of a linear whose thread blocks have the rows of a block of int8, see
    split_norm.cuh. No warps share a row."""
    own = shape(name, True, k, False)
    if name in _BEFORE_NORM and 1024 <= k < 8192:
        own = _BEFORE_NORM[name]
    elif own.rows < own.lanes // 16 and own.depth > 2:  # 32 warps have 64 registers each
        own = replace(own, rows=2 * own.rows, depth=own.depth // 2)
    warps = split_norm.ROWS * own.lanes // 32 // own.rows
    return replace(own, warps=warps, split=0, resident=1)


def default_next(name: str) -> int:
    """NEXT of gemv.cu, when the next kernel may start, for formats without a shape of their own.

    An earlier start overlaps more of the next kernel, and slows this one down more.
    """
    if name in PLAIN or _SAME.get(name, name) == "q8_0":
        return 2
    return 1 if dtype(name).block == 32 else 0


def default_tile(name: str, integer: bool, tokens: int, gated: bool = False) -> tuple[int, int]:
    """(rows of a warp, items of each row in flight), for formats without a shape of their own.

    Larger values would not fit in registers.
    """
    if tokens > 1:
        return (2, 1) if integer and tokens < 8 else (1, 2)
    if not integer or name in ("q5_0", "q5_1", "q6_k"):
        return (2, 2)
    if gated or dtype(name).block == 256:
        return (2, 1)
    return (2, 2) if name == "q8_0" else (1, 4)
