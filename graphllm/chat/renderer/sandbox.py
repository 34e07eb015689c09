"""Jinja2 environment of chat templates: sandbox, transformers' extensions, taint tracking.

The sandbox isolates a template from the interpreter. The process limits time and memory (`worker`),
so operations are not counted here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment
from markupsafe import Markup

from .provenance import METHODS, Tracked, call_aligned, call_method, call_opaque, concat, text_of

# Filters that return their argument or elements of it, or apply other filters: they make no text.
_SELECTING = frozenset(
    ("attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list",
     "map", "max", "min", "random", "reject", "rejectattr", "select", "selectattr", "slice", "sort",
     "sum", "unique")
)  # fmt: skip
# Filters that keep the origin of each character; see `provenance.call_aligned`.
_ALIGNED = frozenset(("capitalize", "center", "indent", "string", "title", "truncate"))


class Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: marks answers for training; no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Compiles ``a ~ b`` to a call of the environment's `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Namespace(Namespace):
    """A namespace without underscore attributes, which would bypass the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed environment in which every operation on text keeps track of its origin."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(concat)
    intercepted_binops = frozenset(("+", "*", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            finalize=text_of,
        )
        self.globals.update(
            namespace=_Namespace,
            raise_exception=_raise_exception,
            strftime_now=lambda pattern: call_opaque(datetime.now().strftime, (pattern,), {}),
        )
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            if name not in _SELECTING:
                self.filters[name] = _keeping_origin(function, name in _ALIGNED)
        self.filters.update(format=self._format, join=_join, replace=_replace)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_binop(None, "%", text_of(value), kwargs or args)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr == "encode":  # bytes have no origin
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        function = super().wrap_str_format(value)
        if function is None or type(value.__self__) is Tracked:
            return function  # the result is the caller's, like the format string
        return lambda *args, **kwargs: call_aligned(function, args, kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if type(owner) is str and name in METHODS and __self.is_safe_callable(__obj):
            for own in ("_loop_vars", "_block_vars"):  # Jinja's own, in loops and blocks
                kwargs.pop(own, None)
            return call_method(name, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not (isinstance(left, str) or isinstance(right, str)):
            return super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return concat((left, right))
        function = functools.partial(super().call_binop, context, operator)
        is_aligned = operator == "*" or type(left) is not Tracked
        return (
            call_aligned(function, (left, right))
            if is_aligned
            else call_opaque(function, (left, right), {})
        )


def _keeping_origin(function: Callable[..., Any], is_aligned: bool) -> Callable[..., Any]:
    """Wrap a filter so that its results keep their origin."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context argument
    keeping = call_aligned if is_aligned else call_opaque

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        result = keeping(functools.partial(function, *args[:leading]), args[leading:], kwargs)
        return str.__str__(result) if isinstance(result, Markup) else result

    return filtered


@pass_environment
def _join(environment: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts = [part for item in value for part in (d, item)]
    return concat(parts[1:])


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    counted = () if count is None else (count,)
    return str(call_method("replace", text_of(s), (text_of(old), text_of(new), *counted), {}))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, as transformers does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")
