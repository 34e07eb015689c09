"""The verb ``new``: write a model file to start from."""

from __future__ import annotations

from typing import Annotated

from .declarations import Argument, Option, verb
from .output import show


@verb
def new(
    name: Annotated[
        str, Argument(help="Name of the model; writes NAME.py to the current directory.")
    ],
    like: Annotated[str, Option("--like", help="Model family to start from.")] = "llama",
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a model file to start from: a copy of a model family, with comments on what to change.

    graphllm new my_model --like llama

    graphllm validate --tiny --model-def my_model.py
    """
    from .scaffold import write_model_file

    path, replaced = write_model_file(name, like, force)
    show(f"{path}: {'overwritten' if replaced else 'written'} as a copy of {like}")
    show(f"try it: graphllm validate --tiny --model-def {path}")
