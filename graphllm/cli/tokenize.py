"""The verb ``tokenize``: print the tokens of a text."""

from __future__ import annotations

from typing import Annotated

from .declarations import Argument, Option, verb
from .options import Model, read_text
from .output import show, show_json


@verb
def tokenize(
    model: Model,
    text: Annotated[
        str,
        Argument(help="Text to encode; - reads it from standard input.", show_default=False),
    ],
    ids: Annotated[bool, Option("--ids", help="Print only the ids, as a JSON list.")] = False,
    special: Annotated[
        bool,
        Option(
            "--special", help="Encode special tokens written out in the text as control tokens."
        ),
    ] = False,
    bare: Annotated[bool, Option("--no-bos", help="Do not add BOS and EOS tokens.")] = False,
) -> None:
    """Show the tokens of a text, one per line: id and text.

    graphllm tokenize demo "Hello, world" --ids
    """
    from ..checkpoints.checkpoint import open_checkpoint

    own = open_checkpoint(model).tokenizer()
    text = read_text(None) if text == "-" else text
    found = own.encode(text, add_special=not bare, parse_special=special)
    if ids:
        show_json(found)
        return
    for token in found:
        shown = own.piece(token).decode("utf-8", "backslashreplace")
        show(f"{token:>7} {shown!r}")
