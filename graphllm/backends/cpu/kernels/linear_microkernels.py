"""Intrinsics for the inner loops of linear: groups of 16 interleaved weight rows times tokens.

For several tokens, a chunk of columns of one or more groups is unpacked once into panels in the L1
cache, and tiles of tokens run over them (GEMM). For one token, unpacking and multiplying are fused,
so that each weight byte goes from memory directly into a register (GEMV). Both, and tiles of any
number of tokens, do the same float operations in the same order for each result, so the bits of a
result do not depend on the batch.

Results are accumulated at ``c``: f32 [tokens][groups][16]. ``q``, ``d`` and ``s`` are the addresses
of the int8 values, scales and sums of a row of activations (layout: `graphllm.graph.dtype`); in
tiles the int64 at ``rows`` are the byte offsets of each token's row. All arguments are int64;
arguments that select code are literals. The code is emitted by `linear_integer`,
`linear_one_token` and `linear_float`; on AVX2, also by `simd.linear_gathered` and
`simd.linear_few_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.lazy_numba import RequireLiteralValue, intrinsic, types
from ..simd.emitter import Emitter, Value
from . import (
    amx_operands,
    linear_amx,
    linear_float,
    linear_integer,
    linear_one_token,
    linear_rows,
)


def _emitted(literals: tuple[Any, ...], values: int, emit: Callable[..., None]) -> Any:
    """Return value of an intrinsic that runs ``emit(Emitter, *literals, *values)``."""
    if not all(isinstance(v, types.IntegerLiteral) for v in literals):
        raise RequireLiteralValue(
            "the arguments that select a microkernel must be literal integers"
        )
    numbers = [v.literal_value for v in literals]

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        emit(Emitter(builder), *numbers, *given[len(literals) :])
        return context.get_dummy_value()

    return types.none(*literals, *[types.int64] * values), generate


@intrinsic(prefer_literal=True)
def unpack(typingctx, fmt, w, panel, blocks):
    """Unpack blocks of an integer format, at most `CHUNK` columns, into a panel for `tile`."""
    return _emitted((fmt,), 3, linear_integer.unpack)


@intrinsic(prefer_literal=True)
def tile(
    typingctx, fmt, in_place, groups, tokens,
    left, panel, blocks, q, d, s, rows, c, ahead, step, lines,
):  # fmt: skip
    """c += panels times quantised activations of ``tokens`` tokens, or ``left`` if that is less.

    c has space for all tokens of the tile; results of missing tokens are undefined. Meanwhile
    ``lines`` cache lines of each group per block or sub-block are prefetched, from ``ahead`` on;
    those of different groups are ``step`` bytes apart. If ``in_place``, the panel is only the
    addresses of the groups' packed blocks; these are read directly, and the tile prefetches them.
    """
    return _emitted((fmt, in_place, groups, tokens), 11, linear_integer.tile)


@intrinsic(prefer_literal=True)
def fused(typingctx, fmt, w, blocks, q, d, s, c):
    """c += blocks of an integer format times one token's quantised activations."""
    return _emitted((fmt,), 6, linear_one_token.fused)


@intrinsic(prefer_literal=True)
def amx_configure(typingctx, fmt):
    """Set the shapes of this thread's tile registers for a format, until `amx_release`."""
    return _emitted((fmt,), 0, linear_amx.configure)


@intrinsic(prefer_literal=True)
def amx_release(typingctx):
    return _emitted((), 0, linear_amx.release)


@intrinsic(prefer_literal=True)
def amx_gather(typingctx, fmt, x, k, at, blocks, rows, count, tiles, meta):
    """Copy a chunk of columns of ``count`` tokens' activations to tiles."""
    return _emitted((fmt,), 8, amx_operands.gather)


@intrinsic(prefer_literal=True)
def amx_unpack(typingctx, fmt, w, panel, blocks):
    """Unpack a chunk of a group, at most `CHUNK` columns, into a panel for `amx_tiles`."""
    return _emitted((fmt,), 3, amx_operands.unpack)


@intrinsic(prefer_literal=True)
def amx_tiles(typingctx, fmt, panels, blocks, activations, meta, count, c, ahead, step):
    """c [groups][tokens][16] += panels of two groups times ``count`` tokens' activations."""
    return _emitted((fmt,), 8, linear_amx.tiles)


@intrinsic(prefer_literal=True)
def gather(typingctx, fmt, x, k, at, blocks, rows, count, records):
    """Gather ``count`` tokens' activations of ``blocks`` blocks from column ``at`` on."""
    from ..simd import activation_records  # for AVX2 alone

    return _emitted((fmt,), 7, activation_records.gather)


@intrinsic(prefer_literal=True)
def gathered_unpack(typingctx, fmt, w, panel, blocks):
    """Unpack blocks of a group, at most `CHUNK` columns, into a panel for `gathered_tiles`."""
    from ..simd import linear_gathered  # for AVX2 alone

    return _emitted((fmt,), 3, linear_gathered.unpack)


