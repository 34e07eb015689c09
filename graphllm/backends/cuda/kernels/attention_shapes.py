"""How the attention kernels divide the work of a node, by its shape alone; see attention.py."""

from __future__ import annotations

from ....graph.op import get
from ....graph.tensor import Tensor
from ..runtime.device import KernelContext
from ..runtime.work import ceil, max_shared

ALL, _SINGLE, SEVERAL = range(3)  # enum Queries of attention.cuh
TILE_QUERIES = _TILE_KEYS = 64
TENSOR_DEPTHS = (64, 96, 128, 256)  # head dimensions of the kernels on tensor cores
_MIN_BLOCK = 16  # tokens of a block of the cache, for these kernels
GROUP = 8  # query heads that they compute together, as in attention.cuh
FEW_TOKENS = 16  # tokens of a step up to which all queries are computed by attention_decode.cu
_SPLIT_WIDTHS = range(64, 577, 8)  # head dimensions of attention_split_kv.cu
MLA_SIZES = (576, 512)  # depth and width of MLA (DeepSeek)
_SPAN = 256  # elements of a row of which a thread of that kernel holds eight
_TARGET_BLOCKS = 264  # thread blocks that about fill a GPU
TENSOR_SPLIT, SCALAR_SPLIT = 256, 64  # least keys of a split
_MAX_SPLITS, _MAX_SLOTS = 32, 144  # of a token; the former as in attention.cuh
TILES_PER_BLOCK = 2  # of attention_decode.cu: up to this number partial results are those of tiles
_SLOTS_OF_MANY = 8  # partial results of tiles that each of many tokens has room for


def sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Query heads, KV heads, elements of a query or key, elements of a value."""
    q, _, v = node.sources[:3]
    (heads, depth), (kv_heads, width) = q.meta.inner, v.meta.inner
    return heads, kv_heads, depth, width


def _context_keys(node: Tensor) -> int:
    """Keys that a row of the block table can address."""
    table = node.src[5]
    assert table is not None
    return int(table.meta.bound().shape[1]) * int(node.attrs["block"])  # type: ignore[arg-type]


def max_tokens(node: Tensor) -> int:
    return KernelContext.upper_bound(node.sources[0].meta.rows)


def pool_kind(node: Tensor) -> str:
    """dtype of the pools; "mixed" if they differ."""
    k, v = node.sources[1:3]
    return k.dtype.name if k.dtype == v.dtype else "mixed"


def _vector_readable(node: Tensor) -> bool:
    """Whether pools have one dtype, rows that are aligned for it, and blocks of a power of two."""
    block, kind = node.attrs["block"], pool_kind(node)
    places = [at for pool in node.sources[1:3] for at in (pool.meta.offset, pool.meta.strides[0])]
    least = 16 if kind in ("f32", "f16") else 4 if kind == "fp8" else 2  # what elements are read by
    return kind != "mixed" and all(at % least == 0 for at in places) and block & (block - 1) == 0


def fits_tensor_cores(node: Tensor) -> bool:
    _, _, depth, width = sizes(node)
    kind, pools = pool_kind(node), node.sources[1:3]
    shaped = depth == width and depth in TENSOR_DEPTHS and kind != "f32"
    places = [at for pool in pools for at in (pool.meta.offset, pool.meta.strides[0])]
    words = all(at % 4 == 0 for at in places)
    return shaped and words and _vector_readable(node) and int(node.attrs["block"]) >= _MIN_BLOCK


def on_tensor_cores(ctx: KernelContext) -> bool:
    """Whether the tensor cores compute the step, in both kernels, so that their bits are equal."""
    capability, (_, _, depth, _) = ctx.device.gpu.capability, sizes(ctx.node)
    fits = capability >= (8, 0) and tile_nbytes(depth) <= max_shared(capability)
    return fits and fits_tensor_cores(ctx.node)


def can_split_kv(node: Tensor) -> bool:
    _, _, depth, width = sizes(node)
    return depth in _SPLIT_WIDTHS and width in _SPLIT_WIDTHS and _vector_readable(node)


def has_logit_bias(node: Tensor) -> bool:
    """Whether logits are capped, or have ALiBi slopes or position biases."""
    own = dict(zip(get(node.op).params, node.src))
    biases = (own.get("slopes"), own.get("position_bias"))
    return bool(node.attrs["softcap"] > 0 or any(bias is not None for bias in biases))


def heads_per_block(node: Tensor) -> int:
    """Query heads that share one pass over the keys of their KV head."""
    heads, kv_heads, depth, width = sizes(node)
    few = pool_kind(node) == "f32" or max(depth, width) > _SPAN  # registers
    most = 2 if max_tokens(node) == 1 else 4 if few else 8  # one token: more blocks
    return next((n for n in (1, 2, 4, 8) if n >= heads // kv_heads or n == most), most)


def max_sequences(node: Tensor) -> int:
    return KernelContext.upper_bound(node.sources[4].meta.rows)


def decode_queries(node: Tensor) -> tuple[int, int]:
    """Queries that attention_decode.cu computes (enum Queries), and their number at most."""
    tokens, sequences = max_tokens(node), max_sequences(node)
    if tokens <= max(FEW_TOKENS, sequences):
        return ALL, max(1, tokens)
    return _SINGLE, sequences if sequences > 1 else 0


def _slots(node: Tensor, least_split: int, tiles: int) -> int:
    """Partial results of a query at most. ``tiles``: of these at least, if there are as many."""
    keys = _context_keys(node)
    splits = min(_MAX_SPLITS, ceil(keys, least_split))
    return max(1, splits, min(tiles, ceil(keys, _TILE_KEYS)))


def decode_slots(node: Tensor) -> int:
    _, rows = decode_queries(node)
    return _slots(node, TENSOR_SPLIT, _MAX_SLOTS if rows <= FEW_TOKENS else _SLOTS_OF_MANY)


def scalar_slots(node: Tensor) -> int:
    """0 if a block computes all splits of a token."""
    heads, kv_heads, *_ = sizes(node)
    items = kv_heads * ceil(heads // kv_heads, heads_per_block(node)) * max(1, max_tokens(node))
    return 0 if items >= _TARGET_BLOCKS else _slots(node, SCALAR_SPLIT, 1)


def partials_nbytes(node: Tensor) -> int:
    """Bytes of partial results."""
    heads, _, _, width = sizes(node)
    tokens, partial = max(1, max_tokens(node)), 4 * heads * (width + 4)
    nbytes = tokens * scalar_slots(node) * partial
    if fits_tensor_cores(node):
        _, rows = decode_queries(node)
        nbytes = max(nbytes, rows * decode_slots(node) * partial)
    return nbytes


def tile_nbytes(depth: int) -> int:
    """Bytes of the struct Tile of attention_tiled.cu."""
    padded = depth + (0 if depth % 64 else 32)
    nbytes = 2 * _TILE_KEYS * (padded + depth + 8) + 4 * TILE_QUERIES * depth
    return nbytes + 2 * padded * (TILE_QUERIES if depth > 128 else 1)
