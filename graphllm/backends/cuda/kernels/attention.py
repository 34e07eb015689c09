"""Attention over the paged KV cache: split-KV for few tokens, tiles for many, and any other shape.

Few tokens have too few heads to occupy a GPU, so the keys of each token are split among thread
blocks, and a second kernel merges the splits. Many tokens go in tiles of 64 queries over tensor
cores, in f16.
"""

from __future__ import annotations

from ....backends.alignment import aligned
from ....graph.dtype import CACHED
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Module, module
from ..runtime.work import Launch, ceil
from .quantize import HALVES, quantise, target, unit

_ARGUMENT = ArgumentStruct("attention.cuh", "Attention")
_MIN_TILED_TOKENS = 17  # tokens of a step from which on the tiled kernel is used
_TILE_QUERIES = _TILE_KEYS = 64
_TILED_DEPTHS = (64, 96, 128, 256)  # head dimensions of the tiled kernel
_SPLIT_WIDTHS = range(64, 577, 8)  # head dimensions of the split-KV kernel
_MLA_SIZES = (576, 512)  # depth and width of MLA (DeepSeek)
_SPAN = 256  # elements of a row of which a thread of the split-KV kernel holds eight
_TARGET_BLOCKS = 264  # thread blocks that about fill a GPU
_MIN_SPLIT_KEYS, _MAX_SPLITS = 32, 64  # keys of a split; splits that can be merged


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
    """Whether pools have one dtype, rows aligned to 16 bytes, and blocks of a power of two."""
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
    """Whether logits are capped or have ALiBi slopes."""
    return bool(node.attrs["softcap"] > 0 or (len(node.src) > 7 and node.src[7] is not None))


def _heads_per_block(node: Tensor) -> int:
    """Query heads that share one pass over the keys of their KV head."""
    heads, kv_heads, depth, width = _sizes(node)
    few = _kind(node) == "f32" or max(depth, width) > _SPAN  # registers
    most = 2 if _max_tokens(node) == 1 else 4 if few else 8  # one token: more blocks
    return next((n for n in (1, 2, 4, 8) if n >= heads // kv_heads or n == most), most)


def _split_count(node: Tensor) -> int:
    """Splits of a token's keys, at most."""
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
    """Bytes of the partial results of all splits."""
    heads, _, _, width = _sizes(node)
    count = _split_count(node)
    return 0 if count == 1 else 4 * max(1, _max_tokens(node)) * heads * count * (width + 4)


# ------------------------------------------------------------------------------------- launches


def _argument(ctx: KernelContext, out: int, partials: int, splits: int) -> bytes:
    """The argument of every kernel here; ``out`` and ``partials`` are addresses."""
    heads, kv_heads, *_ = _sizes(ctx.node)
    q, k, v, attrs, table = ctx.q, ctx.k, ctx.v, ctx.attrs, ctx.table
    block = attrs["block"]
    return _ARGUMENT.pack(
        q=q.address, q_stride=q.row_stride, k=k.address, k_stride=k.row_stride, v=v.address,
        v_stride=v.row_stride, q_start=ctx.q_start.address, kv_len=ctx.kv_len.address,
        table=table.address, table_width=table.meta.bound().shape[1], sinks=ctx.address("sinks"),
        slopes=ctx.address("slopes"), prefix_len=ctx.address("prefix_len"),
        tokens=ctx.live_address(q.meta.rows), sequences=ctx.live_address(ctx.kv_len.meta.rows),
        out=out, partials=partials, heads=heads, kv_heads=kv_heads, block=block,
        shift=block.bit_length() - 1, causal=int(attrs["causal"]), window=attrs["window"],
        splits=splits,
        metadata_ready=ctx.readable_before_wait("q_start", "kv_len", "table", "prefix_len"),
        scale=attrs["scale"], softcap=attrs["softcap"],
    )  # fmt: skip


def _split_module(kind: str, depth: int, width: int, together: int, biased: bool) -> Module:
    return module("attention_split_kv", POOL=kind.upper(), DEPTH=depth, WIDTH=width, HEADS=together,
                  BIASED=int(biased))  # fmt: skip


def _tiled_module(kind: str, depth: int, biased: bool) -> Module:
    return module("attention_tiled", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased))


def _generic_module(k: str, v: str) -> Module:
    return module("attention_generic", K_POOL=CACHED.index(k), V_POOL=CACHED.index(v))


def _tiled(ctx: KernelContext, out: int, kind: int = 0) -> Launch:
    """The tiled kernel. ``kind``: 0 for float32 results, else as in `HALVES`."""
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
    """The split-KV kernel and its merge.

    Several splits are merged into ``result``, which may be quantised; a single split writes its
    float32 result to address ``out``. ``room`` is the address of the partial results.
    """
    node = ctx.node
    heads, kv_heads, depth, width = _sizes(node)
    together, count, tokens = _heads_per_block(node), _split_count(node), _max_tokens(node)
    made = _split_module(_kind(node), depth, width, together, _has_logit_bias(node))
    arg = _argument(ctx, out, room, count)
    grid = (kv_heads * ceil(heads // kv_heads, together), tokens, count)
    launches = [Launch(made["attend"], grid, (128,), (arg,))]
    if count > 1:
        merge = made[f"merge_{unit([result])}"]
        merge_grid = (tokens, ceil(heads * width, 256))
        launches.append(Launch(merge, merge_grid, (256,), (arg, target(result))))
    return launches


# ------------------------------------------------------------------------------------ registration


_LAYOUT = dict.fromkeys(("q", "k", "v"), ROWS)  # rows are tokens, and slots of the pools


@BACKEND.kernel("attention", layout=_LAYOUT, scratch=lambda node, options: _partials_nbytes(node))
def attention(ctx: KernelContext) -> list[Launch]:
    if _can_tile(ctx):
        return [_tiled(ctx, ctx.out.address)]
    if _can_split_kv(ctx.node):
        return _split(ctx, ctx.out.address, ctx.scratch, ctx.out)
    return [_generic(ctx, ctx.out.address)]


def _float_result_nbytes(node: Tensor) -> int:
    """Bytes of a float32 result that is quantised by a kernel of its own."""
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
    """Register the modules that common models use, so that tests compile them."""
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
