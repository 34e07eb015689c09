"""Errors of the Python API with the flag that sets the argument they name."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from ..errors import GraphllmError
from .options import LoadOptions, SamplingOptions

# Arguments that are an option of one verb, or have another name there.
_OTHERS = {
    "chat_template": "--chat-template",
    "force": "--force",
    "free": "--free",
    "no_kernels": "--no-kernel",
}


def with_flag(error: GraphllmError) -> str:
    """The error's text, and in brackets the flag for what it is about, if there is one."""
    flag = _flags().get(error.argument or "")
    return f"{error} ({flag})" if flag else str(error)


def _flags() -> dict[str, str]:
    """The first flag of each argument that the groups of options have."""
    found = dict(_OTHERS)
    for group in (LoadOptions, SamplingOptions):
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            kind = hints[each.name]
            option = get_args(kind)[1] if get_origin(kind) is Annotated else None
            # typer takes the first flag of an option in an annotation for its default.
            if isinstance(option, OptionInfo) and isinstance(option.default, str):
                found[each.name] = option.default
    return found
