"""Op declarations and their registry. Each op is declared once, in the module of its family.

`@op` takes the op's shape rule (``infer``), cost model (``cost``), tolerance by dtype (``tol``) and
test inputs (``samples``). The decorated function is the NumPy body: the oracle in tests and the
kernel of the reference backend. The decorated name becomes a builder that returns a graph node.

    @op("scale", infer=lambda x, *, factor: same(x), ...)
    def scale(x, *, factor):
        return x * factor

    y = ops.scale(x, factor=2.0)        # a node
    REGISTRY["scale"].reference         # the NumPy body

A fused op is declared with `graphllm.graph.fused_op.fused_op`. Its function builds the
decomposition, which is what a call returns; `graphllm.compiler.fusion` replaces it by the op where
a backend has a kernel.

All modules of `graphllm.ops` are imported with the package, so a new op touches no other file.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GraphError
from .dtype import F32, DType, dtype
from .scopes import error_location
from .tensor import Dim, Env, Meta, Tensor, set_contiguous_op

if TYPE_CHECKING:
    Rng = np.random.Generator
else:
    Rng = Any  # NumPy imports its generators at their first use, and runs of models use none
Shape = tuple[int, ...]
Maker = Callable[[Rng, Shape], np.ndarray]  # makes the values of a test operand

# Kinds of arithmetic, which determine the rate at which an op can run.
ELEMENTWISE, MATMUL, ATTENTION = ARITHMETIC = ("elementwise", "matmul", "attention")

# ----------------------------------------------------------------------------------- declarations


@dataclass(frozen=True)
class Cost:
    """Cost of one run of an op: arithmetic operations, and bytes of memory read and written."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Arg:
    """A test operand.

    Attributes:
        shape: dimensions; the first may be the name of a Var.
        dtype: element type.
        layout: "contiguous", "strided" (a slice of wider rows), "leading" (the first columns of
            rows with 64 more), "permuted" (axes 1.. stored in reverse) or "expanded" (axis 1 has
            stride 0).
        leaf: kind of leaf in the graph: "input", "state" or "weight".
        make: ``make(rng, shape)`` returns float32 or integer values, which are quantised for a
            quantised dtype; None draws from a normal distribution.
    """

    shape: tuple[int | str, ...]
    dtype: DType = F32
    layout: str = "contiguous"
    leaf: str = "input"
    make: Maker | None = None


@dataclass(frozen=True)
class Sample:
    """One test call of an op: operands (None where omitted), attributes, live values of Vars."""

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


class Samples(Sequence[Sample]):
    """Samples that are made at first use, as only tests and documentation use them.

    Args:
        make: function that returns the samples.
    """

    def __init__(self, make: Callable[[], Sequence[Sample]]) -> None:
        self._made = cache(make)

    def __add__(self, other: Sequence[Sample]) -> Samples:
        return Samples(lambda: [*self, *other])

    def __len__(self) -> int:
        return len(self._made())

    def __getitem__(self, index: Any) -> Any:
        return self._made()[index]


def grid(make: Callable[..., Sample], **axes: Iterable[Any]) -> Samples:
    """Call ``make`` with every combination of values of the named axes."""
    values = [tuple(each) for each in axes.values()]
    return Samples(lambda: [make(**dict(zip(axes, each))) for each in itertools.product(*values)])