@intrinsic(prefer_literal=True)
def gathered_tiles(typingctx, fmt, panel, blocks, records, count, c, ahead):
    """c [tokens][16] += a panel times ``count`` tokens' gathered activations."""
    from ..simd import linear_gathered  # for AVX2 alone

    return _emitted((fmt,), 6, linear_gathered.tiles)


@intrinsic(prefer_literal=True)
def few_tokens_tile(typingctx, fmt, tokens, w, blocks, records, c):
    """c [tokens][16] += packed blocks, at most `CHUNK` columns, times gathered activations."""
    from ..simd import linear_few_tokens  # for AVX2 alone

    return _emitted((fmt, tokens), 4, linear_few_tokens.tile)


@intrinsic(prefer_literal=True)
def unpack_float(typingctx, fmt, w, panel, blocks):
    """Unpack blocks of any format to f32 [k][16] for `tile_float`."""
    return _emitted((fmt,), 3, linear_float.unpack)


@intrinsic(prefer_literal=True)
def tile_float(
    typingctx, groups, tokens, left, panel, width, columns, x, rows, c, ahead, step, lines
):
    """c += panels, ``width`` bytes apart, times float activations; see `tile`."""
    return _emitted((groups, tokens), 10, linear_float.tile)


@intrinsic(prefer_literal=True)
def gather_floats(typingctx, x, rows, count, columns, to):
    """Copy columns of ``count`` tokens' float activations for `gathered_float_tile`."""
    return _emitted((), 5, linear_float.gather)


@intrinsic(prefer_literal=True)
def gathered_float_tile(typingctx, lines, panel, columns, x, c, pitch, ahead, step):
    """c += panels times gathered float activations; ``lines`` of each group are prefetched."""
    return _emitted((lines,), 7, linear_float.gathered_tile)


@intrinsic(prefer_literal=True)
def fused_float(typingctx, fmt, w, columns, x, c):
    """c += at most a chunk of columns of a plain format times one token's float activations."""
    return _emitted((fmt,), 4, linear_float.fused)


@intrinsic(prefer_literal=True)
def row_tile(typingctx, fmt, groups, tokens, left, panel, blocks, q, rows, c):
    """c, int32, += packed blocks of groups, whose addresses are at ``panel``, times activations."""
    return _emitted((fmt, groups, tokens), 6, linear_rows.tile)


@intrinsic(prefer_literal=True)
def row_fused(typingctx, fmt, w, blocks, x, c):
    """c, int32, += packed blocks of a group times one token's activations."""
    return _emitted((fmt,), 4, linear_rows.fused)


@intrinsic(prefer_literal=True)
def row_finish(typingctx, fmt, groups, scales, x, k, rows, count, c, token_bytes, group_bytes):
    """Replace int32 sums of ``count`` tokens at ``c`` by results."""
    return _emitted((fmt, groups), 8, linear_rows.finish)


@intrinsic(prefer_literal=True)
def row_amx_configure(typingctx):
    """Set the shapes of this thread's tile registers, until `amx_release`."""
    return _emitted((), 0, linear_rows.configure)


@intrinsic(prefer_literal=True)
def row_amx_gather(typingctx, x, steps, rows, count, tiles):
    """Copy steps of 64 columns of ``count`` tokens' activations to tiles."""
    return _emitted((), 5, linear_rows.gather)


@intrinsic(prefer_literal=True)
def row_amx_tiles(
    typingctx, first, second, steps, activations, count, c, group_bytes, ahead, ahead_step
):
    """c, int32, += packed columns of two groups times ``count`` tokens' activations."""
    return _emitted((), 9, linear_rows.tiles)


@intrinsic(prefer_literal=True)
def row_unpack(typingctx, fmt, w, scales, panel, blocks):
    """Upcast packed blocks of a row format to f32 [k][16] for `tile_float`."""
    return _emitted((fmt,), 4, linear_rows.unpack)


@intrinsic(prefer_literal=True)
def row_fused_float(typingctx, fmt, w, scales, blocks, x, c):
    """c += packed blocks of a row format times one token's float activations."""
    return _emitted((fmt,), 5, linear_rows.fused_float)


@intrinsic(prefer_literal=True)
def upcast_activations(typingctx, q, d, to, columns):
    """Upcast e4m3 activations with one scale to float32."""
    return _emitted((), 4, linear_rows.upcast_activations)


@intrinsic(prefer_literal=True)
def workspace(typingctx, nbytes):
    """Address of ``nbytes`` (a literal) bytes of stack, aligned to a vector."""
    if not isinstance(nbytes, types.IntegerLiteral):
        raise RequireLiteralValue("workspace(nbytes) needs a literal size")

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        return Emitter(builder).stack_buffer(nbytes.literal_value)

    return types.int64(nbytes), generate
