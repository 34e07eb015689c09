"""linear: own kernels for few tokens, the library's matrix product for many.

Few: integer kernels on quantised activations for block formats (or float ones, as `Options.linear`
says), tensor cores for f16 and bf16. Many: weights in blocks are expanded a tile at a time to f16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ... import ops
from ...dtype import BF16, F16, F32, DType, dtype
from ...memory import aligned
from ...tensor import Tensor
from .. import ROWS, Options
from . import BACKEND, library
from .device import Call, Launch, Site, Spot, Work, ceil
from .layouts import PACK, PLANES, planes
from .quantise import targets, unit
from .source import Function, module

PLAIN = ("f32", "f16", "bf16")
FEW = 8  # tokens, up to which own kernels multiply; above the library is faster
TOGETHER = 3  # matrices in one launch
_TILE = 128 << 20  # bytes of expanded weights at a time
_WARPS = 4  # of a block of linear.cu and linear_ragged.cu
_ITEM = {"f32": 4, "f16": 8, "bf16": 8}  # elements that a thread loads at a time
_STEP = 32  # depth that a warp of linear_tensor.cu takes at a time
_FEW_SIZES = (1, 2, 4, 8)  # tokens at a time
_GATE = 80  # bytes of the struct Gate of linear.cu


@dataclass(frozen=True)
class Job:
    """out = added + x w^T + bias."""

    x: Spot
    w: Spot
    bias: Spot | None
    out: Spot
    added: Spot | None = None

    @property
    def rows(self) -> int:
        return int(self.w.meta.shape[0])  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return int(self.w.meta.shape[1])  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- few tokens


def _few_kernel(name: str, integer: bool, tokens: int, gated: bool = False) -> Function:
    """linear.cu for a format; see there for the macros."""
    rows, depth = _shape(name, integer, tokens)
    made = module(
        "linear", FORMAT=name.upper(), INTEGER=int(integer), TOKENS=tokens, ROWS=rows,
        DEPTH=depth, GATED=int(gated),
    )  # fmt: skip
    return made["linear"]


def _shape(name: str, integer: bool, tokens: int) -> tuple[int, int]:
    """(rows, depth): of the matrix to a warp, and items of each on their way; the fastest of those
    that were tried on an H200, and more would not fit in registers."""
    if tokens > 1:
        return (2, 1) if integer and tokens < 8 else (1, 2)
    return (1, 4) if name == "q4_0" else (2, 2)


def _tensor_kernel(kind: DType) -> Function:
    return module("linear_tensor", BFLOAT=int(kind == BF16))["linear"]


def _ragged_kernel(name: str) -> Function:
    return module("linear_ragged", FORMAT=PLAIN.index(name))["linear"]


def _sizes(name: str, integer: bool) -> tuple[int, ...]:
    """Counts of tokens that there are kernels for: as many as fit in registers."""
    return _FEW_SIZES if integer or name in PLAIN else _FEW_SIZES[:3]


def matrices(jobs: Sequence[Job]) -> bytes:
    """The struct Matrices of matrices.cuh."""
    packed = b""
    for job in jobs:
        bias = job.bias.address if job.bias else 0
        added = (job.added.address, job.added.row_stride) if job.added else (0, 0)
        packed += struct.pack(
            "<6QqQqq", *planes(job.w.address, job.w.meta), bias, job.out.address,
            job.out.row_stride, *added, job.rows,
        )  # fmt: skip
    return packed.ljust(80 * TOGETHER, b"\0")


def _few(site: Site, jobs: Sequence[Job], gate: bytes = b"") -> Launch:
    """Up to three linears of one activation and format, or two with a ``gate``."""
    x, w, k = jobs[0].x, jobs[0].w, jobs[0].depth
    name, most = w.dtype.name, site.most(x.meta.rows)
    args: list[int | float | bytes] = [
        x.address, x.row_stride, site.live(x.meta.rows), k, matrices(jobs)
    ]  # fmt: skip
    unaligned = x.dtype == F32 and (x.address % 16 or (x.row_stride % 16 and most > 1))
    if name in PLAIN and (k % _ITEM[name] or unaligned):
        return _launch(_ragged_kernel(name), jobs, 1, _WARPS, most, args)
    if name in ("f16", "bf16") and most > 1 and k % _STEP == 0 and _tensor_cores(site):
        grid = (sum(ceil(job.rows, 16) for job in jobs), ceil(most, 8))
        return Launch(_tensor_kernel(w.dtype), grid, (256,), args)
    sizes = _sizes(name, x.dtype != F32)
    tokens = next((n for n in sizes if n >= most), sizes[-1])
    kernel = _few_kernel(name, x.dtype != F32, tokens, bool(gate))
    args.append(gate or bytes(_GATE))
    rows = _shape(name, x.dtype != F32, tokens)[0]
    return _launch(kernel, jobs[:1] if gate else jobs, rows, _WARPS, ceil(most, tokens), args)


def _launch(
    kernel: Function, jobs: Sequence[Job], rows: int, warps: int, y: int, args: list[Any]
) -> Launch:
    """A warp to so many rows of the matrices."""
    groups = sum(ceil(job.rows, rows) for job in jobs)
    return Launch(kernel, (ceil(groups, warps), y), (32 * warps,), args)


def _tensor_cores(site: Site) -> bool:
    """Whether there are those of capability 8.0, with bf16 and 16 deep."""
    return bool(site.device.gpu.capability >= (8, 0))


# --------------------------------------------------------------------------------- many tokens


def _wide(kind: DType) -> DType:
    """What weights of ``kind`` are multiplied as."""
    return kind if kind.name in PLAIN else F16


def _many(site: Site, jobs: Sequence[Job], room: int) -> list[Work]:
    """Linears of one float activation, one after the other."""
    work: list[Work] = []
    narrowed: dict[str, int] = {}  # the activation, by dtype
    x = jobs[0].x
    rows, most = x.meta.rows, site.most(x.meta.rows)
    live = site.live(rows)
    for job in jobs:
        kind, k = _wide(job.w.dtype), job.depth
        if kind.name not in narrowed:
            if kind == F32 and x.row_stride == 4 * k:
                narrowed[kind.name] = x.address
            else:
                narrowed[kind.name] = room
                kernel = _around(kind)["narrow"]
                args = (x.address, x.row_stride, room, live, k)
                work.append(Launch(kernel, (ceil(k, 512), most), (256,), args))
                room += aligned(most * k * _size(kind))
        if job.bias or job.added:
            work.append(_base(job, live, most))
        work += _product(site, job, kind, narrowed[kind.name], room)
    return work


def _around(kind: DType, name: str = "") -> Any:
    """linear_many.cu for activations of ``kind`` and, if named, weights of a block format."""
    form = {"FORMAT": name.upper()} if name else {}
    return module("linear_many", KIND=PLAIN.index(kind.name), **form)


def _size(kind: DType) -> int:
    return 4 if kind == F32 else 2


def _base(job: Job, live: int, most: int) -> Launch:
    bias = job.bias.address if job.bias else 0
    added = (job.added.address, job.added.row_stride) if job.added else (0, 0)
    args = (job.out.address, job.out.row_stride, bias, *added, live, job.rows)
    return Launch(_around(F16)["base"], (ceil(job.rows, 256), most), (256,), args)


def _tile_rows(rows: int, depth: int) -> int:
    """Rows of a matrix that are expanded at a time."""
    return min(rows, max(1, _TILE // (2 * depth)))


def _product(site: Site, job: Job, kind: DType, x: int, room: int) -> list[Work]:
    """The matrix product, of a tile of expanded rows at a time if need be; ``room``: for them."""
    work: list[Work] = []
    rows, k, dim, add = job.rows, job.depth, job.x.meta.rows, bool(job.bias or job.added)

    def call(w: int, first: int, count: int) -> Callable[[], None]:
        y, stride = job.out.address + 4 * first, job.out.row_stride
        multiply = partial(library.product, site.device, kind, x, w, y, stride)
        return lambda: multiply(site.now(dim), count, k, add=add)

    if job.w.dtype.name in PLAIN:
        return [Call(call(job.w.address, 0, rows))]
    parts = struct.pack("<4Q", *planes(job.w.address, job.w.meta))
    items = k // items_of(job.w.dtype)
    kernel = _around(kind, job.w.dtype.name)["expand"]
    tile = _tile_rows(rows, k)
    for first in range(0, rows, tile):
        count = min(tile, rows - first)
        args = (parts, first * items, count * items, items, room)
        work.append(Launch(kernel, (ceil(count * items, 128),), (128,), args))
        work.append(Call(call(room, first, count)))
    return work


def items_of(kind: DType) -> int:
    """Elements of an item of a block format: see blocks.cuh."""
    return {"q8_0": 16, "q2_k": 64, "q3_k": 64}.get(kind.name, 32)


def room_for(node: Tensor, *pairs: tuple[Tensor | None, Tensor | None]) -> int:
    """Bytes of workspace for linears of these activations and weights, in one step."""
    narrow: dict[tuple[int, DType], int] = {}
    tile = 0
    for x, w in pairs:
        assert x is not None and w is not None
        if x.dtype != F32 or few(x):
            continue
        rows, depth = w.meta.bound().shape
        assert isinstance(rows, int) and isinstance(depth, int)
        kind = _wide(w.dtype)
        narrow[id(x), kind] = aligned(Site.most(x.meta.rows) * depth * _size(kind))
        if w.dtype.name not in PLAIN:
            tile = max(tile, aligned(_tile_rows(rows, depth) * depth * 2))
    return sum(narrow.values()) + tile


# ------------------------------------------------------------------------------------ registration


def few(x: Tensor) -> bool:
    """Whether a step has so few rows of ``x`` that own kernels multiply them."""
    return Site.most(x.meta.rows) <= FEW


def launches(site: Site, jobs: Sequence[Job], room: int) -> list[Work]:
    """Several linears: those of one activation and format together."""
    together: dict[tuple[int, str], list[Job]] = {}
    many: dict[int, list[Job]] = {}
    for job in jobs:
        if job.x.dtype == F32 and site.most(job.x.meta.rows) > FEW:
            many.setdefault(job.x.address, []).append(job)
        else:
            together.setdefault((job.x.address, job.w.dtype.name), []).append(job)
    work: list[Work] = []
    for own in together.values():
        work += [_few(site, own[i : i + TOGETHER]) for i in range(0, len(own), TOGETHER)]
    for own in many.values():
        work += _many(site, own, room)
    return work


def fused_pair(gate: Job, up: Job) -> bool:
    """Whether one kernel can go along both matrices at a time."""
    kind = gate.w.dtype
    same = (gate.x.address, kind, gate.w.meta.shape) == (up.x.address, up.w.dtype, up.w.meta.shape)
    whole = kind.name in PLANES or (gate.depth % _ITEM[kind.name] == 0)
    return same and whole and gate.x.address % 16 == 0


def gated_row(site: Site, jobs: Sequence[Job], act: int, forms: Sequence[Spot]) -> Launch:
    """act(first) * second of one row of activations, for a `fused_pair`: where the first goes, and
    from there to ``forms`` if these are quantised."""
    size = 32 * unit(forms)
    quantised = [form for form in forms if form.dtype.quantised]
    counts = site.keep(np.zeros(ceil(jobs[0].rows, size), np.uint32)) if quantised else 0
    wanted = targets(quantised) if quantised else b""
    gate = struct.pack("<qqQ", act, size, counts) + wanted
    return _few(site, jobs, gate.ljust(_GATE, b"\0"))


def activation(w: DType) -> str:
    """The quantised activations that the weight's format is multiplied with."""
    return "a8_32" if w.block == 32 else "a8_256"


