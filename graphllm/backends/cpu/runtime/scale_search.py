"""The search of `graphllm.formats.scale_search`, bit for bit, with a run of elements per lane.

It is no kernel of an op, so it does not belong to `kernels`, whose modules each start imports.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ....formats.scale_search import FIXED, MARGIN, ScaleSearch
from ..formats.encoder import ROUND, BlockEncoder
from ..simd.emitter import F32S, LANES, VECTOR, Value
from .argument_block import argument_reader, argument_words
from .jit import HEADER_WORDS, Kernel, f32s, kernel
from .lazy_numba import intrinsic, types
from .thread_pool import native

Array = np.ndarray


class SearchEmitter(BlockEncoder):
    """Emits the search for 16 runs, whose elements ``i`` are vector ``i`` of transposed arrays."""

    def divide(self, x: Value, y: Value) -> Value:
        return self.b.fdiv(x, y, flags=("nsz",))

    def sqrt(self, x: Value) -> Value:
        return self._call("llvm.sqrt.v16f32", F32S, x)

    def less(self, x: Value, y: Value) -> Value:
        return self.b.fcmp_ordered("<", x, y)

    def clipped(self, x: Value, low: float, high: float) -> Value:
        """The nearest integer within low..high, as float32."""
        x = self.b.select(self.less(x, self.f32(low)), self.f32(low), x)
        x = self.b.select(self.less(self.f32(high), x), self.f32(high), x)
        return self.sub(self.add(x, self.f32(ROUND)), self.f32(ROUND))

    def look_up(self, x: Value, values: tuple[int, ...]) -> Value:
        """The nearest of ``values``, which ascend; the lower one at a tie."""
        found = self.f32(values[0])
        for low, high in pairwise(values):
            above = self.less(self.f32((low + high) / 2), x)
            found = self.b.select(above, self.f32(high), found)
        return found

    def total(self, at: Value, run: int) -> Value:
        """Sum of a transposed array's vectors, in order."""
        found = self.f32(0.0)
        for i in range(run):
            found = self.add(found, self.load_f32(at, VECTOR * i))
        return found

    def block_totals(self, x: Value, runs: int) -> Value:
        """In each lane, the sum over the lanes of its block, in order."""
        found = self.f32(0.0)
        for k in range(runs):
            lanes = [lane // runs * runs + k for lane in range(LANES)]
            found = self.add(found, self.select_lanes(x, lanes))
        return found


def _emit_weights(e: SearchEmitter, form: ScaleSearch, runs: int, x: Value, w: Value) -> None:
    """Replace the importance at ``w`` (none if ``runs`` is 0) by the weights; see
    `graphllm.formats.scale_search.element_weights`."""
    squares = e.f32(0.0)
    for i in range(form.run):
        value = e.load_f32(x, VECTOR * i)
        squares = e.add(squares, e.mul(value, value))
    if runs:
        factor = float(np.float32(form.variance / (form.run * runs)))
        squares = e.mul(e.block_totals(squares, runs), e.f32(factor))
    else:
        squares = e.sqrt(e.mul(squares, e.f32(1 / form.run)))
    for i in range(form.run):
        value = e.load_f32(x, VECTOR * i)
        if runs and not form.variance:
            continue
        if runs:
            root = e.sqrt(e.add(squares, e.mul(value, value)))
            found = e.mul(e.load_f32(w, VECTOR * i), root)
        elif form.weighting == "square":
            found = e.mul(value, value)
        else:
            found = e.magnitude(value)
            found = e.add(found, squares) if form.weighting == "mean" else found
        e.store(found, w, VECTOR * i)


def _emit_span(e: SearchEmitter, form: ScaleSearch, x: Value, w: Value, shifts: Value) -> Any:
    least, highest, sum_x = e.f32(0.0), e.load_f32(x), e.f32(0.0)
    for i in range(form.run):
        value = e.load_f32(x, VECTOR * i)
        least = e.b.select(e.less(value, least), value, least)
        highest = e.b.select(e.less(highest, value), value, highest)
        sum_x = e.add(sum_x, e.mul(e.load_f32(w, VECTOR * i), value))
    sum_w = e.total(w, form.run)
    scale = e.variable(e.divide(e.sub(highest, least), e.f32(float(form.high))))
    minimum, best = e.variable(least), e.variable(e.f32(float("-inf")))
    with e.loop(len(form.shifts)) as loop:
        is_fixed = e.b.icmp_signed("<", loop.index, e.count(FIXED))
        low = e.b.select(is_fixed, least, e.get(minimum))
        steps = e.add(
            e.f32(float(form.high)), e.broadcast_f32(e.at(shifts, e.times(loop.index, 4)))
        )
        factor = e.divide(steps, e.sub(highest, low))
        sum_l = sum_l2 = sum_xl = e.f32(0.0)
        for i in range(form.run):
            value = e.load_f32(x, VECTOR * i)
            level = e.clipped(e.mul(e.sub(value, low), factor), 0.0, float(form.high))
            term = e.mul(e.load_f32(w, VECTOR * i), level)
            sum_l = e.add(sum_l, term)
            sum_l2 = e.add(sum_l2, e.mul(term, level))
            sum_xl = e.add(sum_xl, e.mul(term, value))
        det = e.sub(e.mul(sum_w, sum_l2), e.mul(sum_l, sum_l))
        low = e.divide(e.sub(e.mul(sum_l2, sum_x), e.mul(sum_l, sum_xl)), det)
        step = e.divide(e.sub(e.mul(sum_w, sum_xl), e.mul(sum_x, sum_l)), det)
        positive = e.less(e.f32(0.0), low)
        step = e.b.select(positive, e.divide(sum_xl, sum_l2), step)
        low = e.b.select(positive, e.f32(0.0), low)
        score = e.add(e.mul(step, sum_xl), e.mul(low, sum_x))
        better = e.b.and_(e.less(e.f32(0.0), det), e.less(e.mul(e.get(best), e.f32(MARGIN)), score))
        for place, found in ((scale, step), (minimum, low), (best, score)):
            e.set(place, e.b.select(better, found, e.get(place)))
    return e.get(scale), e.get(minimum)


def _emit_symmetric(e: SearchEmitter, form: ScaleSearch, x: Value, w: Value, shifts: Value) -> Any:
    extreme, first = e.load_f32(x), e.f32(float(form.values[0] if form.values else form.low))
    for i in range(1, form.run):
        extreme = e.larger(extreme, e.load_f32(x, VECTOR * i))
    scale, best = e.variable(e.divide(extreme, first)), e.variable(e.f32(0.0))
    with e.loop(len(form.shifts)) as loop:
        steps = e.add(first, e.broadcast_f32(e.at(shifts, e.times(loop.index, 4))))
        factor = e.divide(steps, extreme)
        sum_l2 = sum_xl = e.f32(0.0)
        for i in range(form.run):
            value = e.load_f32(x, VECTOR * i)
            level = e.mul(value, factor)
            if form.values:
                level = e.look_up(level, form.values)
            else:
                level = e.clipped(level, float(form.low), float(form.high))
            term = e.mul(e.load_f32(w, VECTOR * i), level)
            sum_l2 = e.add(sum_l2, e.mul(term, level))
            sum_xl = e.add(sum_xl, e.mul(term, value))
        least = e.mul(e.mul(e.get(best), e.f32(MARGIN)), sum_l2)
        more = e.less(least, e.mul(sum_xl, sum_xl))
        better = e.b.and_(e.less(e.f32(0.0), sum_l2), more)
        step = e.divide(sum_xl, sum_l2)
        e.set(scale, e.b.select(better, step, e.get(scale)))
        e.set(best, e.b.select(better, e.mul(step, sum_xl), e.get(best)))
    return e.get(scale), e.f32(0.0)


def _search_runs(form: ScaleSearch, runs: int) -> Any:
    """Make an intrinsic that searches 16 runs.

    Its arguments are addresses: transposed elements and importance, shifts, and results, which are
    vectors of scales, minima and total weights. ``runs``: runs of a block, 0 without importance.
    """

    @intrinsic
    def search(typingctx, x, w, shifts, y):
        def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
            e = SearchEmitter(builder)
            x, w, shifts, y = given
            _emit_weights(e, form, runs, x, w)
            emit = _emit_span if form.minimum else _emit_symmetric
            scale, minimum = emit(e, form, x, w, shifts)
            for i, found in enumerate((scale, minimum, e.total(w, form.run))):
                e.store(found, y, VECTOR * i)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 4), generate

    return search


