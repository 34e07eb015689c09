"""Turns the samples in the ops' declarations into arrays, graphs and expected results."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from graphllm import ops
from graphllm.formats import ACTIVATIONS, quantization
from graphllm.formats.quantization import Blocks
from graphllm.graph.dtype import dtype as dtype_of
from graphllm.graph.tensor import Dim, Tensor, Var, feed, state, weight
from graphllm.ops import Arg, OpDef, Sample

SPARE = 3  # rows of capacity beyond the largest live value, so that every run leaves some
PAD, SHIFT = 3, 1  # a strided operand is a slice of rows this much wider, beginning here
BEHIND = 64  # columns after those of a leading operand


@dataclass
class Case:
    """One sample with values. ``operands`` are what the NumPy body receives; ``feeds`` what the
    executor is fed, by leaf name; ``states`` the operands that are state, by name."""

    op: OpDef
    sample: Sample
    operands: list[Any]
    feeds: dict[str, np.ndarray]
    states: dict[str, int]

    def expected(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The body's result, and the states after it."""
        own = self.own_operands()
        result = self.op.reference(*own, **self.sample.attrs)
        written = self.op.writes(len(own)) if self.op.writes else ()
        if written:
            result = own[written[0]]
        return plain(result), {name: plain(own[i]) for name, i in self.states.items()}

    @cached_property
    def known(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`expected`, computed once for the tests of all backends; not to be written to."""
        return self.expected()

    def own_operands(self) -> list[Any]:
        """The operands, of the states copies: a body may write to them."""
        written = self.states.values()
        return [_copied(x) if i in written else x for i, x in enumerate(self.operands)]

    @property
    def tolerance(self) -> float:
        """By the first operand whose format has a tolerance of its own, else f32's; 0: exact."""
        kinds = (a.dtype.name for a in self.sample.args if a is not None)
        special = (self.op.tol[k] for k in kinds if k != "f32" and k in self.op.tol)
        return next(special, self.op.tol.get("f32", 0.0))


@dataclass
class Group:
    """Samples of one op that differ only in the values of their Vars: one graph, several runs."""

    op: OpDef
    name: str
    samples: list[Sample]
    weights: dict[str, np.ndarray | Blocks] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Arg | None, ...]:
        return self.samples[0].args

    @property
    def contiguous(self) -> bool:
        return all(a is None or a.layout == "contiguous" for a in self.args)

    @cached_property
    def node(self) -> Tensor:
        """The graph of the one op over its leaves."""
        src = [a and self._source(i, a) for i, a in enumerate(self.args)]
        return self.op.node(*src, **self.samples[0].attrs)

    @cached_property
    def cases(self) -> list[Case]:
        self._make_weights()
        return [self._case(sample) for sample in self.samples]

    # -- the graph
    def leaf(self, index: int) -> str:
        return f"{self.name}.{index}"

    def _dim(self, dim: int | str) -> Dim:
        if isinstance(dim, int):
            return dim
        return Var(dim, 0, max(s.env[dim] for s in self.samples) + SPARE)

    def _source(self, index: int, arg: Arg) -> Tensor:
        shape = tuple(map(self._dim, arg.shape))
        stored = _stored_shape(shape, arg.layout)
        make = {"input": feed, "state": state, "weight": weight}[arg.leaf]
        if arg.dtype in ACTIVATIONS:  # fed as floats and quantised in the graph
            return ops.quantise_act(feed(self.leaf(index), stored, "f32"), dtype=arg.dtype.name)
        leaf = make(self.leaf(index), stored, arg.dtype)
        if arg.layout == "strided":
            return leaf.slice(-1, SHIFT, SHIFT + shape[-1])
        if arg.layout == "leading":
            return leaf.slice(-1, 0, shape[-1])  # type: ignore[arg-type]
        if arg.layout == "permuted":
            return leaf.permute(0, *range(len(shape) - 1, 0, -1))
        return leaf.expand(*shape) if arg.layout == "expanded" else leaf

    # -- the values
    def _make_weights(self) -> None:
        rng = _rng(self.name)
        for index, arg in enumerate(self.args):
            if arg is not None and arg.leaf == "weight":
                self.weights[self.leaf(index)] = _values(arg, arg.shape, rng)  # type: ignore[arg-type]

    def _case(self, sample: Sample) -> Case:
        rng = _rng(f"{self.name} {sample.label}")
        case = Case(self.op, sample, [], {}, {})
        for index, arg in enumerate(sample.args):
            if arg is None:
                case.operands.append(None)
                continue
            name = self.leaf(index)
            shape = tuple(sample.env.get(d, d) for d in arg.shape)
            if arg.leaf == "weight":
                stored = self.weights[name]
            else:
                stored = _values(arg, _stored_shape(shape, arg.layout), rng)
                case.feeds[name] = plain(stored)
            if arg.leaf == "state":
                case.states[name] = index
            if arg.dtype in ACTIVATIONS:
                stored = ops.get("quantise_act").reference(stored, dtype=arg.dtype)
            case.operands.append(_viewed(stored, shape, arg.layout))
        return case


