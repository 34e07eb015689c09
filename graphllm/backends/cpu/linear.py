"""linear on the CPU: integer kernels for block formats, float kernels for every format.

Work is shared out in chunks of 16-row groups. The order of every sum depends on K and the format
alone, so a token's results have the same bits alone, in a batch, and for any number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ... import ops
from ...dtype import F32, DType
from ...tensor import Tensor
from .. import ROWS, Options
from . import BACKEND
from .device import Launch, Site, Spot
from .formats import FORMATS
from .isa import isa
from .jit import Kernel, args, f32s, helper, kernel, load_i64, next_chunk
from .layouts import pack, packed_bytes
from .microkernels import (
    CHUNK,
    FLOAT_PANEL,
    PANEL,
    fused,
    fused_float,
    tile,
    tile_float,
    unpack,
    unpack_float,
    workspace,
)

GROUP = 16  # rows
TOKENS = 128  # whose results are kept in the first-level cache at a time
ROW = 4 * GROUP  # bytes of a token's results for a group
# A thread takes so many bytes of weights at a time, or fewer, so that each comes back a few times.
_TICKET_BYTES, _TICKETS = 64 << 10, 8
_ROOM, _FLOAT_ROOM = PANEL + TOKENS * ROW, FLOAT_PANEL + TOKENS * ROW  # bytes of workspace


def _tile_tokens() -> int:
    """Tokens of a tile: as many accumulators as registers, less what weights need."""
    return 8 if isa().avx512 else 4 if isa().avx2 or not isa().x86 else 2


@helper
def _clear(c, count):
    results = f32s(c)
    for i in range(count * GROUP):
        results[i] = 0


@helper
def _finish(c, count, y, stride, bias, added, added_stride, first, n):
    """Write ``count`` tokens' results for 16 rows, of which those beyond ``n`` do not exist; with
    the bias, and with a row of its own added for each token, unless their address is 0."""
    results, offsets = f32s(c), f32s(bias)
    rows = min(n - first, GROUP)
    for t in range(count):
        row, before = f32s(y + t * stride + 4 * first), f32s(added + t * added_stride + 4 * first)
        for r in range(rows):
            value = results[t * GROUP + r]
            value = value + offsets[first + r] if bias != 0 else value
            row[r] = before[r] + value if added != 0 else value


def _each_tile(name, many, one):
    """A helper that goes over ``count`` tokens by ``many``, and by half as many at the end.

    ``one(tokens)`` makes ``tile(left, panel, size, row, stride, columns before, columns, c)``.
    """
    few = many // 2
    large, small = one(many), one(few)

    @helper
    def run(panel, size, row, stride, at, k, c, count):
        t = 0
        while t + many <= count:
            large(many, panel, size, row + t * stride, stride, at, k, c + t * ROW)
            t += many
        while t < count:
            small(count - t, panel, size, row + t * stride, stride, at, k, c + t * ROW)
            t += few

    return run


@cache
def _integer(name: str, many: int) -> Kernel:
    """The kernel for quantised activations; ``many``: tokens of a tile."""
    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    per_sums, sum_bytes = (32, 4) if block == 32 else (16, 2)

    def one(tokens):
        @helper
        def run(left, panel, size, row, stride, at, k, c):
            d = row + k + at // block * 4
            s = row + k + k // block * 4 + at // per_sums * sum_bytes
            tile(code, tokens, left, panel, size, row + at, d, s, stride, c)

        return run

    tiles = _each_tile(name, many, one)

    @kernel(key=("integer", name, many))
    def integer(p, thread, threads):
        x, stride, w, bias, y, y_stride, added, added_stride, live, n, k, per = args(p, 12)
        tokens, groups, blocks = load_i64(live), (n + GROUP - 1) // GROUP, k // block
        panel = workspace(_ROOM)
        c = panel + PANEL
        group = next_chunk(p) * per
        while tokens > 0 and group < groups:
            for g in range(group, min(group + per, groups)):
                source = w + g * blocks * nbytes
                for first in range(0, tokens, TOKENS):
                    count, row = min(TOKENS, tokens - first), x + first * stride
                    _clear(c, count)
                    if tokens == 1:
                        fused(code, source, blocks, row, row + k, row + k + 4 * blocks, c)
                    else:
                        for b in range(0, blocks, per_chunk):
                            size = min(per_chunk, blocks - b)
                            unpack(code, source + b * nbytes, panel, size)
                            tiles(panel, size, row, stride, b * block, k, c, count)
                    before = added + first * added_stride if added != 0 else 0
                    to = y + first * y_stride
                    _finish(c, count, to, y_stride, bias, before, added_stride, g * GROUP, n)
            group = next_chunk(p) * per

    return integer


@cache
def _float(name: str, many: int) -> Kernel:
    """The kernel for float activations; ``many``: tokens of a tile."""
    form = FORMATS[name]
    code, block, nbytes = form.code, form.block, form.nbytes
    plain, as_is = block == 1, name == "f32"

    def one(tokens):
        @helper
        def run(left, panel, size, row, stride, at, k, c):
            tile_float(tokens, left, panel, size, row + 4 * at, stride, c)

        return run

    tiles = _each_tile(f"float_{name}", many, one)

    @helper
    def multiply(source, row, stride, size, panel, at, k, c, count):
        if plain and count == 1:
            fused_float(code, source, size, row + 4 * at, c)
        elif as_is:
            tiles(source, size, row, stride, at, k, c, count)
        else:
            unpack_float(code, source, panel, size // block)
            tiles(panel, size, row, stride, at, k, c, count)

    @kernel(key=("float", name, many))
    def floating(p, thread, threads):
        x, stride, w, bias, y, y_stride, added, added_stride, live, n, k, per = args(p, 12)
        tokens, groups = load_i64(live), (n + GROUP - 1) // GROUP
        panel = workspace(_FLOAT_ROOM)
        c = panel + FLOAT_PANEL
        group = next_chunk(p) * per
        while tokens > 0 and group < groups:
            for g in range(group, min(group + per, groups)):
                source = w + g * (k // block) * nbytes
                for first in range(0, tokens, TOKENS):
                    count, row = min(TOKENS, tokens - first), x + first * stride
                    _clear(c, count)
                    for at in range(0, k, CHUNK):
                        here, size = source + at // block * nbytes, min(CHUNK, k - at)
                        multiply(here, row, stride, size, panel, at, k, c, count)
                    before = added + first * added_stride if added != 0 else 0
                    to = y + first * y_stride
                    _finish(c, count, to, y_stride, bias, before, added_stride, g * GROUP, n)
            group = next_chunk(p) * per

    return floating


# ------------------------------------------------------------------------------------ registration


def launch(
    site: Site, x: Spot, w: Spot, bias: Spot | None, out: Spot, added: Spot | None = None,
    joined: bool = False,
) -> Launch:  # fmt: skip
    """out = added + x w^T + bias: one linear, or one of several of a fused step."""
    n, k = w.meta.bound().shape
    assert isinstance(n, int) and isinstance(k, int)
    groups = max(1, -(-n // GROUP))
    group_bytes = max(1, packed_bytes(w.meta) // groups)
    per = max(1, min(groups // (_TICKETS * site.threads), _TICKET_BYTES // group_bytes))
    words = [
        x.address, x.row_stride, w.address, bias.address if bias else 0, out.address,
        out.row_stride, *((added.address, added.row_stride) if added else (0, 0)),
        site.live(x.meta.rows), n, k, per,
    ]  # fmt: skip
    make = _float if x.dtype == F32 else _integer
    return Launch(make(w.dtype.name, _tile_tokens()), words, joined)


def activation(w: DType) -> str:
    """The quantised activations that the weight's format is multiplied with."""
    return "a8_32" if w.block == 32 else "a8_256"


def _integer_when(node: Tensor, options: Options) -> str | None:
    x, w = node.src[:2]
    assert x is not None and w is not None
    if x.dtype == F32:
        return "linear is float" if options.linear == "float" else None
    return None if x.dtype.name == activation(w.dtype) else f"x is {x.dtype}, w {w.dtype}"


def _quantised(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    if x is not None and w is not None and x.dtype == F32:
        x = ops.quantise_act(x, dtype=activation(w.dtype))
    return (x, w, *rest)


_BLOCKS = tuple(name for name, form in FORMATS.items() if form.block > 1)
RULES: dict[str, Any] = {"layout": {"x": ROWS}, "pack": {"w": pack}}


@BACKEND.kernel("linear", name="linear_float", dtypes={"x": "f32", "w": tuple(FORMATS)}, **RULES)
@BACKEND.kernel(
    "linear", name="linear_integer", dtypes={"x": ("f32", "a8_32", "a8_256"), "w": _BLOCKS},
    when=_integer_when, lower=_quantised, **RULES,
)  # fmt: skip
def linear(site: Site) -> Launch:
    """Integer, which is asked first, or float."""
    return launch(site, site.x, site.w, site.op("bias"), site.out)
