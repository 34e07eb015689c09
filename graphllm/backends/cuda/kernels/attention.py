"""Attention over the paged KV cache.

Two families of kernels, chosen by the shape alone, so that a token's result is the same in every
step:

- on tensor cores, in f16: attention_decode.cu for the queries of sequences that have one, bound by
  memory, and attention_tiled.cu for those of the others, in tiles of 64; both give the same bits;
- for float32 pools and other shapes: attention_split_kv.cu, or for any shape attention_generic.cu.

The keys of a query are divided into splits, whose results attention_merge.cu merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....backends.alignment import aligned
from ....graph.dtype import CACHED
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.pool_layout import scales_offset
from ..runtime.source import Module, module
from ..runtime.work import MOSTLY_CACHE, Launch, ceil
from .attention_shapes import (
    ALL,
    FEW_TOKENS,
    GROUP,
    MLA_SIZES,
    SCALAR_SPLIT,
    SEVERAL,
    TENSOR_DEPTHS,
    TENSOR_SPLIT,
    TILE_QUERIES,
    TILES_PER_BLOCK,
    can_split_kv,
    decode_queries,
    decode_slots,
    has_logit_bias,
    heads_per_block,
    max_sequences,
    max_tokens,
    on_tensor_cores,
    partials_nbytes,
    pool_kind,
    scalar_slots,
    sizes,
    tile_nbytes,
)
from .kv_cache import WHOLE_HEADS
from .quantize import HALVES, has_row_scales, quantise, target, unit

_ARGUMENT = ArgumentStruct("attention.cuh", "Attention")
_TARGET = ArgumentStruct("quantize.cuh", "Target")

# ------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class NewTokens:
    """Tokens whose heads attention_decode.cu rotates and writes.

    Attributes:
        argument: the struct of this name.
        most: their number at most, 1 or `FEW_TOKENS`.
        weights: what the kernel reads early.
    """

    argument: bytes
    most: int
    weights: Sequence[OperandRef]


def _argument(
    ctx: KernelContext, out: int, partials: int = 0, slots: int = 0, queries: int = ALL,
    split: int = TENSOR_SPLIT, fine: int = 0, rows: int = 0,
) -> bytes:  # fmt: skip
    """The argument of every kernel here; ``out`` and ``partials`` are addresses."""
    heads, kv_heads, *_ = sizes(ctx.node)
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
        most_sequences=max(1, max_sequences(ctx.node)), most_rows=max(1, rows),
        scale=attrs["scale"], softcap=attrs["softcap"], shared=heads // kv_heads,
        groups=ceil(heads // kv_heads, GROUP),
    )  # fmt: skip


def _decode_module(
    kind: str, depth: int, biased: bool, one_sequence: bool, rotated: int = 0
) -> Module:
    return module("attention_decode", POOL=CACHED.index(kind), DEPTH=depth, BIASED=int(biased),
                  ONE_SEQUENCE=int(one_sequence), ROTATED=rotated)  # fmt: skip


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
    heads, _, _, width = sizes(ctx.node)
    few = rows <= FEW_TOKENS
    made = _merge_module(width, few)
    results = (128 if step == 1 else 256) if few else 1024  # of a block
    kernel, grid = made[f"merge_{step}"], (rows, ceil(heads * width, results))
    return Launch(kernel, grid, (512 if few else 256,), (arg, result), shared_percent=MOSTLY_CACHE)


def _resident(ctx: KernelContext, rotated: int) -> int:
    """Thread blocks of attention_decode.cu that fit on a multiprocessor, as stated there."""
    node, (_, _, depth, _) = ctx.node, sizes(ctx.node)
    enough = pool_kind(node) != "f16" or ctx.device.gpu.capability >= (9, 0)  # registers
    enough &= rotated < 2 and not has_logit_bias(node)
    four = depth == 64 or (depth == 128 and enough)
    return 2 if depth > 128 else 4 if four else 3


def _decode(
    ctx: KernelContext, room: int, result: bytes, step: int, new: NewTokens | None = None
) -> list[Launch]:
    """The decode kernel and its merge. ``room``: address of partial results."""
    node = ctx.node
    heads, kv_heads, depth, _ = sizes(node)
    queries, rows = decode_queries(node)
    if not rows:
        return []
    slots, processors = decode_slots(node), ctx.device.gpu.processors
    groups = kv_heads * ceil(heads // kv_heads, GROUP)
    kind, biased = pool_kind(node), has_logit_bias(node)
    rotated = new.most if new else 0
    blocks = processors * _resident(ctx, rotated)
    arg = _argument(ctx, 0, room, slots, queries, fine=TILES_PER_BLOCK * blocks, rows=rows)
    one_sequence = queries == ALL and max_sequences(node) == 1 and rows <= FEW_TOKENS
    grid, shared = [min(rows * slots * groups, blocks)], 12 * (rows + 1)  # counts of units
    if one_sequence:
        grid, shared = [min(slots, max(1, blocks // (groups * rows))), groups, rows], 0
    made = _decode_module(kind, depth, biased, one_sequence, rotated)
    attend = Launch(
        made["attend"], grid, (128,), (arg, new.argument) if new else (arg,), shared,
        prefetches=new.weights if new else (), shared_percent=MOSTLY_CACHE,
    )  # fmt: skip
    return [attend, _merge(ctx, arg, rows, result, step)]


def _tiled(ctx: KernelContext, out: int, kind: int = 0) -> list[Launch]:
    """The tiled kernel. ``kind``: 0 for float32 results, else as in `HALVES`."""
    node = ctx.node
    heads, _, depth, _ = sizes(node)
    if decode_queries(node)[0] == ALL:
        return []
    count = ceil(max_tokens(node), TILE_QUERIES) + max_sequences(node)
    kernel = _tiled_module(pool_kind(node), depth, has_logit_bias(node))["attend"]
    arg = _argument(ctx, out, queries=SEVERAL if max_sequences(node) > 1 else ALL)
    threads = 256 if depth > 128 else 128
    return [Launch(kernel, (count, heads), (threads,), (arg, kind), tile_nbytes(depth))]


def _generic(ctx: KernelContext, out: int) -> Launch:
    heads, _, depth, width = sizes(ctx.node)
    kernel = _generic_module(ctx.k.dtype.name, ctx.v.dtype.name)["attend"]
    args = (_argument(ctx, out), depth, width)
    return Launch(kernel, (heads, max_tokens(ctx.node)), (128,), args, 4 * width)


def _split(ctx: KernelContext, out: int, room: int, result: bytes, step: int) -> list[Launch]:
    """The split-KV kernel and its merge.

    Several splits are merged into the target ``result``; if there are many tokens, float32 results
    are stored at address ``out`` instead. ``room`` is the address of the partial results.
    """
    node = ctx.node
    heads, kv_heads, depth, width = sizes(node)
    together, slots, tokens = heads_per_block(node), scalar_slots(node), max_tokens(node)
    made = _split_module(pool_kind(node), depth, width, together, has_logit_bias(node))
    arg = _argument(ctx, out, room, slots, split=SCALAR_SPLIT, rows=tokens)
    grid = (kv_heads * ceil(heads // kv_heads, together), tokens, max(1, slots))
    attend = Launch(made["attend"], grid, (128,), (arg,))
    return [attend, _merge(ctx, arg, tokens, result, step)] if slots else [attend]


# ------------------------------------------------------------------------------------ registration


_LAYOUT = dict.fromkeys(("q", "k", "v"), ROWS)  # rows are tokens, and slots of the pools
_POOLS = {"k": CACHED, "v": CACHED}


def _float_target(ctx: KernelContext, out: int) -> bytes:
    """The target of float32 results at address ``out``."""
    heads, _, _, width = sizes(ctx.node)
    return _TARGET.pack(at=out, stride=4 * heads * width, block=0, line=0)


def float_launches(
    ctx: KernelContext, out: int, room: int, new: NewTokens | None = None
) -> list[Launch]:
    """Launches that store float32 results at address ``out``.

    Args:
        ctx: the step.
        out: address of the results.
        room: address of `partials_nbytes` bytes.
        new: tokens that are rotated first; only if `on_tensor_cores`, in steps of few.
    """
    to = _float_target(ctx, out)
    if on_tensor_cores(ctx):
        return [*_decode(ctx, room, to, 1, new), *_tiled(ctx, out)]
    if can_split_kv(ctx.node):
        return _split(ctx, out, room, to, 1)
    return [_generic(ctx, out)]


@BACKEND.kernel(
    "attention",
    layout=_LAYOUT,
    dtypes=_POOLS,
    scratch=lambda node, options: partials_nbytes(node),
)
def attention(ctx: KernelContext) -> list[Launch]:
    return float_launches(ctx, ctx.out.address, ctx.scratch)


def _float_result_nbytes(node: Tensor) -> int:
    """Bytes of a float32 result that is quantised by a kernel of its own."""
    heads, _, _, width = sizes(node)
    return aligned(4 * max(1, max_tokens(node)) * heads * width)


def quantised_nbytes(node: Tensor) -> int:
    """Bytes of workspace of `quantised_launches`."""
    return _float_result_nbytes(node) + partials_nbytes(node)


def quantised_launches(
    ctx: KernelContext, floats: int, new: NewTokens | None = None
) -> list[Launch]:
    """Launches that store quantised results in ``ctx.out``; see `float_launches`.

    ``floats`` is the address of `quantised_nbytes` bytes.
    """
    node = ctx.node
    room, halves = floats + _float_result_nbytes(node), HALVES.get(ctx.out.dtype.name, 0)
    result, step = target(ctx.out), unit([ctx.out])
    parts = not has_row_scales(ctx.out.dtype.name)  # of a row, which is what a block merges
    if on_tensor_cores(ctx):
        if halves or (parts and decode_queries(node)[0] == ALL):
            tiled = _tiled(ctx, ctx.out.address, halves)
            return [*_decode(ctx, room, result, step, new), *tiled]
    elif parts and can_split_kv(node) and scalar_slots(node):
        return _split(ctx, floats, room, result, step)
    heads, _, _, width = sizes(node)
    launches = float_launches(ctx, floats, room, new)
    return [*launches, quantise(ctx, floats, 4 * heads * width, ctx.out)]


@BACKEND.kernel(
    "attention_quantise",
    layout=_LAYOUT,
    dtypes=_POOLS,
    scratch=lambda node, options: quantised_nbytes(node),
)
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    return quantised_launches(ctx, ctx.scratch)


def _all_instances() -> None:
    """Register the modules that common models use, so that tests compile them."""
    for kind in CACHED:
        for depth in TENSOR_DEPTHS:
            for few in (True, False):
                _merge_module(depth, few)
            for together in (1, 2, 4) if kind == "f32" else (1, 2, 4, 8):
                for biased in (False, True):
                    _split_module(kind, depth, depth, together, biased)
            if kind != "f32":
                for biased in (False, True):
                    for one_sequence in (False, True):
                        _decode_module(kind, depth, biased, one_sequence)
                    if kind == "f16" and depth in WHOLE_HEADS:
                        for most in (1, FEW_TOKENS):
                            _decode_module(kind, depth, biased, one_sequence=True, rotated=most)
                    _tiled_module(kind, depth, biased)
        for together in (2, 4):
            _split_module(kind, *MLA_SIZES, together, False)
        _generic_module(kind, kind)
    for few in (True, False):
        _merge_module(MLA_SIZES[1], few)


_all_instances()
