"""Jinja2 for templates that come with model files: in its sandbox, and with a budget.

The sandbox keeps a template from the interpreter's internals, but lets it loop for hours and fill
the memory. Here whatever loops or makes values spends from one budget: each iteration and call, and
each text and list by its size, before it is made where the operation can make much of little.

Not bounded: comparing and sorting lists that hold one another many times over; what the template
costs to compile, beyond Python's recursion limit.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = 256 << 20  # about the bytes of all values together
MOST_TEXT = 16 << 20  # characters of a rendered chat
STEP = 256  # of an iteration or a call: a million of them at most
LARGEST = 100_000  # number that a filter or a method may be given; also the sandbox's longest range

_STR_METHODS = frozenset(
    re.split(
        r"\s+",
        "capitalize casefold center count endswith find format format_map index isalnum isalpha "
        "isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower "
        "lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper zfill",
    )
)
_WITHOUT = ("pprint", "random", "urlize", "wordwrap", "xmlattr")  # filters that are not there
_TEXT_FILTERS = frozenset(  # which make text of whatever they are given
    re.split(
        r"\s+",
        "capitalize center e escape forceescape format indent join lower replace safe string "
        "striptags title tojson trim truncate upper urlencode wordcount",
    )
)
# A width of thousands, or one that is an argument: of the operator %, and of the method format.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*\d*\.?(\d{4}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")


class Budget:
    """What a rendering may still spend."""

    def __init__(self) -> None:
        self.left = BUDGET

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise SecurityError("it loops too long or makes too much text")

    def value(self, value: Any) -> Any:
        """Pay for a new value, not for what it refers to."""
        if isinstance(value, str):
            self.spend(sys.getsizeof(value))
        elif isinstance(value, (list, tuple, dict, set)):
            self.spend(64 * len(value))
        return value

    def walk(self, value: Any) -> Any:
        """Pay for the text that would show ``value``, with all that it refers to."""
        self.spend(STEP)
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                self.walk(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.walk(key)
                self.walk(item)
        return value

    def small(self, numbers: Iterable[Any]) -> None:
        """Refuse a number that tells an operation to make very much."""
        for number in numbers:
            if isinstance(number, int) and abs(number) > LARGEST:
                raise SecurityError(f"the number {number} is too large")

    def replace(self, text: Any, old: Any, new: Any) -> None:
        text, old, new = str(text), str(old), str(new)
        self.spend(len(text) + text.count(old) * len(new))


class Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; set ``budget`` anew before each rendering."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            optimized=False,  # nothing is computed before there is a budget
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
            finalize=lambda value: self.budget.walk(value),
        )
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        for name in _WITHOUT:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._paying(name, function)
        self.filters["_counted"] = self._counted
        self.filters["_bounded"] = lambda value: self.budget.value(value)

    def render_text(self, template: Template, variables: Mapping[str, Any]) -> str:
        """What the template makes of ``variables``. SecurityError when it costs too much."""
        self.budget = Budget()
        pieces, size = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_TEXT:
                raise SecurityError(f"it makes more than {MOST_TEXT} characters")
        return "".join(pieces)

    def _paying(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, made to pay."""
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context

        @functools.wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            budget, own = self.budget, list(args[leading:])
            budget.spend(STEP)
            budget.small([*own[1:], *kwargs.values()])
            if name == "join" and own:
                own[0] = list(own[0])  # an iterator can be looked at once only
            if name in _TEXT_FILTERS:
                self._pay_for_text(name, own, kwargs)
            elif name == "sum" and isinstance(kwargs.get("start", [*own, 0, 0, 0][2]), list):
                raise SecurityError("lists cannot be summed")
            return budget.value(function(*args[:leading], *own, **kwargs))

        return filtered

    def _pay_for_text(self, name: str, own: list[Any], kwargs: Mapping[str, Any]) -> None:
        budget = self.budget
        for value in (*own, *kwargs.values()):
            budget.walk(value)
        if name == "join" and own[0]:
            between = str(own[1] if len(own) > 1 else kwargs.get("d", ""))
            budget.spend(len(own[0]) * len(between))
        elif name == "replace" and len(own) >= 3:
            budget.replace(*own[:3])
        elif name == "format":
            _check_widths(_WIDE_PERCENT, str(own[0]))
        elif name in ("indent", "tojson"):
            for setting in (*own[1:], *kwargs.values()):
                if len(str(setting)) > 100 or (isinstance(setting, int) and setting > 100):
                    raise SecurityError("a large indentation")

    def _counted(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        for item in items:
            self.budget.spend(cost)
            yield item

    # -- what jinja2 calls
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise SecurityError("recursive loops are not supported")
            text = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = _filter(loop.iter, "_counted", nodes.Const(STEP + text))
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filter(block.filter, "_bounded")
        _join(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, (int, float, bytes)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and value.__name__ in ("format", "format_map"):
            _check_widths(_WIDE_FORMAT, text)
        return super().wrap_str_format(value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget, text = __self.budget, getattr(__obj, "__self__", None)
        budget.spend(STEP)
        if isinstance(text, str):
            budget.small(args)
            name = __obj.__name__
            if name == "replace" and len(args) >= 2:
                budget.replace(text, *args[:2])
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])
                budget.walk(args[0])
                budget.spend(len(text) * len(args[0]))
        elif getattr(__obj, "__name__", "").startswith("format"):
            budget.walk([*args, kwargs])
        return budget.value(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(STEP)
        sizes = [len(x) if isinstance(x, (str, list, tuple)) else 0 for x in (left, right)]
        if operator == "+":
            self.budget.spend(8 * sum(sizes))
        elif operator == "*" and any(sizes):
            times = next((x for x in (left, right) if isinstance(x, int)), 0)
            self.budget.spend(8 * max(0, times) * max(sizes))
        elif operator == "%" and isinstance(left, str):
            _check_widths(_WIDE_PERCENT, left)
            self.budget.walk(right)
        else:
            self.budget.small((left, right) if operator == "**" else ())
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            self.budget.spend(result.bit_length() // 8)
        return self.budget.value(result)


def _check_widths(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise SecurityError("a format with a large or variable width")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates get it: nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None)


def _join(tree: Any) -> None:
    """Make every ``a ~ b`` in the tree the filter ``join``, which pays."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, _as_join(value))
            elif isinstance(value, list):
                value[:] = [_as_join(v) if isinstance(v, nodes.Concat) else v for v in value]


def _as_join(node: nodes.Concat) -> nodes.Filter:
    return _filter(nodes.List(node.nodes, lineno=node.lineno), "join")
