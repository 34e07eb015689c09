"""The inner loops of linear: one group of 16 weight rows against some tokens.

For several tokens a chunk of 256 columns is unpacked once into a panel in the first-level cache,
and tiles of tokens run over the panel. For one token unpacking and multiplying are fused, so that
each weight byte goes straight from memory into a register. Both ways, and any number of tokens in a
tile, do the same float operations in the same order for each result: bits do not depend on company.

Results are accumulated at ``c``: f32 [tokens][16]. Activations lie in rows of ``stride`` bytes;
``q``, ``d`` and ``s`` are where the first token's int8 values, scales and sums begin (the row's
layout: `graphllm.dtype`). All arguments are int64; those that choose what is emitted are literals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from .formats import BY_CODE, Block32, BlockK, Format
from .simd import F32, F32S, I8, I32, I64, VECTOR, Emit, Value

CHUNK = 256  # columns between two visits to c
AHEAD = 8192  # bytes to prefetch ahead: about what arrives while one line is on its way
_BLOCK32_PANEL = 10 * VECTOR  # 8 vectors of q, d, and m where there is one
_K_WORDS = 64 * VECTOR  # of a super-block's panel; scales, offsets, factors follow
PANEL = _K_WORDS + (16 + 8 + 2) * VECTOR
FLOAT_PANEL = CHUNK * VECTOR


def _emitted(literals: tuple[Any, ...], values: int, emit: Callable[..., None]) -> Any:
    """What an intrinsic returns: ``emit(Emit, *numbers of the literals, *values)``."""
    if not all(isinstance(v, types.IntegerLiteral) for v in literals):
        raise RequireLiteralValue("what a microkernel emits is chosen by literal integers")
    numbers = [v.literal_value for v in literals]

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        emit(Emit(builder), *numbers, *given[len(literals) :])
        return context.get_dummy_value()

    return types.none(*literals, *[types.int64] * values), generate


@intrinsic(prefer_literal=True)
def unpack(typingctx, fmt, w, panel, blocks):
    """Blocks of an integer format, at most `CHUNK` columns, into a panel for `tile`."""
    return _emitted((fmt,), 3, _unpack)


@intrinsic(prefer_literal=True)
def tile(typingctx, fmt, tokens, left, panel, blocks, q, d, s, stride, c):
    """c += panel times quantised activations of ``tokens`` tokens, or ``left`` if those are fewer.

    c has room for all of them; what it gets for missing ones means nothing.
    """
    return _emitted((fmt, tokens), 8, _tile)


@intrinsic(prefer_literal=True)
def fused(typingctx, fmt, w, blocks, q, d, s, c):
    """c += blocks of an integer format times one token's quantised activations."""
    return _emitted((fmt,), 6, _fused)


@intrinsic(prefer_literal=True)
def unpack_float(typingctx, fmt, w, panel, blocks):
    """Blocks of any format, at most `CHUNK` columns, as f32 [k][16] for `tile_float`."""
    return _emitted((fmt,), 3, _unpack_float)


@intrinsic(prefer_literal=True)
def tile_float(typingctx, tokens, left, panel, columns, x, stride, c):
    """c += panel times float activations; see `tile`."""
    return _emitted((tokens,), 6, _tile_float)


@intrinsic(prefer_literal=True)
def fused_float(typingctx, fmt, w, columns, x, c):
    """c += at most `CHUNK` columns of a plain format times one token's float activations."""
    return _emitted((fmt,), 4, _fused_float)


@intrinsic(prefer_literal=True)
def workspace(typingctx, nbytes):
    """The address of so many bytes on the stack, aligned to a vector."""
    if not isinstance(nbytes, types.IntegerLiteral):
        raise RequireLiteralValue("a workspace has a literal size")
    size = nbytes.literal_value

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        with builder.goto_entry_block():
            # Not Numba's alloca_once: that stores zeros, byte by byte in the end.
            area = builder.alloca(ir.ArrayType(I8, size))
        area.align = VECTOR
        return builder.ptrtoint(area, I64)

    return types.int64(nbytes), generate


def _prefetch(e: Emit, w: Value, nbytes: int) -> None:
    for line in range(0, nbytes, VECTOR):
        e.prefetch(w, AHEAD + line)


def _pairs(e: Emit, words: list[Value], x: Value, offset: int = 0) -> list[tuple[Value, Value]]:
    """Vectors of weights, each with its four activations from ``x`` on."""
    return [(word, e.all_i32(x, offset + 4 * j)) for j, word in enumerate(words)]


def _starts(e: Emit, tokens: int, left: Value, stride: Value) -> list[Value]:
    """The byte offset of each token's row; a missing token reads the first one's."""
    none, starts = e.count(0), [e.count(0)]
    for t in range(1, tokens):
        exists = e.b.icmp_signed("<", e.count(t), left)
        starts.append(e.b.select(exists, e.times(stride, t), none))
    return starts


