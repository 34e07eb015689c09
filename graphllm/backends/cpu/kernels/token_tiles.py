"""Parts of the loops of linears: tiles of tokens, prefetching, results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..runtime.jit import f32s, helper
from ..simd.emitter import VECTOR

GROUP_ROWS = 16  # weight rows that are interleaved in packed weights
PASS_TOKENS = 128  # tokens whose results fit the L1 cache; whole tiles
_AHEAD_GROUPS = 4  # groups whose chunks of columns are prefetched while one is multiplied


@helper
def zero_results(c, nbytes):
    """Zero accumulators at ``c``."""
    results = f32s(c)
    for i in range(nbytes // 4):
        results[i] = 0


@helper
def no_gemv(w, g, x, k, c):
    """Stands for the missing GEMV of formats whose GEMM also serves a single token."""


@helper
def no_gemm(w, g, last, x, rows, k, panel, c, count):
    """Stands for the missing GEMM of formats whose wide loops serve all numbers of tokens."""


def token_tiles(groups: int, tokens: int, make_tile: Callable[[int], Any]) -> Any:
    """Make a helper that goes over ``count`` tokens in tiles of ``tokens`` and smaller ones.

    Small tiles come first, until whole large ones remain: any even number of tokens from 4 on is a
    sum of tiles of 4 and 6.
    ``make_tile(tokens)`` makes ``tile(left, panel, size, x, rows, at, k, c, ahead, step, lines)``
    for ``size`` blocks from column ``at`` on, of ``k``; for the other arguments see
    `linear_microkernels`. All tiles together prefetch ``nbytes`` of each group from ``ahead`` on,
    spread evenly, as the loop of a tile has ``loops`` iterations: memory is read while the
    processor multiplies.
    """
    few, token_bytes = 4 if tokens == 6 else tokens // 2, groups * 4 * GROUP_ROWS
    large, small = make_tile(tokens), make_tile(few)

    @helper
    def run(panel, size, x, rows, at, k, c, count, ahead, step, nbytes, loops):
        iterations = (count + tokens - 1) // tokens * loops
        lines, t = (nbytes // VECTOR + iterations - 1) // iterations, 0
        while t < count:
            left, at_x, to = count - t, rows + 8 * t, c + t * token_bytes
            if (left - 1) % tokens < few:  # a tile that is not full costs less than two small ones
                small(left, panel, size, x, at_x, at, k, to, ahead, step, lines)
                t += few
            else:
                large(left, panel, size, x, at_x, at, k, to, ahead, step, lines)
                t += tokens
            ahead, nbytes = ahead + lines * loops * VECTOR, nbytes - lines * loops * VECTOR
            lines = lines if nbytes > 0 else 0

    return run


def following_chunk(groups: int) -> Any:
    """Make a helper that returns where the chunk of columns begins that is prefetched meanwhile.

    Its arguments are the first column, the columns of a chunk and of a row, and the first group of
    the present chunk; it counts in columns of the whole matrix.
    """
    chunks = max(1, _AHEAD_GROUPS // groups)

    @helper
    def following(at, chunk, columns, g):
        for _ in range(chunks):
            at += chunk
            if at >= columns:
                at, g = 0, g + groups
        return g * columns + at

    return following


# ---------------------------------------------------------------------------------- many tokens

WIDE_GROUPS = 16  # that share the activations of a chunk


class WideLoops(NamedTuple):
    """The loops for many tokens, and when they are faster than the others."""

    gemm: Any  # (w, g, last, x, rows, k, space, c, count): at most `WIDE_GROUPS` groups
    nbytes: int  # of space
    tokens: int  # most tokens of a pass
    least: int  # tokens, of all together
    unit: int  # tokens that take as long as fewer of them
    tail: int  # tokens in the last unit


NEVER = 1 << 40


@helper
def no_wide_gemm(w, g, last, x, rows, k, space, c, count):
    """Stands for the missing loops of other targets."""


NO_WIDE_LOOPS = WideLoops(no_wide_gemm, nbytes=0, tokens=1, least=NEVER, unit=1, tail=1)
