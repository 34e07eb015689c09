"""Attention over the paged cache: few tokens, many tokens, and any shape at all.

Few tokens leave too few heads to go round: the keys of each token are split into pieces, and a
second kernel merges them. Many go in tiles of 64 queries over tensor cores, in f16.
"""

from __future__ import annotations

import struct

from ....backends.alignment import aligned
from ....graph.dtype import CACHED
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext, Launch, OperandRef, ceil
from ..runtime.source import Module, module
from .quantize import HALVES, quantise, target, unit

_TILED = 17  # tokens, from which the kernel of tiles takes over
_QUERIES = _KEYS = 64  # of a tile
_DEPTHS = (64, 96, 128, 256)  # that the kernel of tiles is made for
_WIDTHS = range(64, 577, 8)  # that the kernel of pieces can do
_LATENT = (576, 512)  # depth and width of latent attention (DeepSeek)
_SPAN = 256  # of a row, in which a thread of that kernel has eight elements
_BLOCKS = 264  # of threads, about as many as a GPU has room for at a time
_SHORTEST, _MOST_PIECES = 32, 64  # keys of a piece at least; pieces that can be merged


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Heads, kv heads, depth of a query, width of a value."""
    q, _, v = node.sources[:3]
    (heads, depth), (kv_heads, width) = q.meta.inner, v.meta.inner
    return heads, kv_heads, depth, width


def _context(node: Tensor) -> int:
    """Keys that a table has room for."""
    table = node.src[5]
    assert table is not None
    return int(table.meta.bound().shape[1]) * int(node.attrs["block"])  # type: ignore[arg-type]


def _most(node: Tensor) -> int:
    return KernelContext.most(node.sources[0].meta.rows)


def _kind(node: Tensor) -> str:
    """The pools' dtype; mixed if they differ."""
    k, v = node.sources[1:3]
    return k.dtype.name if k.dtype == v.dtype else "mixed"


# -------------------------------------------------------------------------------------- choices


def _usual(node: Tensor) -> bool:
    """Pools of one dtype, rows that are read 16 bytes at a time, and blocks of a power of two."""
    block, kind = node.attrs["block"], _kind(node)
    places = [at for pool in node.sources[1:3] for at in (pool.meta.offset, pool.meta.strides[0])]
    read = kind == "q8_0" or all(at % 16 == 0 for at in places)
    return kind != "mixed" and read and block & (block - 1) == 0


def _in_pieces(node: Tensor) -> bool:
    _, _, depth, width = _sizes(node)
    return depth in _WIDTHS and width in _WIDTHS and _usual(node)


def _in_tiles(ctx: KernelContext) -> bool:
    _, _, depth, width = _sizes(ctx.node)
    cores = ctx.device.gpu.capability >= (8, 0)
    shaped = depth == width and depth in _DEPTHS and _kind(ctx.node) in ("f16", "q8_0")
    return bool(cores and shaped and _usual(ctx.node) and _most(ctx.node) >= _TILED)


def _biased(node: Tensor) -> bool:
    """Whether logits are more than products: capped, or with slopes."""
    return bool(node.attrs["softcap"] > 0 or (len(node.src) > 7 and node.src[7] is not None))