def _add_block32(
    e: Emit, f: Block32, acc: Value, dot: Value, factors: list[Value], d: Value, s: Value
) -> Value:
    """acc + (dot - offset * sum of activations) * (scale * the activations' scale), and then
    + m * (sum of activations * their scale) where there is an m."""
    if f.offset(e):
        moved = e.b.mul(e.all_i32(s), e.i32(f.offset(e)))
        dot = e.b.sub(dot, moved)
    acc = e.add(acc, e.mul(e.to_f32(dot), e.mul(factors[0], e.all_f32(d))))
    if not f.least:
        return acc
    total = e.mul(e.b.sitofp(e.load(s, I32), F32), e.load(d, F32))
    return e.add(acc, e.mul(factors[1], e.splat(total)))


# ------------------------------------------------------------------------------------ integer


def _unpack(e: Emit, code: int, w: Value, panel: Value, blocks: Value) -> None:
    f = BY_CODE[code]
    if isinstance(f, BlockK):
        return _unpack_k(e, f, w, panel)
    with e.loop(blocks) as loop:
        source = e.at(w, e.times(loop.index, f.nbytes))
        target = e.at(panel, e.times(loop.index, _BLOCK32_PANEL))
        _prefetch(e, source, f.nbytes)
        for j, word in enumerate(f.words(e, source)):
            e.store(word, target, VECTOR * j)
        for j, factor in enumerate(f.factors(e, source)):
            e.store(factor, target, VECTOR * (8 + j))