def unmatched(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight does not meet these activations."""
    assert x is not None and w is not None
    fits = x.dtype == F32 or (w.dtype.name in PLANES and x.dtype.name == activation(w.dtype))
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """Few rows quantised for a block format; float rows where vectors can be loaded from them."""
    x, w, *rest = node.src
    assert x is not None and w is not None
    if x.dtype == F32 and few(x):
        if w.dtype.name in PLANES and options.linear != "float":
            x = ops.quantise_act(x, dtype=activation(w.dtype))
        elif w.dtype.name in PLANES and (x.meta.offset % 16 or x.meta.strides[0] % 16):
            x = ops.contiguous(x)
    return (x, w, *rest)


def _scratch(node: Tensor, options: Options) -> int:
    return room_for(node, (node.src[0], node.src[1]))


_RULES: dict[str, Any] = {
    "layout": {"x": ROWS},
    "when": lambda node, options: unmatched(*node.src[:2]),
    "lower": _lower,
    "scratch": _scratch,
}


@BACKEND.kernel("linear", name="linear_plain", dtypes={"w": PLAIN}, **_RULES)
@BACKEND.kernel(
    "linear", name="linear_blocks", dtypes={"w": tuple(PLANES)}, pack={"w": PACK}, **_RULES
)
def linear(site: Site) -> list[Work]:
    return launches(site, [Job(site.x, site.w, site.op("bias"), site.out)], site.scratch)


def _all_instances() -> None:
    """Every module that a plan may ask for is known from the start: tests compile them all."""
    for name in PLANES:
        for integer in (True, False):
            for tokens in _sizes(name, integer):
                _few_kernel(name, integer, tokens)
            _few_kernel(name, integer, 1, gated=True)
        _around(F16, name)
    for name in PLAIN:
        for tokens in _FEW_SIZES:
            _few_kernel(name, False, tokens)
        _few_kernel(name, False, 1, gated=True)
        _ragged_kernel(name)
        _around(dtype(name))
    for kind in (F16, BF16):
        _tensor_kernel(kind)


_all_instances()
