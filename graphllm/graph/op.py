"""Op declarations and their registry. Each op is declared once, in the module of its family.

`@op` takes the op's shape rule (``infer``), its price (``cost``), its tolerance by dtype (``tol``)
and its test inputs (``samples``); the decorated NumPy body is the oracle and the last backend. The
decorated name becomes a builder: called with Tensors it returns a graph node.

    @op("scale", infer=lambda x, *, factor: same(x), ...)
    def scale(x, *, factor):
        return x * factor

    y = ops.scale(x, factor=2.0)        # a node
    REGISTRY["scale"].reference         # the NumPy body

A fused op is declared with `graphllm.graph.fused_op.fused`: its function builds the parts, which is
what a call returns; `graphllm.compiler.fusion` replaces them by the op where there is a kernel.

Every module of `graphllm.ops` is a family, imported with the package; a new op needs no other file.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import GraphError
from .dtype import F32, DType, dtype
from .scopes import error_location
from .tensor import Dim, Env, Meta, Tensor

# ----------------------------------------------------------------------------------- declarations


@dataclass(frozen=True)
class Cost:
    """What one run of an op must do: floating or integer operations, and bytes of memory moved."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Arg:
    """A test operand. ``shape`` may begin with a Var's name. ``layout``: contiguous, strided (a
    slice of wider rows), leading (the first columns of rows with 64 more, of any dtype), permuted
    (axes 1.. stored in reverse) or expanded (axis 1 grouped).

    ``leaf`` says what it is in the graph: input, state or weight. ``make(rng, shape)`` gives its
    values (float32 or integers; quantised dtypes are quantised from them); normal by default.
    """

    shape: tuple[int | str, ...]
    dtype: DType = F32
    layout: str = "contiguous"
    leaf: str = "input"
    make: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None