def _unpack_k(e: Emit, f: BlockK, w: Value, panel: Value) -> None:
    _prefetch(e, w, f.nbytes)
    for k, words in f.parts(e, w):
        for j, word in enumerate(words):
            e.store(word, panel, VECTOR * (k * f.sub // 4 + j))
    rest = [*map(e.scale_form, f.scales(e, w)), *f.offsets(e, w), *f.factors(e, w)]
    for j, vector in enumerate(rest):
        e.store(vector, panel, _K_WORDS + VECTOR * j)


def _tile(
    e: Emit, code: int, tokens: int, left: Value, panel: Value, blocks: Value, q: Value, d: Value,
    s: Value, stride: Value, c: Value,
) -> None:  # fmt: skip
    f = BY_CODE[code]
    starts = _starts(e, tokens, left, stride)
    if isinstance(f, BlockK):
        return _tile_k(e, f, starts, panel, q, d, s, c)
    accs = [e.variable(e.load(c, F32S, VECTOR * t)) for t in range(tokens)]
    with e.loop(blocks) as loop:
        block = e.at(panel, e.times(loop.index, _BLOCK32_PANEL))
        quads, four = e.at(q, e.times(loop.index, 32)), e.times(loop.index, 4)
        words = [e.load(block, offset=VECTOR * j) for j in range(8)]
        factors = [e.load(block, F32S, VECTOR * (8 + j)) for j in range(1 + f.least)]
        for acc, start in zip(accs, starts):
            x = e.at(quads, start)
            dot = f.dot(e, words, [e.all_i32(x, 4 * j) for j in range(8)])
            at = [e.at(plane, four, start) for plane in (d, s)]
            e.set(acc, _add_block32(e, f, e.get(acc), dot, factors, *at))
    for t, acc in enumerate(accs):
        e.store(e.get(acc), c, VECTOR * t)


def _tile_k(
    e: Emit, f: BlockK, starts: list[Value], panel: Value, q: Value, d: Value, s: Value, c: Value
) -> None:
    totals = [e.variable(e.i32(0)) for _ in starts]
    per, subs = f.sub // 4, CHUNK // f.sub
    with e.loop(subs) as loop:
        block = e.at(panel, e.times(loop.index, VECTOR * per))
        scale = e.load(e.at(panel, e.times(loop.index, VECTOR)), offset=_K_WORDS)
        words = [e.load(block, offset=VECTOR * j) for j in range(per)]
        quads = e.at(q, e.times(loop.index, f.sub))
        for total, start in zip(totals, starts):
            pairs = _pairs(e, words, e.at(quads, start))
            e.set(total, e.dot_scaled(pairs, f.largest, scale, e.get(total)))
    rest = _K_WORDS + VECTOR * subs
    offsets = [e.load(panel, offset=rest + VECTOR * j) for j in range(8)]
    factors = [e.load(panel, F32S, rest + VECTOR * (8 + j)) for j in range(2)]
    for t, (total, start) in enumerate(zip(totals, starts)):
        acc = e.load(c, F32S, VECTOR * t)
        at = [e.at(plane, start) for plane in (d, s)]
        e.store(_add_k(e, f, acc, e.get(total), offsets, factors, *at), c, VECTOR * t)


def _add_k(
    e: Emit, f: BlockK, acc: Value, total: Value, offsets: list[Value], factors: list[Value],
    d: Value, s: Value,
) -> Value:  # fmt: skip
    """acc + a super-block's share."""
    moved = None
    for offset, sums in _pairs(e, offsets, s):
        moved = e.dot_pairs(offset, sums, moved)
    return e.add(acc, e.mul(f.join(e, total, moved, factors), e.all_f32(d)))


def _fused(
    e: Emit, code: int, w: Value, blocks: Value, q: Value, d: Value, s: Value, c: Value
) -> None:
    f = BY_CODE[code]
    acc = e.variable(e.load(c, F32S))
    sums = 4 if f.block == 32 else 32  # bytes of sums a block
    with e.loop(blocks) as loop:
        i = loop.index
        block, x = e.at(w, e.times(i, f.nbytes)), e.at(q, e.times(i, f.block))
        at = [e.at(d, e.times(i, 4)), e.at(s, e.times(i, sums))]
        _prefetch(e, block, f.nbytes)
        if isinstance(f, BlockK):
            total, scales = None, [e.scale_form(v) for v in f.scales(e, block)]
            for k, words in f.parts(e, block):
                pairs = _pairs(e, words, x, k * f.sub)
                total = e.dot_scaled(pairs, f.largest, scales[k], total)
            offsets, factors = f.offsets(e, block), f.factors(e, block)
            e.set(acc, _add_k(e, f, e.get(acc), total, offsets, factors, *at))
        else:
            dot = f.dot(e, f.words(e, block), [e.all_i32(x, 4 * j) for j in range(8)])
            e.set(acc, _add_block32(e, f, e.get(acc), dot, f.factors(e, block), *at))
    e.store(e.get(acc), c)


# -------------------------------------------------------------------------------------- float


def _steps(e: Emit, f: Format, blocks: Value, body: Callable[[Value, int], None]) -> None:
    """``body(first block, how many)`` over all blocks; plain formats by 8, then one by one."""
    by = 8 if f.block == 1 else 1
    whole = e.b.sdiv(blocks, e.count(by))
    with e.loop(whole) as loop:
        body(e.times(loop.index, by), by)
    if by > 1:
        done = e.times(whole, by)
        with e.loop(e.b.sub(blocks, done)) as loop:
            body(e.b.add(done, loop.index), 1)


def _unpack_float(e: Emit, code: int, w: Value, panel: Value, blocks: Value) -> None:
    f = BY_CODE[code]

    def body(first: Value, count: int) -> None:
        target = e.at(panel, e.times(first, f.block * VECTOR))
        source = e.at(w, e.times(first, f.nbytes))
        _prefetch(e, source, f.nbytes * count)
        for i in range(count):
            for k, value in f.values(e, e.at(source, i * f.nbytes)):
                e.store(value, target, VECTOR * (i + k))

    _steps(e, f, blocks, body)


def _tile_float(
    e: Emit, tokens: int, left: Value, panel: Value, columns: Value, x: Value, stride: Value,
    c: Value,
) -> None:  # fmt: skip
    starts = _starts(e, tokens, left, stride)
    accs = [e.variable(e.f32(0.0)) for _ in range(tokens)]

    def body(first: Value, count: int) -> None:
        weights = e.at(panel, e.times(first, VECTOR))
        row = e.at(x, e.times(first, 4))
        for k in range(count):
            weight = e.load(weights, F32S, VECTOR * k)
            for acc, start in zip(accs, starts):
                value = e.all_f32(e.at(row, start), 4 * k)
                e.set(acc, e.madd(weight, value, e.get(acc)))

    _steps(e, BY_CODE[0], columns, body)
    for t, acc in enumerate(accs):
        e.store(e.add(e.load(c, F32S, VECTOR * t), e.get(acc)), c, VECTOR * t)


def _fused_float(e: Emit, code: int, w: Value, columns: Value, x: Value, c: Value) -> None:
    f = BY_CODE[code]
    acc = e.variable(e.f32(0.0))

    def body(first: Value, count: int) -> None:
        source, row = e.at(w, e.times(first, f.nbytes)), e.at(x, e.times(first, 4))
        _prefetch(e, source, f.nbytes * count)
        for k in range(count):
            ((_, weight),) = f.values(e, e.at(source, k * f.nbytes))
            e.set(acc, e.madd(weight, e.all_f32(row, 4 * k), e.get(acc)))

    _steps(e, f, columns, body)
    e.store(e.add(e.load(c, F32S), e.get(acc)), c)


__all__ = ["AHEAD", "CHUNK", "FLOAT_PANEL", "PANEL", "fused", "fused_float", "tile",
           "tile_float", "unpack", "unpack_float", "workspace"]  # fmt: skip
