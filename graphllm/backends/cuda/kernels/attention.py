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
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Module, module
from ..runtime.work import Launch, ceil
from .quantize import HALVES, quantise, target, unit

_MIN_TILED_TOKENS = 17  # tokens, from which the kernel of tiles takes over
_TILE_QUERIES = _TILE_KEYS = 64  # of a tile
_TILED_DEPTHS = (64, 96, 128, 256)  # that the kernel of tiles is made for
_SPLIT_WIDTHS = range(64, 577, 8)  # that the kernel of pieces can do
_MLA_SIZES = (576, 512)  # depth and width of latent attention (DeepSeek)
_SPAN = 256  # of a row, in which a thread of that kernel has eight elements
_TARGET_BLOCKS = 264  # of threads, about as many as a GPU has room for at a time
_MIN_SPLIT_KEYS, _MAX_SPLITS = 32, 64  # keys of a piece at least; pieces that can be merged


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Heads, kv heads, depth of a query, width of a value."""
    q, _, v = node.sources[:3]
    (heads, depth), (kv_heads, width) = q.meta.inner, v.meta.inner
    return heads, kv_heads, depth, width


def _context_keys(node: Tensor) -> int:
    """Keys that a table has room for."""
    table = node.src[5]
    assert table is not None
    return int(table.meta.bound().shape[1]) * int(node.attrs["block"])  # type: ignore[arg-type]


def _max_tokens(node: Tensor) -> int:
    return KernelContext.upper_bound(node.sources[0].meta.rows)


def _kind(node: Tensor) -> str:
    """The pools' dtype; mixed if they differ."""
    k, v = node.sources[1:3]
    return k.dtype.name if k.dtype == v.dtype else "mixed"


# -------------------------------------------------------------------------------------- choices


def _vector_readable(node: Tensor) -> bool:
    """Pools of one dtype, rows that are read 16 bytes at a time, and blocks of a power of two."""
    block, kind = node.attrs["block"], _kind(node)
    places = [at for pool in node.sources[1:3] for at in (pool.meta.offset, pool.meta.strides[0])]
    read = kind == "q8_0" or all(at % 16 == 0 for at in places)
    return kind != "mixed" and read and block & (block - 1) == 0


def _can_split_kv(node: Tensor) -> bool:
    _, _, depth, width = _sizes(node)
    return depth in _SPLIT_WIDTHS and width in _SPLIT_WIDTHS and _vector_readable(node)


def _can_tile(ctx: KernelContext) -> bool:
    _, _, depth, width = _sizes(ctx.node)
    cores = ctx.device.gpu.capability >= (8, 0)
    shaped = depth == width and depth in _TILED_DEPTHS and _kind(ctx.node) in ("f16", "q8_0")
    return bool(
        cores
        and shaped
        and _vector_readable(ctx.node)
        and _max_tokens(ctx.node) >= _MIN_TILED_TOKENS
    )


def _has_logit_bias(node: Tensor) -> bool:
    """Whether logits are more than products: capped, or with slopes."""
    return bool(node.attrs["softcap"] > 0 or (len(node.src) > 7 and node.src[7] is not None))