def _together(node: Tensor) -> int:
    """Heads that go over a kv head's keys together."""
    heads, kv_heads, depth, width = _sizes(node)
    few = _kind(node) == "f32" or max(depth, width) > _SPAN  # registers
    most = 2 if _most(node) == 1 else 4 if few else 8  # a lone token: more blocks
    return next((n for n in (1, 2, 4, 8) if n >= heads // kv_heads or n == most), most)


def _splits(node: Tensor) -> int:
    """Pieces of a token's keys, at most."""
    heads, kv_heads, *_ = _sizes(node)
    items = kv_heads * ceil(heads // kv_heads, _together(node)) * max(1, _most(node))
    return max(1, min(ceil(_BLOCKS, items), ceil(_context(node), _SHORTEST), _MOST_PIECES))


def _parts(node: Tensor) -> int:
    """Bytes of the pieces' results."""
    heads, _, _, width = _sizes(node)
    count = _splits(node)
    return 0 if count == 1 else 4 * max(1, _most(node)) * heads * count * (width + 4)


# ------------------------------------------------------------------------------------- launches


def _argument(ctx: KernelContext, out: int, parts: int, splits: int) -> bytes:
    """The struct Attention of attention.cuh."""
    heads, kv_heads, *_ = _sizes(ctx.node)
    q, k, v, attrs = ctx.q, ctx.k, ctx.v, ctx.attrs
    words = [q.address, q.row_stride, k.address, k.row_stride, v.address, v.row_stride]
    words += [ctx.q_start.address, ctx.kv_len.address, ctx.table.address]
    words += [ctx.table.meta.bound().shape[1]]
    words += [ctx.address(name) for name in ("sinks", "slopes", "prefix_len")]
    words += [ctx.live(q.meta.rows), ctx.live(ctx.kv_len.meta.rows), out, parts]
    block = attrs["block"]
    words += [heads, kv_heads, block, block.bit_length() - 1, int(attrs["causal"])]
    words += [attrs["window"], splits, ctx.settled("q_start", "kv_len", "table")]
    return struct.pack("<25q2f", *words, attrs["scale"], attrs["softcap"])


def _pieces_module(kind: str, depth: int, width: int, together: int, biased: bool) -> Module:
    return module("attention", POOL=kind.upper(), DEPTH=depth, WIDTH=width, HEADS=together,
                  BIASED=int(biased))  # fmt: skip


def _tiles_module(kind: str, depth: int, biased: bool) -> Module:
    return module("attention_tile", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased))


def _plain_module(k: str, v: str) -> Module:
    return module("attention_plain", K_POOL=CACHED.index(k), V_POOL=CACHED.index(v))


def _tiles(ctx: KernelContext, out: int, kind: int = 0) -> Launch:
    """``kind``: 0: float32 results, else as in `HALVES`."""
    heads, _, depth, _ = _sizes(ctx.node)
    count = ceil(_most(ctx.node), _QUERIES) + ctx.most(ctx.kv_len.meta.rows)
    shared = 2 * (_QUERIES + 2 * _KEYS) * (depth + 8)
    kernel = _tiles_module(_kind(ctx.node), depth, _biased(ctx.node))["attend"]
    args = (_argument(ctx, out, 0, 1), kind)
    return Launch(kernel, (count, heads), (128,), args, shared)


def _plain(ctx: KernelContext, out: int) -> Launch:
    heads, _, depth, width = _sizes(ctx.node)
    kernel = _plain_module(ctx.k.dtype.name, ctx.v.dtype.name)["attend"]
    args = (_argument(ctx, out, 0, 1), depth, width)
    return Launch(kernel, (heads, _most(ctx.node)), (128,), args, 4 * width)


def _pieces(ctx: KernelContext, out: int, room: int, result: OperandRef) -> list[Launch]:
    """``result``: where merged pieces go, quantised if it is; one piece goes to ``out``."""
    node = ctx.node
    heads, kv_heads, depth, width = _sizes(node)
    together, count, tokens = _together(node), _splits(node), _most(node)
    made = _pieces_module(_kind(node), depth, width, together, _biased(node))
    arg = _argument(ctx, out, room, count)
    grid = (kv_heads * ceil(heads // kv_heads, together), tokens, count)
    launches = [Launch(made["attend"], grid, (128,), (arg,))]
    if count > 1:
        merge = made[f"merge_{unit([result])}"]
        several = (tokens, ceil(heads * width, 256))
        launches.append(Launch(merge, several, (256,), (arg, target(result))))
    return launches


# ------------------------------------------------------------------------------------ registration


_LAYOUT = dict.fromkeys(("q", "k", "v"), ROWS)  # of a token, of a slot


@BACKEND.kernel("attention", layout=_LAYOUT, scratch=lambda node, options: _parts(node))
def attention(ctx: KernelContext) -> list[Launch]:
    if _in_tiles(ctx):
        return [_tiles(ctx, ctx.out.address)]
    if _in_pieces(ctx.node):
        return _pieces(ctx, ctx.out.address, ctx.scratch, ctx.out)
    return [_plain(ctx, ctx.out.address)]


def _floats(node: Tensor) -> int:
    """Bytes of a result that waits to be quantised."""
    heads, _, _, width = _sizes(node)
    return aligned(4 * max(1, _most(node)) * heads * width)


@BACKEND.kernel(
    "attention_quantise", layout=_LAYOUT,
    scratch=lambda node, options: _floats(node) + _parts(node),
)  # fmt: skip
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    heads, _, _, width = _sizes(ctx.node)
    floats, room = ctx.scratch, ctx.scratch + _floats(ctx.node)
    halves = HALVES.get(ctx.out.dtype.name, 0)
    if halves and _in_tiles(ctx):
        return [_tiles(ctx, ctx.out.address, halves)]
    if not _in_tiles(ctx) and _in_pieces(ctx.node) and _splits(ctx.node) > 1:
        return _pieces(ctx, floats, room, ctx.out)
    if _in_tiles(ctx):
        made = [_tiles(ctx, floats)]
    elif _in_pieces(ctx.node):
        made = _pieces(ctx, floats, room, ctx.out)
    else:
        made = [_plain(ctx, floats)]
    return [*made, quantise(ctx, floats, 4 * heads * width, ctx.out)]


def _all_instances() -> None:
    """Modules that common models ask for are known from the start: tests compile them."""
    for kind in CACHED:
        for depth in _DEPTHS:
            for together in (1, 2, 4) if kind == "f32" else (1, 2, 4, 8):
                for biased in (False, True):
                    _pieces_module(kind, depth, depth, together, biased)
            if kind != "f32":
                _tiles_module(kind, depth, False)
                _tiles_module(kind, depth, True)
        for together in (2, 4):
            _pieces_module(kind, *_LATENT, together, False)
        for other in CACHED:
            _plain_module(kind, other)


_all_instances()
