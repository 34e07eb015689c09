"""Block weights as kernels read them: blocks.cuh says why, `quant_formats` what is where."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ....graph.tensor import Meta
from ..runtime.device import DevicePack
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("layouts")
_THREADS, _ALIGN = 256, 256

# The bytes of a block that go to each plane: the small integers first.
PLANES: dict[str, tuple[tuple[int, int], ...]] = {
    "q8_0": ((2, 34), (0, 2)),
    "q4_0": ((2, 18), (0, 2)),
    "q4_1": ((4, 20), (0, 4)),
    "q5_0": ((6, 22), (2, 6), (0, 2)),
    "q5_1": ((8, 24), (4, 8), (0, 4)),
    "iq4_nl": ((2, 18), (0, 2)),
    "mxfp4": ((1, 17), (0, 1)),
    "q2_k": ((16, 80), (0, 16), (80, 84)),
    "q3_k": ((32, 96), (0, 32), (96, 108), (108, 110)),
    "q4_k": ((16, 144), (0, 16)),
    "q5_k": ((48, 176), (16, 48), (0, 16)),
    "q6_k": ((0, 128), (128, 192), (192, 208), (208, 210)),
    "iq4_xs": ((8, 136), (0, 8)),
}


def _blocks(meta: Meta) -> int:
    *lines, columns = meta.bound().shape
    return prod(lines) * (columns // meta.dtype.block)  # type: ignore[arg-type,operator]


def _offsets(meta: Meta) -> list[int]:
    """Where each plane of [..., N, K] begins, and where the last one ends, in bytes."""
    found = [0]
    for first, last in PLANES[meta.dtype.name]:
        found.append(found[-1] + ceil(_blocks(meta) * (last - first), _ALIGN) * _ALIGN)
    return found


def planes(address: int, meta: Meta) -> tuple[int, int, int, int]:
    """The struct Planes of a matrix that lies at ``address``; a plain one is its own first."""
    if meta.dtype.name not in PLANES:
        return address, 0, 0, 0
    starts = [address + offset for offset in _offsets(meta)[:-1]]
    return (*starts, 0, 0, 0)[:4]  # type: ignore[return-value]


def _split(raw: int, packed: int, meta: Meta) -> Sequence[Launch]:
    made, count = [], _blocks(meta)
    for (first, last), offset in zip(PLANES[meta.dtype.name], _offsets(meta)):
        args = (raw + first, meta.dtype.nbytes, packed + offset, last - first, count)
        grid = (ceil(count * (last - first), _THREADS),)
        made.append(Launch(_MODULE["split"], grid, (_THREADS,), args))
    return made


PACK = DevicePack(lambda meta: _offsets(meta)[-1], _split)
