"""Options and steps that the verbs of encoders share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from .declarations import Option
from .options import read_text

if TYPE_CHECKING:
    from ..embedding.encoder_model import EncoderModel

    M = TypeVar("M", bound=EncoderModel)

TextFile = Annotated[
    Path | None,
    Option("-f", "--file", help="Text file, one text per line; standard input by default."),
]
NoTruncate = Annotated[
    bool, Option("--no-truncate", help="Report texts that are too long as an error.")
]
Type = Annotated[
    str | None, Option("--type", help="Block format to quantise matrices to while loading.")
]


def text_lines(file: Path | None) -> list[str]:
    """Return the lines of a file, or of standard input.

    Empty lines count; the end of the last line does not.
    """
    lines = read_text(file).split("\n")
    return lines if lines[-1] else lines[:-1]


def load_encoder(
    kind: type[M], model: Any, model_def: Path | None, type: str | None, device: str, threads: int
) -> M:
    """Load a model of the class ``kind`` with a progress bar; note ops that missed the device."""
    from ..progress import progress_line
    from ..terminal import note

    with progress_line() as progress:
        loaded = kind.load(
            model, model_def=model_def, type=type, device=device, threads=threads, progress=progress
        )
    for line in loaded.misses():
        note(f"note: {line}")
    return loaded
