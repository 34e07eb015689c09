"""Argument block of the attention kernels, and the layout of a thread's scratch memory."""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.argument_block import argument_reader
from ..runtime.jit import helper
from .attention_vectors import PAD, PREFETCH_KEYS, S_ROW, SPLIT_KEYS, TILE_KEYS

ROWS = 72  # most rows of a tile: whole blocks of every height


class AttentionArgs(NamedTuple):
    """Argument block of the attention kernels. Strides are in bytes."""

    q: int
    q_stride: int
    k: int
    k_stride: int
    v: int
    v_stride: int
    k_head_stride: int
    v_head_stride: int
    q_start: int
    out: int
    tokens: int  # address of the live count
    starts: int  # address of the live count of entries of q_start: sequences + 1
    heads: int
    kv_heads: int
    depth: int  # elements of a query and of a key
    width: int  # elements of a value
    padded_depth: int
    padded_width: int
    scale_bits: int  # of a float32
    scratch: int
    thread_scratch: int  # bytes of it for each thread
    partials: int  # results of splits; see `partial_address`
    max_split_tokens: int  # steps of more tokens do not store results of splits
    splits: int  # most splits of a sequence
    kv_len: int
    table: int
    table_width: int
    block: int  # cache slots per block
    causal: int
    window: int  # of keys up to the query's own; 0: none
    softcap: float  # 0: none
    sinks: int = 0  # 0: none
    slopes: int = 0  # 0: none
    prefix_len: int = 0  # 0: none
    skip_prefix: int = 0
    position_bias: int = 0  # 0: none
    bias_reach: int = 0  # largest distance that it tells from larger ones


read_attention = argument_reader(AttentionArgs)

# Byte offsets in a thread's scratch: addresses of keys and of values, ...
KEYS, VALUES = 0, 8 * (SPLIT_KEYS + PREFETCH_KEYS + TILE_KEYS)
# ... for each row the range of visible keys, its position, and the state of its softmax, ...
FIRST_KEY, LAST_KEY, POSITION = (2 * VALUES + 8 * ROWS * i for i in range(3))
ROW_MAX, ROW_SUM, OLD_FACTOR, NEW_FACTOR, SPLIT_MAX, SPLIT_SUM = (
    POSITION + 8 * ROWS + 4 * ROWS * i for i in range(6)
)
# ... scores, queries, then totals, and the keys or values of a split as float32.
SCORES = (SPLIT_SUM + 4 * ROWS + 63) // 64 * 64
QUERIES = SCORES + ROWS * S_ROW


@helper
def totals_address(p, local):
    """Address of the totals of the rows in the scratch ``local`` of a thread."""
    return local + QUERIES + ROWS * read_attention(p).padded_depth * 4


@helper
def unpacked_address(p, local):
    """Address for the keys or values of a split as float32."""
    return totals_address(p, local) + ROWS * read_attention(p).padded_width * 4


@helper
def partial_address(p, token, head, split):
    """Address of the result of one split: totals, maximum, sum."""
    a = read_attention(p)
    return a.partials + ((token * a.heads + head) * a.splits + split) * (a.padded_width + 16) * 4


def padded(width: int) -> int:
    """``width`` rounded up to a multiple of `PAD`."""
    return -(-width // PAD) * PAD


def thread_scratch_bytes(depth: int, width: int) -> int:
    """Bytes of scratch of a thread; see the offsets above."""
    rows = ROWS * 4 * (padded(depth) + padded(width))
    return -(-(QUERIES + rows + SPLIT_KEYS * 4 * max(padded(depth), padded(width))) // 64) * 64