def groups(op: OpDef) -> list[Group]:
    """The op's samples by graph."""
    found: dict[object, list[Sample]] = defaultdict(list)
    for sample in op.samples:
        args = tuple(a and (a.shape, a.dtype, a.layout, a.leaf) for a in sample.args)
        found[args, tuple(sorted(sample.attrs.items()))].append(sample)
    return [Group(op, f"{op.name}{i}", samples) for i, samples in enumerate(found.values())]


def cases(name: str) -> Iterable[Case]:
    for group in groups(ops.get(name)):
        yield from group.cases


def plain(value: Any) -> np.ndarray:
    """An operand or result as an array; blocks as their bytes, [rows, n]."""
    return value.rows() if isinstance(value, Blocks) else value


def _copied(value: Any) -> Any:
    if isinstance(value, Blocks):
        return Blocks(value.raw.copy(), value.dtype, value.elements)
    return value.copy()


def mismatch(got: np.ndarray, want: np.ndarray, tolerance: float) -> str:
    """Words about the first difference, empty when there is none beyond ``tolerance``.

    ``tolerance`` is relative above one and absolute below it: samples keep values near one.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if got.dtype.kind in "iu":
        wrong = got != want
    else:
        a, b = got.astype(np.float64), want.astype(np.float64)
        with np.errstate(invalid="ignore"):
            close = np.abs(a - b) <= tolerance * np.maximum(1, np.abs(b))
        wrong = ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{wrong.sum()} of {wrong.size} wrong, first at {at}: {got[at]}, not {want[at]}"


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _stored_shape(shape: tuple, layout: str) -> tuple:
    if layout == "strided":
        return (*shape[:-1], shape[-1] + PAD)
    if layout == "leading":
        return (*shape[:-1], shape[-1] + BEHIND)
    if layout == "permuted":
        return (shape[0], *shape[:0:-1])
    return (shape[0], 1, *shape[2:]) if layout == "expanded" else shape


def _viewed(stored: Any, shape: tuple[int, ...], layout: str) -> Any:
    if layout == "strided":
        return stored[..., SHIFT : SHIFT + shape[-1]]
    if layout == "leading":
        return _leading(stored, shape)
    if layout == "permuted":
        return stored.transpose(0, *range(len(shape) - 1, 0, -1))
    return np.broadcast_to(stored, shape) if layout == "expanded" else stored


def _leading(stored: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(stored, Blocks):
        return stored[..., : shape[-1]]
    raw = stored.raw[..., : stored.dtype.row_nbytes(shape[-1])]
    return Blocks(raw, stored.dtype, shape[-1])


def _values(arg: Arg, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Values of ``arg`` in its dtype; in a wider row than the operand's, around it, NaN or 99."""
    kind = dtype_of("f32") if arg.dtype in ACTIVATIONS else arg.dtype
    inner = shape
    if arg.layout == "strided":
        inner = (*shape[:-1], shape[-1] - PAD)
    make = arg.make or (
        (lambda g, s: g.standard_normal(s))
        if kind.numpy is None or kind.numpy.kind not in "iu"
        else (lambda g, s: g.integers(0, 50, s))
    )
    with np.errstate(over="ignore"):
        values = np.asarray(make(rng, inner))
        assert values.shape == inner, f"make gave {values.shape} for {inner}"
        if kind.numpy is None:
            raw = quantization.quantise(values.astype(np.float32).reshape(-1, inner[-1]), kind)
            return Blocks(raw.reshape(*inner[:-1], -1), kind, inner[-1])
        values = np.asarray(values.astype(kind.numpy), order="C")
    if arg.layout != "strided":
        return values
    wide = np.full(shape, 99 if kind.numpy.kind in "iu" else np.nan, kind.numpy)
    _viewed(wide, inner, "strided")[...] = values
    return wide
