"""The verb ``new``: a model file to begin with."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import verb
from .output import show


@verb
def new(
    name: Annotated[str, typer.Argument(help="Of the model; the file is NAME.py, here.")],
    like: Annotated[str, typer.Option("--like", help="The family to begin with.")] = "llama",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file of that name.")] = False,
) -> None:
    """Write a model file to begin with: a family's own, with comments where to change what.

    graphllm new my_model --like llama

    graphllm validate --tiny --model-def my_model.py
    """
    from ..starter import write

    path, replaced = write(name, like, force)
    show(f"{path}: {'overwritten' if replaced else 'written'}, as {like} is")
    show(f"try it: graphllm validate --tiny --model-def {path}")
