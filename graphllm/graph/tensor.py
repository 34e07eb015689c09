"""Nodes of the lazy graph: shape, strides, dtype, op and operands, but no data.

Shapes count elements; strides count bytes, as ``nb`` in ggml. For a block-quantised dtype the last
stride is the size of one block. Axis 0 may be a `Var`, whose value is known only at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from ..errors import GraphError
from .dtype import DType, dtype
from .scopes import current_scope, error_location, find_origin, record_result
from .scopes import scope as scope  # for model files

VIEW = "view"
INPUT, STATE, WEIGHT = LEAVES = ("input", "state", "weight")


@dataclass(frozen=True)
class Var:
    """A dimension that varies from run to run, within ``lo..hi``. Compared by name and range."""

    name: str
    lo: int
    hi: int

    def __repr__(self) -> str:
        return self.name


Dim = int | Var
Env = Mapping[str, int]


def live(dim: Dim, env: Env) -> int:
    """Return the value of ``dim`` in a run with the live values ``env``."""
    return env[dim.name] if isinstance(dim, Var) else dim


@dataclass(frozen=True)
class Meta:
    """Shape (elements), dtype, strides and offset (bytes) of a tensor."""

    shape: tuple[Dim, ...]
    dtype: DType
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, shape: tuple[Dim, ...], kind: DType | str) -> Meta:
        """Return a contiguous Meta. GraphError unless only axis 0 is a Var and blocks are whole."""
        if any(isinstance(d, Var) for d in shape[1:]):
            raise GraphError(f"only axis 0 may vary, got shape {shape}")
        if any(isinstance(d, int) and d < 0 for d in shape):
            raise GraphError(f"negative dimension in shape {shape}")
        kind = dtype(kind)
        if not shape:
            return cls((), kind, ())
        strides = [kind.nbytes]
        if len(shape) > 1:
            strides.insert(0, kind.row_nbytes(shape[-1]))  # type: ignore[arg-type]
            for d in reversed(shape[1:-1]):
                strides.insert(0, strides[0] * d)  # type: ignore[operator]
        elif kind.block > 1 and isinstance(shape[0], int):
            kind.row_nbytes(shape[0])
        return cls(tuple(shape), kind, tuple(strides))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def rows(self) -> Dim:
        """The leading dimension (1 for a scalar)."""
        return self.shape[0] if self.shape else 1

    @property
    def inner(self) -> tuple[int, ...]:
        """All dimensions but the first; none of them is a Var."""
        return self.shape[1:]  # type: ignore[return-value]

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of a Meta without a Var (see `at` and `bound`)."""
        return self.shape  # type: ignore[return-value]

    @cached_property
    def inner_contiguous(self) -> bool:
        """Whether each row (all axes but the first) is contiguous, whatever the row stride."""
        return self._dense(1)

    @cached_property
    def contiguous(self) -> bool:
        return self._dense(0)

    def _dense(self, first: int) -> bool:
        dense = Meta.of(self.shape, self.dtype).strides
        return self.strides == dense or all(
            have == want or self.shape[axis] == 1
            for axis, (have, want) in enumerate(zip(self.strides, dense))
            if axis >= first
        )

    def at(self, env: Env) -> Meta:
        """Return this Meta with the live value of its Var."""
        if not self.shape or not isinstance(self.shape[0], Var):
            return self
        return Meta((live(self.shape[0], env), *self.inner), self.dtype, self.strides, self.offset)

    def bound(self) -> Meta:
        """Return this Meta at the upper bound of its Var."""
        if not self.shape or not isinstance(self.shape[0], Var):
            return self
        return Meta((self.shape[0].hi, *self.inner), self.dtype, self.strides, self.offset)

    @property
    def size(self) -> int:
        """Number of elements. GraphError if the shape has a Var (see `at` and `bound`)."""
        if self.shape and isinstance(self.shape[0], Var):
            raise GraphError(f"size of {self.shape} needs the value of {self.shape[0]}")
        return prod(self.shape)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without gaps between them; not defined for a shape with a Var."""
        *rows, elements = self.dims or (1,)
        return prod(rows) * self.dtype.row_nbytes(elements)

    def __str__(self) -> str:
        dims = ",".join(str(d) for d in self.shape)
        return f"{self.dtype}[{dims}]"


# ----------------------------------------------------------------------------------------- nodes


class Tensor:
    """One node: an op, a leaf or a view.

    Nodes compare by identity, and tables are keyed by nodes rather than by `id`: a key keeps its
    node alive, whereas the id of a deleted node may be reused.

    Attributes:
        op: name of the op, or "input", "state", "weight" or "view".
        src: operands; None where an optional one is omitted.
        attrs: attributes.
        meta: shape, dtype and strides of the result.
        scopes: scopes that created the node: one, or several after equal nodes were merged.
        origin: model file and line.
    """

    __slots__ = ("__weakref__", "attrs", "meta", "op", "origin", "scopes", "src")

    def __init__(
        self,
        op: str,
        src: tuple[Tensor | None, ...],
        attrs: dict[str, Any],
        meta: Meta,
        scopes: tuple[str, ...] | None = None,
        origin: str | None = None,
    ) -> None:
        self.op = op
        self.src = src
        self.attrs = attrs
        self.meta = meta
        self.scopes = (current_scope(),) if scopes is None else scopes
        self.origin = find_origin() if origin is None else origin
        if op not in LEAVES and isinstance(meta.rows, Var):
            record_result(self)

    # -- properties
    @property
    def scope(self) -> str:
        return self.scopes[0] if self.scopes else ""

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.meta.shape

    @property
    def dtype(self) -> DType:
        return self.meta.dtype

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    @property
    def is_view(self) -> bool:
        return self.op == VIEW

    @property
    def name(self) -> str:
        """Name of a leaf: an input, a state or a weight."""
        return self.attrs["name"]

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Operands that are not omitted."""
        return tuple(filter(None, self.src))

    @property
    def base(self) -> Tensor:
        """The node itself, or for a view the node whose buffer it views."""
        node = self
        while node.is_view:
            node = node.src[0]  # type: ignore[assignment]
        return node

    def __repr__(self) -> str:
        label = self.attrs["name"] if self.is_leaf else self.op
        return f"<{label} {self.meta} {self.scope}>"

    # -- views, which change only the Meta
    def _refused(self, view: str, why: str) -> GraphError:
        """Return the error for an impossible view."""
        return GraphError(f"{error_location()}: {view}({self.meta}): {why}")

    def _view(self, shape: tuple[Dim, ...], strides: tuple[int, ...], offset: int = 0) -> Tensor:
        meta = Meta(shape, self.dtype, strides, self.meta.offset + offset)
        return Tensor(VIEW, (self,), {"shape": shape, "strides": strides, "offset": offset}, meta)

    def reshape(self, *shape: Dim) -> Tensor:
        """Return the same elements in another shape; a varying axis 0 must stay.

        The result is a view if the strides allow it, else a view of a contiguous copy.
        """
        try:
            strides = _reshaped_strides(self.meta, shape)
        except GraphError as error:
            raise self._refused("reshape", str(error)) from None
        if strides is not None:
            return self._view(shape, strides)
        return _contiguous_op[-1](self).reshape(*shape)

    def heads(self, count: int) -> Tensor:
        """[T, count * D] -> [T, count, D]."""
        width = self.shape[-1]
        if not isinstance(width, int) or width % count:
            raise self._refused("heads", f"{width} columns do not split into {count} heads")
        return self.reshape(*self.shape[:-1], count, width // count)

    def flatten(self) -> Tensor:
        """[T, A, B, ...] -> [T, A * B * ...]."""
        return self.reshape(self.shape[0], prod(self.meta.inner))

    def permute(self, *axes: int) -> Tensor:
        """Reorder axes; a varying axis 0 must stay first."""
        if sorted(axes) != list(range(self.meta.ndim)):
            raise self._refused("permute", f"{axes} is not a permutation of {self.meta.ndim} axes")
        if isinstance(self.shape[0], Var) and axes[0] != 0:
            raise self._refused("permute", "a varying axis 0 cannot move")
        if self.dtype.block > 1 and axes[-1] != self.meta.ndim - 1:
            raise self._refused("permute", "the last axis of a block format cannot move")
        return self._view(
            tuple(self.shape[a] for a in axes), tuple(self.meta.strides[a] for a in axes)
        )

    def slice(self, axis: int, start: int, stop: int) -> Tensor:
        """Return elements ``start:stop`` of an axis that does not vary."""
        if not -self.meta.ndim <= axis < self.meta.ndim:
            raise self._refused("slice", f"there is no axis {axis}")
        axis %= self.meta.ndim
        width = self.shape[axis]
        if isinstance(width, Var):
            raise self._refused("slice", "a varying axis cannot be sliced")
        if not 0 <= start <= stop <= width:
            raise self._refused("slice", f"{start}:{stop} is not within axis {axis} of {width}")
        unit = (width or 1) if self.dtype.tail else self.dtype.block
        block = unit if axis == self.meta.ndim - 1 else 1
        if start % block or stop % block:
            raise self._refused("slice", f"{start}:{stop} cuts a {self.dtype} block of {block}")
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return self._view(shape, self.meta.strides, start // block * self.meta.strides[axis])

    def expand(self, *shape: Dim) -> Tensor:
        """Repeat axes of one element (stride 0), like `numpy.broadcast_to`."""
        fits = len(shape) == self.meta.ndim
        if not fits or any(h not in (w, 1) for h, w in zip(self.shape, shape)):
            raise self._refused(
                "expand", f"only axes of one element can repeat; cannot become {shape}"
            )
        strides = []
        for have, want, stride in zip(self.shape, shape, self.meta.strides):
            strides.append(stride if have == want else 0)
        return self._view(tuple(shape), tuple(strides))


_contiguous_op: list[Callable[[Tensor], Tensor]] = []


def set_contiguous_op(build: Callable[[Tensor], Tensor]) -> None:
    """Set the op that `Tensor.reshape` inserts where a view is impossible."""
    _contiguous_op[:] = [build]


def _reshaped_strides(meta: Meta, shape: tuple[Dim, ...]) -> tuple[int, ...] | None:
    """Return strides of ``shape`` over the same memory; None if that needs a copy."""
    old, new = list(zip(meta.shape, meta.strides)), list(shape)
    head: list[int] = []
    same_rows = bool(old and new) and old[0][0] == new[0]
    if same_rows and (isinstance(new[0], Var) or min(len(old), len(new)) > 1):
        head, old, new = [old[0][1]], old[1:], new[1:]
    sizes = [d for d, _ in old], new
    if any(isinstance(d, Var) for side in sizes for d in side):
        if [d for d, _ in old] != new:
            raise GraphError(f"a varying axis 0 must stay, not become {shape}")
        return tuple(head + [s for _, s in old])
    if prod(sizes[0]) != prod(new):  # type: ignore[arg-type]
        raise GraphError(f"number of elements differs from {shape}")
    if meta.dtype.block > 1 and (not old or not new or old[-1][0] != new[-1]):
        raise GraphError(f"blocks must keep their last axis, not become {shape}")
    if 0 in new:
        return Meta.of(shape, meta.dtype).strides
    strides = _split_axes(_merge_axes(old, meta.dtype), new)  # type: ignore[arg-type]
    return None if strides is None else tuple(head + strides)


def _merge_axes(axes: list[tuple[int, int]], kind: DType) -> list[tuple[int, int]]:
    """Merge adjacent axes that are dense with respect to each other; drop axes of one element."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and kind.block == 1 and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged or [(1, kind.nbytes)]


def _split_axes(axes: list[tuple[int, int]], shape: list[int]) -> list[int] | None:
    """Split ``axes`` into ``shape``, and return its strides; None if an axis spans two of them."""
    strides: list[int] = []
    pending, axes = list(reversed(shape)), list(axes)
    size, stride = axes.pop()
    for want in pending:
        if want == 1:
            strides.append(stride)
            continue
        if size == 1:
            if not axes:
                return None
            size, stride = axes.pop()
        if size % want:
            return None
        strides.append(stride)
        size, stride = size // want, stride * want
    return strides[::-1]


# ---------------------------------------------------------------------------------------- leaves


def _leaf(kind: str, name: str, shape: tuple[Dim, ...], of: DType | str) -> Tensor:
    return Tensor(kind, (), {"name": name}, Meta.of(shape, of))


def feed(name: str, shape: tuple[Dim, ...], of: DType | str) -> Tensor:
    """Return an input: a value that the caller feeds before a run."""
    return _leaf(INPUT, name, shape, of)


def state(name: str, shape: tuple[Dim, ...], of: DType | str) -> Tensor:
    """Return a state: a value that persists between runs (KV pools, the step's ids, positions)."""
    return _leaf(STATE, name, shape, of)


def weight(name: str, shape: tuple[int, ...], of: DType | str) -> Tensor:
    """Return a weight: a constant of the model, found by name in the weight source."""
    return _leaf(WEIGHT, name, shape, of)


def replica(node: Tensor) -> Tensor:
    """Return a new node equal to this one."""
    return Tensor(node.op, node.src, node.attrs, node.meta, node.scopes, node.origin)


def substitute(node: Tensor, src: tuple[Tensor | None, ...]) -> Tensor:
    """Return ``node`` over other sources of the same kind; views are recomputed over their base."""
    if src == node.src:
        return node
    meta = node.meta
    if node.is_view:
        base = src[0]
        assert base is not None
        kind = node.attrs.get("dtype", base.dtype)
        meta = replace(meta, dtype=kind, offset=base.meta.offset + node.attrs["offset"])
    return Tensor(node.op, src, node.attrs, meta, node.scopes, node.origin)


Build = Callable[..., Tensor]