@dataclass(frozen=True)
class Sample:
    """One test call of an op: operands (None where left out), attributes, values of the Vars."""

    args: tuple[Arg | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = []
        for arg in self.args:
            if arg is None:
                parts.append("-")
                continue
            dims = "x".join(str(self.env.get(d, d) if isinstance(d, str) else d) for d in arg.shape)
            layout = "" if arg.layout == "contiguous" else f"~{arg.layout}"
            parts.append(f"{arg.dtype}[{dims}]{layout}")
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return " ".join(parts) + (f" {attrs}" if attrs else "")


def grid(make: Callable[..., Sample], **axes: Iterable[Any]) -> list[Sample]:
    """``make`` called on every combination of the named axes."""
    return [
        make(**dict(zip(axes, values))) for values in itertools.product(*map(list, axes.values()))
    ]


@dataclass(frozen=True, eq=False)
class OpDef:
    """One op: see the module's docstring. ``writes`` gives, for a count of operands, the indices of
    those that it changes in place; its result then is the first of them (a fused op's own result is
    not). ``role`` marks the ops that the compiler itself inserts."""

    name: str
    file: str  # where it is declared
    params: tuple[str, ...]  # operand names, in order, without the variadic rest
    optional: int  # how many trailing operands may be None or left out
    variadic: bool
    defaults: Mapping[str, Any]  # attributes; inspect.Parameter.empty where required
    infer: Callable[..., Meta]
    cost: Callable[..., Cost]
    tol: Mapping[str, float]
    samples: Sequence[Sample]
    reference: Callable[..., Any]
    writes: Callable[[int], tuple[int, ...]] | None = None
    role: str | None = None
    fusion: Fusion | None = None

    def __repr__(self) -> str:
        return f"<op {self.name}>"  # all samples would be pages of it

    def written(self, node: Tensor) -> tuple[int, ...]:
        """Indices of the operands of ``node`` that it changes in place."""
        return self.writes(len(node.src)) if self.writes else ()

    def alias(self, node: Tensor) -> Tensor | None:
        """The operand that ``node``'s result is, where it has no buffer of its own."""
        written = () if self.fusion else self.written(node)
        return node.src[written[0]] if written else None

    def operand(self, index: int) -> str:
        """The name of operand ``index``; variadic ones share the name ``rest``, or repeat."""
        if self.fusion and self.fusion.grouped:
            return self.params[index % len(self.params)]
        return self.params[index] if index < len(self.params) else "rest"

    def __call__(self, *src: Tensor | None, **attrs: Any) -> Any:
        """A node; of a fused op its parts' results, as its function returns them."""
        if self.fusion:
            return self.fusion.build(*src, **attrs)
        return self.node(*src, **attrs)

    def node(self, *src: Tensor | None, **attrs: Any) -> Tensor:
        """One node of this op. GraphError names the line of the model, the scope, the shapes and
        what does not fit."""
        try:
            full = self._operands(src)
            values = self._attributes(attrs)
            meta = self.infer(*(s.meta if s is not None else None for s in full), **values)
        except GraphError as error:
            shapes = ", ".join(_shape(s) for s in src)
            raise GraphError(f"{error_location()}: {self.name}({shapes}): {error}") from None
        return Tensor(self.name, full, values, meta)

    def _operands(self, src: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        count = len(self.params)
        for value in src:
            require(value is None or isinstance(value, Tensor), f"{value!r} is no tensor")
        if len(src) < count:
            src = (*src, *[None] * (count - len(src)))
        needed = count - self.optional
        if (len(src) > count and not self.variadic) or any(s is None for s in src[:needed]):
            given = sum(s is not None for s in src)
            raise GraphError(f"it takes {', '.join(self.params)}, got {given} operands")
        return src

    def _attributes(self, attrs: dict[str, Any]) -> dict[str, Any]:
        unknown = set(attrs) - set(self.defaults)
        if unknown:
            raise GraphError(f"it has no attribute {', '.join(sorted(unknown))}")
        values = {**self.defaults, **attrs}
        missing = [k for k, v in values.items() if v is inspect.Parameter.empty]
        if missing:
            raise GraphError(f"it needs the attribute {', '.join(missing)}")
        return values

    def node_cost(self, node: Tensor, env: Env) -> Cost:
        """The cost of ``node`` in a run with these values of its Vars."""
        metas = (s.meta.at(env) if s is not None else None for s in node.src)
        return self.cost(node.meta.at(env), *metas, env=env, **node.attrs)


_REGISTRY: dict[str, OpDef] = {}


def op(
    name: str,
    *,
    infer: Callable[..., Meta],
    cost: Callable[..., Cost],
    tol: Mapping[str, float],
    samples: Sequence[Sample],
    writes: Callable[[int], tuple[int, ...]] | None = None,
    role: str | None = None,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op: the decorated function is its NumPy body, positional operands first.

    A body receives arrays of the live shape (`Blocks` of `graphllm.formats.quantization` for
    block-quantised operands) and returns the result; nothing if it ``writes`` operands.
    """

    def declare(body: Callable[..., Any]) -> OpDef:
        return register(
            name, body, infer=infer, cost=cost, tol=dict(tol), samples=tuple(samples),
            reference=body, writes=writes, role=role,
        )  # fmt: skip

    return declare


def register(name: str, function: Callable[..., Any], **fields: Any) -> OpDef:
    """Declare an op whose operands and attributes are those of ``function``. A file that is run
    again (a model file that is loaded again, say) declares its own ops anew; GraphError for others.
    """
    file = function.__code__.co_filename
    if name in _REGISTRY and _REGISTRY[name].file != file:
        raise GraphError(f"op {name!r} is declared twice: in {_REGISTRY[name].file}, too")
    params = inspect.signature(function).parameters.values()
    operands = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    _REGISTRY[name] = OpDef(
        name=name,
        file=file,
        params=tuple(p.name for p in operands if p.kind is not p.VAR_POSITIONAL),
        optional=sum(p.default is None for p in operands),
        variadic=any(p.kind is p.VAR_POSITIONAL for p in operands),
        defaults={p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY},
        **fields,
    )
    return _REGISTRY[name]


# --------------------------------------------------------------------------------------- fused ops

Users = Callable[[Tensor], Sequence[Tensor]]  # the nodes that read a node, in order
Proposal = tuple[tuple[Tensor | None, ...], dict[str, Any]]  # operands and attributes


@dataclass(frozen=True)
class Fusion:
    """What makes an op a fused one.

    ``build`` makes the parts and returns their results, one Tensor or a tuple. Results of which one
    is a state that the op writes are that state; the others share a buffer, side by side in each
    row, so all have the same axis 0. ``propose(node, users)`` may name operands and attributes
    that would have ``node``, whose op is ``anchor``, among the parts: the compiler builds the parts
    from them and looks whether the graph has just these, so a proposal cannot be wrong, only vain.
    ``grouped``: variadic operands come in groups named as the first ones.
    """

    build: Callable[..., Any]
    anchor: str
    propose: Callable[[Tensor, Users], Proposal | None]
    grouped: bool = False


# ---------------------------------------------------------------------------------- shape helpers


def _shape(operand: object) -> str:
    """An operand as messages show it."""
    if isinstance(operand, Tensor):
        return str(operand.meta)
    return "-" if operand is None else f"a {type(operand).__name__}"


def same(x: Meta) -> Meta:
    """A contiguous result with the shape and dtype of ``x``."""
    return Meta.of(x.shape, x.dtype)


def out(shape: tuple[Dim, ...], kind: DType | str = F32) -> Meta:
    """A contiguous result."""
    return Meta.of(shape, dtype(kind))


def require(condition: bool, message: str) -> None:
    """A line of a shape rule: GraphError with ``message`` unless ``condition``."""
    if not condition:
        raise GraphError(message)


def expect(name: str, x: Meta, axes: int | None = None, *kinds: str) -> None:
    """A line of a shape rule: GraphError unless ``x`` has so many axes and one of these dtypes."""
    require(axes is None or x.ndim == axes, f"{name} has {x.ndim} axes, not {axes}")
    require(not kinds or x.dtype.name in kinds, f"{name} is {x.dtype}, not {' or '.join(kinds)}")


# ---------------------------------------------------------------------------------------- look-up


def registry() -> Mapping[str, OpDef]:
    """Every declared op by name."""
    return _REGISTRY


def get(name: str) -> OpDef:
    """The op called ``name``. GraphError when there is none."""
    found = _REGISTRY.get(name)
    if found is None:
        raise GraphError(f"unknown op {name!r}")
    return found


def role(name: str) -> OpDef:
    """The op that plays a compiler's role: ``layout`` (make contiguous) or ``transfer`` (between
    memories)."""
    for declared in _REGISTRY.values():
        if declared.role == name:
            return declared
    raise GraphError(f"no op has the role {name!r}")
