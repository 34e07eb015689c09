"""Names the command-line flag of the argument that an error of the Python API is about."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, get_args, get_origin, get_type_hints

from ..errors import GraphllmError
from .declarations import Option
from .options import GenerationLoadOptions
from .sampling_options import RunSamplingOptions

# Arguments whose flag is not in the common option groups, or has another name.
_OTHERS = {
    "allow_requantize": "--allow-requantize",
    "chat_template": "--chat-template",
    "chunks": "--chunks",
    "force": "--force",
    "free": "--free",
    "kind": "--type",
    "max_sequences": "--parallel",
    "port": "--port",
    "ramps": "--ramps",
    "no_kernels": "--no-kernel",
}


def with_flag(error: GraphllmError) -> str:
    """Return the error's text, followed by the flag of its argument in brackets, if any."""
    flag = _flags().get(error.argument or "")
    return f"{error} ({flag})" if flag else str(error)


def _flags() -> dict[str, str]:
    """Return the first flag of each argument in the common option groups."""
    found = dict(_OTHERS)
    for group in (GenerationLoadOptions, RunSamplingOptions):
        hints = get_type_hints(group, include_extras=True)
        for each in fields(group):
            kind = hints[each.name]
            option = get_args(kind)[1] if get_origin(kind) is Annotated else None
            if isinstance(option, Option):
                found[each.name] = option.flags[0]
    return found