def _heads_per_block(node: Tensor) -> int:
    """Heads that go over a kv head's keys together."""
    heads, kv_heads, depth, width = _sizes(node)
    few = _kind(node) == "f32" or max(depth, width) > _SPAN  # registers
    most = 2 if _max_tokens(node) == 1 else 4 if few else 8  # a lone token: more blocks
    return next((n for n in (1, 2, 4, 8) if n >= heads // kv_heads or n == most), most)


def _split_count(node: Tensor) -> int:
    """Pieces of a token's keys, at most."""
    heads, kv_heads, *_ = _sizes(node)
    items = kv_heads * ceil(heads // kv_heads, _heads_per_block(node)) * max(1, _max_tokens(node))
    return max(
        1,
        min(
            ceil(_TARGET_BLOCKS, items),
            ceil(_context_keys(node), _MIN_SPLIT_KEYS),
            _MAX_SPLITS,
        ),
    )


def _partials_nbytes(node: Tensor) -> int:
    """Bytes of the pieces' results."""
    heads, _, _, width = _sizes(node)
    count = _split_count(node)
    return 0 if count == 1 else 4 * max(1, _max_tokens(node)) * heads * count * (width + 4)


# ------------------------------------------------------------------------------------- launches


def _argument(ctx: KernelContext, out: int, parts: int, splits: int) -> bytes:
    """The struct Attention of attention.cuh."""
    heads, kv_heads, *_ = _sizes(ctx.node)
    q, k, v, attrs = ctx.q, ctx.k, ctx.v, ctx.attrs
    words = [q.address, q.row_stride, k.address, k.row_stride, v.address, v.row_stride]
    words += [ctx.q_start.address, ctx.kv_len.address, ctx.table.address]
    words += [ctx.table.meta.bound().shape[1]]
    words += [ctx.address(name) for name in ("sinks", "slopes", "prefix_len")]
    words += [ctx.live_address(q.meta.rows), ctx.live_address(ctx.kv_len.meta.rows), out, parts]
    block = attrs["block"]
    words += [heads, kv_heads, block, block.bit_length() - 1, int(attrs["causal"])]
    words += [attrs["window"], splits, ctx.settled("q_start", "kv_len", "table")]
    return struct.pack("<25q2f", *words, attrs["scale"], attrs["softcap"])


def _split_module(kind: str, depth: int, width: int, together: int, biased: bool) -> Module:
    return module("attention_split_kv", POOL=kind.upper(), DEPTH=depth, WIDTH=width, HEADS=together,
                  BIASED=int(biased))  # fmt: skip


def _tiled_module(kind: str, depth: int, biased: bool) -> Module:
    return module("attention_tiled", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased))


def _generic_module(k: str, v: str) -> Module:
    return module("attention_generic", K_POOL=CACHED.index(k), V_POOL=CACHED.index(v))


def _tiled(ctx: KernelContext, out: int, kind: int = 0) -> Launch:
    """``kind``: 0: float32 results, else as in `HALVES`."""
    heads, _, depth, _ = _sizes(ctx.node)
    count = ceil(_max_tokens(ctx.node), _TILE_QUERIES) + ctx.upper_bound(ctx.kv_len.meta.rows)
    shared = 2 * (_TILE_QUERIES + 2 * _TILE_KEYS) * (depth + 8)
    kernel = _tiled_module(_kind(ctx.node), depth, _has_logit_bias(ctx.node))["attend"]
    args = (_argument(ctx, out, 0, 1), kind)
    return Launch(kernel, (count, heads), (128,), args, shared)


def _generic(ctx: KernelContext, out: int) -> Launch:
    heads, _, depth, width = _sizes(ctx.node)
    kernel = _generic_module(ctx.k.dtype.name, ctx.v.dtype.name)["attend"]
    args = (_argument(ctx, out, 0, 1), depth, width)
    return Launch(kernel, (heads, _max_tokens(ctx.node)), (128,), args, 4 * width)


def _split(ctx: KernelContext, out: int, room: int, result: OperandRef) -> list[Launch]:
    """``result``: where merged pieces go, quantised if it is; one piece goes to ``out``."""
    node = ctx.node
    heads, kv_heads, depth, width = _sizes(node)
    together, count, tokens = _heads_per_block(node), _split_count(node), _max_tokens(node)
    made = _split_module(_kind(node), depth, width, together, _has_logit_bias(node))
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


@BACKEND.kernel("attention", layout=_LAYOUT, scratch=lambda node, options: _partials_nbytes(node))
def attention(ctx: KernelContext) -> list[Launch]:
    if _can_tile(ctx):
        return [_tiled(ctx, ctx.out.address)]
    if _can_split_kv(ctx.node):
        return _split(ctx, ctx.out.address, ctx.scratch, ctx.out)
    return [_generic(ctx, ctx.out.address)]


def _float_result_nbytes(node: Tensor) -> int:
    """Bytes of a result that waits to be quantised."""
    heads, _, _, width = _sizes(node)
    return aligned(4 * max(1, _max_tokens(node)) * heads * width)


@BACKEND.kernel(
    "attention_quantise", layout=_LAYOUT,
    scratch=lambda node, options: _float_result_nbytes(node) + _partials_nbytes(node),
)  # fmt: skip
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    heads, _, _, width = _sizes(ctx.node)
    floats, room = ctx.scratch, ctx.scratch + _float_result_nbytes(ctx.node)
    halves = HALVES.get(ctx.out.dtype.name, 0)
    if halves and _can_tile(ctx):
        return [_tiled(ctx, ctx.out.address, halves)]
    if not _can_tile(ctx) and _can_split_kv(ctx.node) and _split_count(ctx.node) > 1:
        return _split(ctx, floats, room, ctx.out)
    if _can_tile(ctx):
        made = [_tiled(ctx, floats)]
    elif _can_split_kv(ctx.node):
        made = _split(ctx, floats, room, ctx.out)
    else:
        made = [_generic(ctx, floats)]
    return [*made, quantise(ctx, floats, 4 * heads * width, ctx.out)]


def _all_instances() -> None:
    """Modules that common models ask for are known from the start: tests compile them."""
    for kind in CACHED:
        for depth in _TILED_DEPTHS:
            for together in (1, 2, 4) if kind == "f32" else (1, 2, 4, 8):
                for biased in (False, True):
                    _split_module(kind, depth, depth, together, biased)
            if kind != "f32":
                _tiled_module(kind, depth, False)
                _tiled_module(kind, depth, True)
        for together in (2, 4):
            _split_module(kind, *_MLA_SIZES, together, False)
        for other in CACHED:
            _generic_module(kind, other)


_all_instances()
