"""Copies of weights in e4m3, for linears of many tokens if `Options.prefill` is "fp8".

A copy follows the weight in memory, and is laid out as a packed fp8 weight with a scale per row.
Linears of fp8 weights multiply it; all other steps read the weight itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....formats import ROW_FORMATS
from ....formats.activations import F8_ROW
from ....graph.dtype import dtype
from ....graph.tensor import WEIGHT, Meta, Tensor, Var
from ... import Options
from ..runtime.device import DevicePack, KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch
from .gemm import Job, planes_struct
from .matrices import MAX_TOKENS
from .quantize import HALVES
from .weight_packing import (
    PACK,
    PLANES,
    copy_rows,
    item_elements,
    packed_nbytes,
    scales_offset,
)

COPIED = (*HALVES, *PLANES)  # formats of weights that may have a copy
_COPY = dtype("fp8")
_TOKENS = "T"  # Var of the tokens of a step; rows of logits, which stay exact, have another
_MIN_ROWS = 128  # of a matrix
_ROUTERS = (".gate.weight", ".router.weight")  # rounded logits would choose other experts
_MULTIPLE = 32  # of rows and depth, for aligned tiles, and rows of activations without padding
_THREADS = 256


def has_copy(x: Tensor | None, w: Tensor | None, options: Options) -> bool:
    """Whether the weight of a linear has a copy: by its site alone, at any number of tokens."""
    if options.prefill != "fp8" or options.deterministic or x is None or w is None:
        return False
    tokens = isinstance(x.meta.rows, Var) and x.meta.rows.name == _TOKENS
    return tokens and w.op == WEIGHT and copy_nbytes(w.name, w.meta.bound()) > 0


def copy_nbytes(name: str, meta: Meta) -> int:
    """Bytes of the copy of a weight of linears of tokens; 0 if it has none."""
    if meta.dtype.name not in COPIED or meta.ndim != 2 or name.endswith(_ROUTERS):
        return 0
    rows, depth = (int(n) for n in meta.shape)  # type: ignore[arg-type]
    fits = rows >= _MIN_ROWS and rows % _MULTIPLE == depth % _MULTIPLE == 0
    return packed_nbytes(_copy_meta(meta)) if fits else 0


def wants_e4m3(x: Tensor, w: Tensor, options: Options) -> bool:
    """Whether the linear multiplies the copy of its weight at this number of tokens."""
    return has_copy(x, w, options) and KernelContext.upper_bound(x.meta.rows) > MAX_TOKENS


def on_copy(job: Job) -> Job:
    """The same linear on the copy of its weight, if the activation is of e4m3 and the weight is
    not."""
    w = job.w
    if job.x.dtype != F8_ROW or w.dtype.name in ROW_FORMATS:
        return job
    at = w.address + packed_nbytes(w.meta)
    return replace(job, w=OperandRef(at, _copy_meta(w.meta), w.operand))


def _copy_meta(meta: Meta) -> Meta:
    return Meta.of(meta.bound().shape, _COPY)


def _kernel(name: str) -> Function:
    return module("e4m3_copy", FORMAT=name.upper(), INTEGER=0, LONE=0)["copy_e4m3"]


def _nbytes(meta: Meta) -> int:
    return packed_nbytes(meta) + packed_nbytes(_copy_meta(meta))


def _pack(raw: int, packed: int, meta: Meta) -> Sequence[Launch]:
    """Launches that pack stored rows at ``raw`` as without a copy, then make the copy."""
    plain = meta.dtype.name in HALVES
    stored = [copy_rows(raw, packed, meta)] if plain else PACK.launches(raw, packed, meta)
    made, to = _copy_meta(meta), packed + packed_nbytes(meta)
    rows, depth = (int(n) for n in made.shape)  # type: ignore[arg-type]
    items = depth // item_elements(meta.dtype)
    args = (planes_struct(packed, meta), items, depth, to, to + scales_offset(made))
    return [*stored, Launch(_kernel(meta.dtype.name), (rows,), (_THREADS,), args)]


PACK_WITH_COPY = DevicePack(_nbytes, _pack)


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for name in COPIED:
        _kernel(name)
