"""Split block weights into planes, as kernels read them; see formats.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ....formats import BLOCK_FORMATS
from ....graph.dtype import DType
from ....graph.tensor import Meta
from ..runtime.device import DevicePack
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("weight_packing")
_THREADS, _ALIGN = 256, 256

# (offset, end) of the bytes of a block that go to each plane, by format; see formats.cuh.
PLANES = {name: form.plane_spans() for name, form in BLOCK_FORMATS.items() if form.planes}


def item_elements(kind: DType) -> int:
    """Elements that a thread loads at a time: 16 bytes of a float format, or of the first plane of
    a block format."""
    if kind.name not in PLANES:
        return 16 // kind.nbytes
    start, end = PLANES[kind.name][0]
    return 16 * kind.block // (end - start)


def _blocks(meta: Meta) -> int:
    """Number of blocks of [..., N, K]."""
    *lines, columns = meta.bound().shape
    return prod(lines) * (columns // meta.dtype.block)  # type: ignore[arg-type,operator]


def _offsets(meta: Meta) -> list[int]:
    """The offset of each plane of [..., N, K] and the end of the last one, in bytes."""
    found = [0]
    for first, last in PLANES[meta.dtype.name]:
        found.append(found[-1] + ceil(_blocks(meta) * (last - first), _ALIGN) * _ALIGN)
    return found


def planes(address: int, meta: Meta) -> tuple[int, int, int, int]:
    """The struct Planes of a matrix at ``address``; a float matrix is its own first plane."""
    if meta.dtype.name not in PLANES:
        return address, 0, 0, 0
    starts = [address + offset for offset in _offsets(meta)[:-1]]
    return (*starts, 0, 0, 0)[:4]  # type: ignore[return-value]


def _split(raw: int, packed: int, meta: Meta) -> Sequence[Launch]:
    """Launches that copy each plane from stored blocks at ``raw`` to ``packed``."""
    made, count = [], _blocks(meta)
    for (first, last), offset in zip(PLANES[meta.dtype.name], _offsets(meta)):
        args = (raw + first, meta.dtype.nbytes, packed + offset, last - first, count)
        grid = (ceil(count * (last - first), _THREADS),)
        made.append(Launch(_MODULE["split"], grid, (_THREADS,), args))
    return made


PACK = DevicePack(lambda meta: _offsets(meta)[-1], _split)
