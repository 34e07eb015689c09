"""Attention over the paged KV cache.

Two families of kernels, chosen by the shape alone, so that a token's result is the same in every
step:

- on tensor cores, in f16: attention_decode.cu for the queries of sequences that have one, bound by
  memory, and attention_tiled.cu for those of the others, in tiles of 64; both give the same bits;
- for float32 pools and other shapes: attention_split_kv.cu, or for any shape attention_generic.cu.

The keys of a query are divided into splits, whose results attention_merge.cu merges.
"""

from __future__ import annotations

from ....backends.alignment import aligned
from ....graph.dtype import CACHED
from ....graph.op import get
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.pool_layout import scales_offset
from ..runtime.source import Module, module
from ..runtime.work import MOSTLY_CACHE, Launch, ceil, max_shared
from .quantize import HALVES, has_row_scales, quantise, target, unit

_ARGUMENT = ArgumentStruct("attention.cuh", "Attention")
_TARGET = ArgumentStruct("quantize.cuh", "Target")
_ALL, _SINGLE, _SEVERAL = range(3)  # enum Queries of attention.cuh
_TILE_QUERIES = _TILE_KEYS = 64
_TENSOR_DEPTHS = (64, 96, 128, 256)  # head dimensions of the kernels on tensor cores
_MIN_BLOCK = 16  # tokens of a block of the cache, for these kernels
_GROUP = 8  # query heads that they compute together, as in attention.cuh
_FEW_TOKENS = 16  # tokens of a step up to which all queries are computed by attention_decode.cu
_SPLIT_WIDTHS = range(64, 577, 8)  # head dimensions of attention_split_kv.cu
_MLA_SIZES = (576, 512)  # depth and width of MLA (DeepSeek)
_SPAN = 256  # elements of a row of which a thread of that kernel holds eight
_TARGET_BLOCKS = 264  # thread blocks that about fill a GPU
_TENSOR_SPLIT, _SCALAR_SPLIT = 256, 64  # least keys of a split
_MAX_SPLITS, _MAX_SLOTS = 32, 144  # of a token; the former as in attention.cuh
_TILES_PER_BLOCK = 2  # of attention_decode.cu: up to this number partial results are those of tiles
_SLOTS_OF_MANY = 8  # partial results of tiles that each of many tokens has room for


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Query heads, KV heads, elements of a query or key, elements of a value."""
    q, _, v = node.sources[:3]
    (heads, depth), (kv_heads, width) = q.meta.inner, v.meta.inner
    return heads, kv_heads, depth, width


def _context_keys(node: Tensor) -> int:
    """Keys that a row of the block table can address."""
    table = node.src[5]
    assert table is not None
    return int(table.meta.bound().shape[1]) * int(node.attrs["block"])  # type: ignore[arg-type]


def _max_tokens(node: Tensor) -> int:
    return KernelContext.upper_bound(node.sources[0].meta.rows)


def _kind(node: Tensor) -> str:
    """dtype of the pools; "mixed" if they differ."""
    k, v = node.sources[1:3]
    return k.dtype.name if k.dtype == v.dtype else "mixed"


# -------------------------------------------------------------------------------------- choices


def _vector_readable(node: Tensor) -> bool:
    """Whether pools have one dtype, rows that are aligned for it, and blocks of a power of two."""
    block, kind = node.attrs["block"], _kind(node)
    places = [at for pool in node.sources[1:3] for at in (pool.meta.offset, pool.meta.strides[0])]
    least = 16 if kind in ("f32", "f16") else 4 if kind == "fp8" else 2  # what elements are read by
    return kind != "mixed" and all(at % least == 0 for at in places) and block & (block - 1) == 0


def _fits_tensor_cores(node: Tensor) -> bool:
    _, _, depth, width = _sizes(node)
    kind, pools = _kind(node), node.sources[1:3]
    shaped = depth == width and depth in _TENSOR_DEPTHS and kind != "f32"
    places = [at for pool in pools for at in (pool.meta.offset, pool.meta.strides[0])]
    words = all(at % 4 == 0 for at in places)
    return shaped and words and _vector_readable(node) and int(node.attrs["block"]) >= _MIN_BLOCK


def _on_tensor_cores(ctx: KernelContext) -> bool:
    """Whether the tensor cores compute the step, in both kernels, so that their bits are equal."""
    capability, (_, _, depth, _) = ctx.device.gpu.capability, _sizes(ctx.node)
    fits = capability >= (8, 0) and _tile_nbytes(depth) <= max_shared(capability)
    return fits and _fits_tensor_cores(ctx.node)


def _can_split_kv(node: Tensor) -> bool:
    _, _, depth, width = _sizes(node)
    return depth in _SPLIT_WIDTHS and width in _SPLIT_WIDTHS and _vector_readable(node)


def _has_logit_bias(node: Tensor) -> bool:
    """Whether logits are capped, or have ALiBi slopes or position biases."""
    own = dict(zip(get(node.op).params, node.src))
    biases = (own.get("slopes"), own.get("position_bias"))
    return bool(node.attrs["softcap"] > 0 or any(bias is not None for bias in biases))


def _heads_per_block(node: Tensor) -> int:
    """Query heads that share one pass over the keys of their KV head."""
    heads, kv_heads, depth, width = _sizes(node)
    few = _kind(node) == "f32" or max(depth, width) > _SPAN  # registers
    most = 2 if _max_tokens(node) == 1 else 4 if few else 8  # one token: more blocks
    return next((n for n in (1, 2, 4, 8) if n >= heads // kv_heads or n == most), most)


def _max_sequences(node: Tensor) -> int:
    return KernelContext.upper_bound(node.sources[4].meta.rows)


def _decode_queries(node: Tensor) -> tuple[int, int]:
    """Queries that attention_decode.cu computes (enum Queries), and their number at most."""
    tokens, sequences = _max_tokens(node), _max_sequences(node)
    if tokens <= max(_FEW_TOKENS, sequences):
        return _ALL, max(1, tokens)
    return _SINGLE, sequences if sequences > 1 else 0


def _slots(node: Tensor, least_split: int, tiles: int) -> int:
    """Partial results of a query at most. ``tiles``: of these at least, if there are as many."""
    keys = _context_keys(node)
    splits = min(_MAX_SPLITS, ceil(keys, least_split))
    return max(1, splits, min(tiles, ceil(keys, _TILE_KEYS)))


def _decode_slots(node: Tensor) -> int:
    _, rows = _decode_queries(node)
    return _slots(node, _TENSOR_SPLIT, _MAX_SLOTS if rows <= _FEW_TOKENS else _SLOTS_OF_MANY)


def _scalar_slots(node: Tensor) -> int:
    """0 if a block computes all splits of a token."""
    heads, kv_heads, *_ = _sizes(node)
    items = kv_heads * ceil(heads // kv_heads, _heads_per_block(node)) * max(1, _max_tokens(node))
    return 0 if items >= _TARGET_BLOCKS else _slots(node, _SCALAR_SPLIT, 1)


def _partials_nbytes(node: Tensor) -> int:
    """Bytes of partial results."""
    heads, _, _, width = _sizes(node)
    tokens, partial = max(1, _max_tokens(node)), 4 * heads * (width + 4)
    nbytes = tokens * _scalar_slots(node) * partial
    if _fits_tensor_cores(node):
        _, rows = _decode_queries(node)
        nbytes = max(nbytes, rows * _decode_slots(node) * partial)
    return nbytes


# ------------------------------------------------------------------------------------- launches


def _argument(
    ctx: KernelContext, out: int, partials: int = 0, slots: int = 0, queries: int = _ALL,
    split: int = _TENSOR_SPLIT, fine: int = 0, rows: int = 0,
) -> bytes:  # fmt: skip
    """The argument of every kernel here; ``out`` and ``partials`` are addresses."""
    heads, kv_heads, *_ = _sizes(ctx.node)
    q, k, v, attrs, table = ctx.q, ctx.k, ctx.v, ctx.attrs, ctx.table
    block = attrs["block"]
    return _ARGUMENT.pack(
        q=q.address, q_stride=q.row_stride, k=k.address, k_stride=k.row_stride, v=v.address,
        v_stride=v.row_stride, k_scales=scales_offset(k.meta), v_scales=scales_offset(v.meta),
        q_start=ctx.q_start.address, kv_len=ctx.kv_len.address,
        table=table.address, table_width=table.meta.bound().shape[1], sinks=ctx.address("sinks"),
        slopes=ctx.address("slopes"), position_bias=ctx.address("position_bias"),
        reach=ctx.position_bias.width // 2 if ctx.position_bias else 0,
        skip_prefix=int(attrs["skip_prefix"]), prefix_len=ctx.address("prefix_len"),
        tokens=ctx.live_address(q.meta.rows), sequences=ctx.live_address(ctx.kv_len.meta.rows),
        out=out, partials=partials, heads=heads, kv_heads=kv_heads, block=block,
        shift=block.bit_length() - 1, causal=int(attrs["causal"]), window=attrs["window"],
        metadata_ready=ctx.readable_before_wait("q_start", "kv_len", "table", "prefix_len"),
        split_keys=split, slots=slots, fine_tiles=fine, queries=queries,
        most_sequences=max(1, _max_sequences(ctx.node)), most_rows=max(1, rows),
        scale=attrs["scale"], softcap=attrs["softcap"],
    )  # fmt: skip


def _decode_module(kind: str, depth: int, biased: bool) -> Module:
    return module("attention_decode", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased))


def _tiled_module(kind: str, depth: int, biased: bool) -> Module:
    return module("attention_tiled", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased))


def _merge_module(width: int, few: bool) -> Module:
    return module("attention_merge_few" if few else "attention_merge", WIDTH=width)


def _split_module(kind: str, depth: int, width: int, together: int, biased: bool) -> Module:
    return module("attention_split_kv", POOL=kind.upper(), DEPTH=depth, WIDTH=width, HEADS=together,
                  BIASED=int(biased))  # fmt: skip


def _generic_module(k: str, v: str) -> Module:
    return module("attention_generic", K_POOL=CACHED.index(k), V_POOL=CACHED.index(v))


def _merge(ctx: KernelContext, arg: bytes, rows: int, result: bytes, step: int) -> Launch:
    """Merge partial results to the target ``result``; ``step``: see `unit`."""
    heads, _, _, width = _sizes(ctx.node)
    few = rows <= _FEW_TOKENS
    made = _merge_module(width, few)
    results = (128 if step == 1 else 256) if few else 1024  # of a block
    kernel, grid = made[f"merge_{step}"], (rows, ceil(heads * width, results))
    return Launch(kernel, grid, (512 if few else 256,), (arg, result), shared_percent=MOSTLY_CACHE)


def _resident(ctx: KernelContext) -> int:
    """Thread blocks of attention_decode.cu that fit on a multiprocessor, as stated there."""
    node, (_, _, depth, _) = ctx.node, _sizes(ctx.node)
    enough = _kind(node) != "f16" or ctx.device.gpu.capability >= (9, 0)  # registers
    four = depth == 64 or (depth == 128 and not _has_logit_bias(node) and enough)
    return 2 if depth > 128 else 4 if four else 3


def _decode(ctx: KernelContext, room: int, result: bytes, step: int) -> list[Launch]:
    """The decode kernel and its merge. ``room``: address of partial results."""
    node = ctx.node
    heads, kv_heads, depth, _ = _sizes(node)
    queries, rows = _decode_queries(node)
    if not rows:
        return []
    slots, processors = _decode_slots(node), ctx.device.gpu.processors
    groups = kv_heads * ceil(heads // kv_heads, _GROUP)
    kind, biased = _kind(node), _has_logit_bias(node)
    blocks = processors * _resident(ctx)
    arg = _argument(ctx, 0, room, slots, queries, fine=_TILES_PER_BLOCK * blocks, rows=rows)
    grid = (min(rows * slots * groups, blocks),)
    kernel = _decode_module(kind, depth, biased)["attend"]
    shared = 12 * (rows + 1)  # counts of units
    attend = Launch(kernel, grid, (128,), (arg,), shared, shared_percent=MOSTLY_CACHE)
    return [attend, _merge(ctx, arg, rows, result, step)]


def _tile_nbytes(depth: int) -> int:
    """Bytes of the struct Tile of attention_tiled.cu."""
    padded = depth + (0 if depth % 64 else 32)
    nbytes = 2 * _TILE_KEYS * (padded + depth + 8) + 4 * _TILE_QUERIES * depth
    return nbytes + 2 * padded * (_TILE_QUERIES if depth > 128 else 1)


def _tiled(ctx: KernelContext, out: int, kind: int = 0) -> list[Launch]:
    """The tiled kernel. ``kind``: 0 for float32 results, else as in `HALVES`."""
    node = ctx.node
    heads, _, depth, _ = _sizes(node)
    if _decode_queries(node)[0] == _ALL:
        return []
    count = ceil(_max_tokens(node), _TILE_QUERIES) + _max_sequences(node)
    kernel = _tiled_module(_kind(node), depth, _has_logit_bias(node))["attend"]
    arg = _argument(ctx, out, queries=_SEVERAL if _max_sequences(node) > 1 else _ALL)
    threads = 256 if depth > 128 else 128
    return [Launch(kernel, (count, heads), (threads,), (arg, kind), _tile_nbytes(depth))]


def _generic(ctx: KernelContext, out: int) -> Launch:
    heads, _, depth, width = _sizes(ctx.node)
    kernel = _generic_module(ctx.k.dtype.name, ctx.v.dtype.name)["attend"]
    args = (_argument(ctx, out), depth, width)
    return Launch(kernel, (heads, _max_tokens(ctx.node)), (128,), args, 4 * width)


def _split(ctx: KernelContext, out: int, room: int, result: bytes, step: int) -> list[Launch]:
    """The split-KV kernel and its merge.

    Several splits are merged into the target ``result``; if there are many tokens, float32 results
    are stored at address ``out`` instead. ``room`` is the address of the partial results.
    """
    node = ctx.node
    heads, kv_heads, depth, width = _sizes(node)
    together, slots, tokens = _heads_per_block(node), _scalar_slots(node), _max_tokens(node)
    made = _split_module(_kind(node), depth, width, together, _has_logit_bias(node))
    arg = _argument(ctx, out, room, slots, split=_SCALAR_SPLIT, rows=tokens)
    grid = (kv_heads * ceil(heads // kv_heads, together), tokens, max(1, slots))
    attend = Launch(made["attend"], grid, (128,), (arg,))
    return [attend, _merge(ctx, arg, tokens, result, step)] if slots else [attend]


# ------------------------------------------------------------------------------------ registration


_LAYOUT = dict.fromkeys(("q", "k", "v"), ROWS)  # rows are tokens, and slots of the pools
_POOLS = {"k": CACHED, "v": CACHED}


def _float_target(ctx: KernelContext, out: int) -> bytes:
    """The target of float32 results at address ``out``."""
    heads, _, _, width = _sizes(ctx.node)
    return _TARGET.pack(at=out, stride=4 * heads * width, block=0, line=0)


def _float_launches(ctx: KernelContext, out: int, room: int) -> list[Launch]:
    """Launches that store float32 results at address ``out``."""
    to = _float_target(ctx, out)
    if _on_tensor_cores(ctx):
        return [*_decode(ctx, room, to, 1), *_tiled(ctx, out)]
    if _can_split_kv(ctx.node):
        return _split(ctx, out, room, to, 1)
    return [_generic(ctx, out)]


@BACKEND.kernel(
    "attention",
    layout=_LAYOUT,
    dtypes=_POOLS,
    scratch=lambda node, options: _partials_nbytes(node),
)
def attention(ctx: KernelContext) -> list[Launch]:
    return _float_launches(ctx, ctx.out.address, ctx.scratch)


def _float_result_nbytes(node: Tensor) -> int:
    """Bytes of a float32 result that is quantised by a kernel of its own."""
    heads, _, _, width = _sizes(node)
    return aligned(4 * max(1, _max_tokens(node)) * heads * width)


@BACKEND.kernel(
    "attention_quantise",
    layout=_LAYOUT,
    dtypes=_POOLS,
    scratch=lambda node, options: _float_result_nbytes(node) + _partials_nbytes(node),
)
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    node, floats = ctx.node, ctx.scratch
    room, halves = floats + _float_result_nbytes(node), HALVES.get(ctx.out.dtype.name, 0)
    result, step = target(ctx.out), unit([ctx.out])
    parts = not has_row_scales(ctx.out.dtype.name)  # of a row, which is what a block merges
    if _on_tensor_cores(ctx):
        if halves or (parts and _decode_queries(node)[0] == _ALL):
            return [*_decode(ctx, room, result, step), *_tiled(ctx, ctx.out.address, halves)]
    elif parts and _can_split_kv(node) and _scalar_slots(node):
        return _split(ctx, floats, room, result, step)
    heads, _, _, width = _sizes(node)
    return [*_float_launches(ctx, floats, room), quantise(ctx, floats, 4 * heads * width, ctx.out)]


def _all_instances() -> None:
    """Register the modules that common models use, so that tests compile them."""
    for kind in CACHED:
        for depth in _TENSOR_DEPTHS:
            for few in (True, False):
                _merge_module(depth, few)
            for together in (1, 2, 4) if kind == "f32" else (1, 2, 4, 8):
                for biased in (False, True):
                    _split_module(kind, depth, depth, together, biased)
            if kind != "f32":
                for biased in (False, True):
                    _decode_module(kind, depth, biased)
                    _tiled_module(kind, depth, biased)
        for together in (2, 4):
            _split_module(kind, *_MLA_SIZES, together, False)
        _generic_module(kind, kind)
    for few in (True, False):
        _merge_module(_MLA_SIZES[1], few)


_all_instances()