@dataclass(frozen=True, eq=False)
class OpDef:
    """Declaration of one op; see the module's docstring.

    Attributes:
        name: name of the op.
        file: source file of the declaration.
        params: names of the operands in order, without the variadic ones.
        optional: number of trailing operands that may be None or omitted.
        variadic: whether more operands may follow ``params``.
        defaults: attributes and their defaults, `inspect.Parameter.empty` where required.
        infer: shape rule: Metas of the operands and attributes -> Meta of the result.
        cost: Metas of the result and the operands, live values and attributes -> `Cost`.
        arithmetic: kind of arithmetic, one of `ARITHMETIC`. A "matmul" has its weights as second
            operand. A fused op has the kinds of its parts.
        tol: tolerance by dtype.
        samples: test inputs.
        reference: NumPy body.
        writes: number of operands -> indices of those that the op modifies in place. The first of
            them is the op's result, except for a fused op.
        role: marks an op that the compiler inserts; see `role`.
        fusion: set for a fused op.
    """

    name: str
    file: str
    params: tuple[str, ...]
    optional: int
    variadic: bool
    defaults: Mapping[str, Any]
    infer: Callable[..., Meta]
    cost: Callable[..., Cost]
    tol: Mapping[str, float]
    samples: Sequence[Sample]
    reference: Callable[..., Any]
    arithmetic: str = ELEMENTWISE
    writes: Callable[[int], tuple[int, ...]] | None = None
    role: str | None = None
    fusion: Fusion | None = None

    def __repr__(self) -> str:
        return f"<op {self.name}>"  # the default would print all samples

    def written(self, node: Tensor) -> tuple[int, ...]:
        """Return the indices of the operands that ``node`` modifies in place."""
        return self.writes(len(node.src)) if self.writes else ()

    def alias(self, node: Tensor) -> Tensor | None:
        """Return the operand that the result of ``node`` aliases; None if it has its own buffer."""
        written = () if self.fusion else self.written(node)
        return node.src[written[0]] if written else None

    def operand(self, index: int) -> str:
        """Return the name of operand ``index``; variadic ones are "rest", or named by group."""
        if self.fusion and self.fusion.grouped:
            return self.params[index % len(self.params)]
        return self.params[index] if index < len(self.params) else "rest"

    def __call__(self, *src: Tensor | None, **attrs: Any) -> Any:
        """Return a node, or for a fused op the results of its decomposition."""
        if self.fusion:
            return self.fusion.build(*src, **attrs)
        return self.node(*src, **attrs)

    def node(self, *src: Tensor | None, **attrs: Any) -> Tensor:
        """Return one node of this op.

        Raises GraphError with the line of the model, the scope, the shapes and what is wrong.
        """
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
            if value is not None and not isinstance(value, Tensor):
                raise GraphError(f"{value!r} is not a Tensor")
        if len(src) < count:
            src = (*src, *[None] * (count - len(src)))
        needed = count - self.optional
        if (len(src) > count and not self.variadic) or any(s is None for s in src[:needed]):
            given = sum(s is not None for s in src)
            raise GraphError(f"takes {', '.join(self.params)}; got {given} operands")
        return src

    def _attributes(self, attrs: dict[str, Any]) -> dict[str, Any]:
        unknown = set(attrs) - set(self.defaults)
        if unknown:
            raise GraphError(f"has no attribute {', '.join(sorted(unknown))}")
        values = {**self.defaults, **attrs}
        missing = [k for k, v in values.items() if v is inspect.Parameter.empty]
        if missing:
            raise GraphError(f"needs the attribute {', '.join(missing)}")
        return values

    def node_cost(self, node: Tensor, env: Env) -> Cost:
        """Return the cost of ``node`` in a run with these live values of Vars."""
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
    arithmetic: str = ELEMENTWISE,
    writes: Callable[[int], tuple[int, ...]] | None = None,
    role: str | None = None,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op; the decorated function is its NumPy body.

    Positional parameters of the body are operands, keyword-only ones are attributes. The body
    receives arrays of the live shape (`Blocks` of `graphllm.formats.quantization` for
    block-quantised operands) and returns the result, or nothing if it ``writes`` operands. For the
    arguments see `OpDef`.
    """

    def declare(body: Callable[..., Any]) -> OpDef:
        return register(
            name, body, infer=infer, cost=cost, tol=dict(tol), samples=samples,
            reference=body, arithmetic=arithmetic, writes=writes, role=role,
        )  # fmt: skip

    return declare


def register(name: str, function: Callable[..., Any], **fields: Any) -> OpDef:
    """Register an op whose operands and attributes are the parameters of ``function``.

    A file that is executed again, such as a model file that is loaded again, replaces its own ops.
    Raises GraphError if another file declares an op of this name.
    """
    file = function.__code__.co_filename
    if name in _REGISTRY and _REGISTRY[name].file != file:
        raise GraphError(f"op {name!r} is already declared in {_REGISTRY[name].file}")
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
    if fields.get("role") == "layout":
        set_contiguous_op(_REGISTRY[name])
    return _REGISTRY[name]


# --------------------------------------------------------------------------------------- fused ops

Users = Callable[[Tensor], Sequence[Tensor]]  # the nodes that read a node, in order
Proposal = tuple[tuple[Tensor | None, ...], dict[str, Any]]  # operands and attributes


@dataclass(frozen=True)
class Fusion:
    """The part of a declaration that fused ops have.

    Attributes:
        build: builds the decomposition and returns its results, one Tensor or a tuple. A result
            that is a state written by the op aliases this state. The other results share one
            buffer, each with its own columns of every row, so all have the same axis 0.
        anchor: op at which the rule is tried.
        propose: ``propose(node, users)`` returns operands and attributes of a fused node whose
            decomposition may contain ``node``, an op of kind ``anchor``. The compiler builds the
            decomposition and compares it with the graph, so a wrong proposal is rejected.
        grouped: variadic operands come in groups with the names of the first operands.
    """

    build: Callable[..., Any]
    anchor: str
    propose: Callable[[Tensor, Users], Proposal | None]
    grouped: bool = False


# ---------------------------------------------------------------------------------- shape helpers


def _shape(operand: object) -> str:
    """Format an operand for messages."""
    if isinstance(operand, Tensor):
        return str(operand.meta)
    return "-" if operand is None else f"a {type(operand).__name__}"


def same(x: Meta) -> Meta:
    """Return the Meta of a contiguous result with the shape and dtype of ``x``."""
    return Meta.of(x.shape, x.dtype)


def out(shape: tuple[Dim, ...], kind: DType | str = F32) -> Meta:
    """Return the Meta of a contiguous result."""
    return Meta.of(shape, dtype(kind))


def require(condition: bool, message: str) -> None:
    """Raise GraphError with ``message`` unless ``condition``. For shape rules."""
    if not condition:
        raise GraphError(message)


def expect(name: str, x: Meta, axes: int | None = None, *kinds: str) -> None:
    """Raise GraphError unless ``x`` has ``axes`` axes and one of the dtypes ``kinds``."""
    require(axes is None or x.ndim == axes, f"{name} has {x.ndim} axes, not {axes}")
    require(not kinds or x.dtype.name in kinds, f"{name} is {x.dtype}, not {' or '.join(kinds)}")


# ---------------------------------------------------------------------------------------- look-up


def registry() -> Mapping[str, OpDef]:
    """Return every declared op by name."""
    return _REGISTRY


def get(name: str) -> OpDef:
    """Return the op called ``name``. GraphError if there is none."""
    found = _REGISTRY.get(name)
    if found is None:
        raise GraphError(f"unknown op {name!r}")
    return found


def role(name: str) -> OpDef:
    """Return the op with a role in the compiler.

    Roles: "layout" (makes an operand contiguous), "transfer" (copies between memories), "call"
    (calls a Python function).
    """
    for declared in _REGISTRY.values():
        if declared.role == name:
            return declared
    raise GraphError(f"no op has the role {name!r}")
