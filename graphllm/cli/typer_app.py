"""The typer application: help, and command lines that `Verb.parse` leaves to it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import typer

from .declarations import Option, Verb
from .output import show


def _version(wanted: bool) -> None:
    if wanted:
        from ..version import __version__

        show(f"graphllm {__version__}")
        raise typer.Exit


def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options before a verb."""


def typer_app(verbs: Iterable[Verb]) -> typer.Typer:
    """Return an application of these verbs."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Run language models, and profile them op by op.",
    )
    app.callback()(_general)
    for verb in verbs:
        _add(app, verb)
    return app


def _add(app: typer.Typer, verb: Verb) -> None:
    def call(**values: Any) -> None:
        verb.call(**values)

    parameters = [_typer_parameter(parameter) for parameter in verb.parameters]
    call.__name__, call.__doc__ = verb.name, verb.function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command()(call)


def _typer_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with typer's declaration instead of ours."""
    kind, own = get_args(parameter.annotation)
    declare: Any = typer.Option if isinstance(own, Option) else typer.Argument
    declared = declare(*own.flags, **own.settings)
    return parameter.replace(annotation=Annotated[kind, declared])
