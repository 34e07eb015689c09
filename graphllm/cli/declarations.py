"""Declarations of verbs and their options, and the parser of correct command lines.

A verb is a function whose parameters are annotated with `Option` or `Argument`, or with a dataclass
of such fields. `Verb.parse` reads a command line that is correct and plain. All others (``--help``,
wrong usage, ``-n5``, ...) are left to typer, which has the same declarations
(`graphllm.cli.typer_app`): importing it takes longer than loading a small model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from .deferred_interrupt import deferred_interrupt


class Argument:
    """An argument of a verb; ``settings``: those of `typer.Argument`."""

    def __init__(self, **settings: Any) -> None:
        self.flags: tuple[str, ...] = ()
        self.settings = settings


class Option(Argument):
    """An option of a verb and its flags; ``settings``: those of `typer.Option`."""

    def __init__(self, *flags: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.flags = flags


# How values are written that Python and typer read alike. Others are left to typer.
_PLAIN: dict[type, re.Pattern[str]] = {
    int: re.compile(r"-?[0-9]{1,18}"),
    float: re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?"),
    str: re.compile(r"(?!-.).*", re.DOTALL),
    Path: re.compile(r"(?!-.).+", re.DOTALL),
}


@dataclass(frozen=True)
class _Slot:
    """A parameter of a verb as the parser sees it; ``many``: a list of values of type ``kind``."""

    name: str
    kind: type
    many: bool

    @classmethod
    def of(cls, parameter: inspect.Parameter) -> _Slot:
        kind = get_args(parameter.annotation)[0]
        if get_origin(kind) in (Union, UnionType):  # X | None
            (kind,) = (k for k in get_args(kind) if k is not NoneType)
        many = get_origin(kind) is list
        return cls(parameter.name, get_args(kind)[0] if many else kind, many)

    def read(self, text: str | None) -> Any:
        """Return the value written as ``text``; None if there is none, or it is not plain."""
        return self.kind(text) if text is not None and _PLAIN[self.kind].fullmatch(text) else None


class Verb:
    """A verb of the command line.

    Attributes:
        name, function: the verb, and what it calls.
        parameters: options and arguments, those of option groups included, annotated with
            ``Annotated[type, Argument or Option]``.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.name, self.function = function.__name__, function
        self.parameters: list[inspect.Parameter] = []
        self._groups: dict[str, tuple[type, list[str]]] = {}
        # get_type_hints of Python 3.10 would hide Annotated below Optional if the default is None.
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind = parameter.annotation
            if not is_dataclass(kind):
                self.parameters.append(_keyword(parameter.name, kind, parameter.default))
                continue
            hints = get_type_hints(kind, include_extras=True)
            own = [_keyword(f.name, hints[f.name], f.default) for f in fields(kind)]
            self._groups[parameter.name] = kind, [p.name for p in own]  # type: ignore[assignment]
            self.parameters += own

    def call(self, **values: Any) -> None:
        """Run the verb with a value for each parameter."""
        with deferred_interrupt():  # C code would report an ImportError and print a traceback
            import ml_dtypes  # noqa: F401  # imports NumPy
        for name, (kind, names) in self._groups.items():
            values[name] = kind(**{n: values.pop(n) for n in names})
        self.function(**values)

    def parse(self, words: Sequence[str]) -> dict[str, Any] | None:
        """Return the values of all parameters; None unless the command line is plain and correct.

        Plain options are ``--flag VALUE`` and ``--flag=VALUE``, each at most once unless it takes
        several values.
        """
        slots = [_Slot.of(parameter) for parameter in self.parameters]
        declared = [get_args(parameter.annotation)[1].flags for parameter in self.parameters]
        flags, off = dict[str, _Slot](), set[str]()  # "--on/--off" declares two flags
        for slot, own in zip(slots, declared):
            for on, _, other in (flag.partition("/") for flag in own):
                flags |= {on: slot, other: slot} if other else {on: slot}
                off.add(other)
        positional = [slot for slot, own in zip(slots, declared) if not own]
        values: dict[str, Any] = {}
        rest = list(reversed(words))
        while rest:
            word = rest.pop()
            flag, equals, text = word.partition("=")
            if word in flags:
                slot = flags[word]
                value = (
                    word not in off
                    if slot.kind is bool
                    else slot.read(rest.pop() if rest else None)
                )
            elif equals and flag in flags and flag.startswith("--"):
                slot = flags[flag]
                value = None if slot.kind is bool else slot.read(text)
            elif positional and (word == "-" or not word.startswith("-")):
                slot = positional.pop(0)
                value = slot.read(word)
            else:
                return None
            if value is None or (slot.name in values and not slot.many):
                return None
            values[slot.name] = [*values.get(slot.name, ()), value] if slot.many else value
        for parameter in self.parameters:
            values.setdefault(parameter.name, parameter.default)
        return None if inspect.Parameter.empty in values.values() else values


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    assert get_origin(kind) is Annotated
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


VERBS: dict[str, Verb] = {}  # those whose modules are imported; see `graphllm.cli.verbs`


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Declare a verb, the module of that name."""
    VERBS[function.__name__] = Verb(function)
    return function


def exit_with(code: int) -> NoReturn:
    """End the verb with an exit code."""
    import typer

    raise typer.Exit(code)