class SearchArgs(NamedTuple):
    """Argument block of `search_kernel`: elements float32 [groups of 16 runs, 16, run]."""

    x: int
    importance: int  # float32 [runs_per_row, run]; 0 if there is none
    runs_per_row: int
    groups: int
    shifts: int
    scratch: int  # two transposed groups
    y: int  # float32 [groups, 3, 16]


_read = argument_reader(SearchArgs)


@cache
def search_kernel(form: ScaleSearch, runs: int) -> Kernel:
    """Make the kernel of a search. ``runs``: runs of a block, 0 without importance."""
    run, search = form.run, _search_runs(form, runs)

    @kernel(key=(repr(form), runs))
    def search_scales(p, thread, threads):
        a = _read(p)
        weights = a.scratch + run * VECTOR
        xs, ws = f32s(a.scratch), f32s(weights)
        for group in range(a.groups):
            for lane in range(LANES):
                index = group * LANES + lane
                source = f32s(a.x + 4 * run * index)
                for i in range(run):
                    xs[i * LANES + lane] = source[i]
                if a.importance != 0:
                    source = f32s(a.importance + 4 * run * (index % a.runs_per_row))
                    for i in range(run):
                        ws[i * LANES + lane] = source[i]
            search(a.scratch, weights, a.shifts, a.y + group * 3 * VECTOR)

    return search_scales


def search_scales(
    x: Array, importance: Array | None, form: ScaleSearch, block: int
) -> tuple[Array, Array, Array]:
    """As `graphllm.formats.scale_search.search_scales`, releasing the interpreter lock.

    Args:
        x: float32 [rows, K], contiguous and finite.
        importance: float32 [K], or None.
        form: the search of a format.
        block: elements of a block.

    Returns:
        Scales, minima and total weights, float32 [blocks, runs of a block] each.
    """
    runs, per_group = x.size // form.run, LANES * form.run
    groups = -(-runs // LANES)
    if x.size % per_group:
        x = np.concatenate([x.reshape(-1), np.zeros(groups * per_group - x.size, np.float32)])
    shifts = np.array(form.shifts, np.float32)
    scratch = np.empty(2 * per_group, np.float32)
    found = np.empty((groups, 3, LANES), np.float32)
    args = SearchArgs(
        x=x.ctypes.data,
        importance=0 if importance is None else importance.ctypes.data,
        runs_per_row=1 if importance is None else importance.size // form.run,
        groups=groups,
        shifts=shifts.ctypes.data,
        scratch=scratch.ctypes.data,
        y=found.ctypes.data,
    )
    words = np.array([0] * HEADER_WORDS + argument_words(args), np.int64)
    per_block = block // form.run
    made = search_kernel(form, 0 if importance is None else per_block)
    native(made)(words.ctypes.data + 8 * HEADER_WORDS, 0, 1)
    results = (found[:, i].reshape(-1)[:runs].reshape(-1, per_block) for i in range(3))
    scale, minimum, weights = results
    return scale, minimum, weights
