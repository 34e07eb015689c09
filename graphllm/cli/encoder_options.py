"""Options and steps that the verbs of encoders share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from .declarations import Option
from .options import Device, ModelDef, Threads, read_text_file

if TYPE_CHECKING:
    from ..embedding.encoder_model import EncoderModel

    M = TypeVar("M", bound=EncoderModel)

TextFile = Annotated[
    Path | None,
    Option("-f", "--file", help="Text file, one text per line; - or none: standard input."),
]
NoTruncate = Annotated[
    bool, Option("--no-truncate", help="Report texts that are too long as an error.")
]


def text_lines(file: Path | None) -> list[str]:
    """Return the lines of a file, or of standard input (None or ``-``).

    Empty lines count; the end of the last line does not.
    """
    lines = read_text_file(file or Path("-")).split("\n")
    return lines if lines[-1] else lines[:-1]


@dataclass
class EncoderOptions:
    """Options of loading an encoder."""

    kind: Annotated[
        str | None, Option("--type", help="Block format to quantise matrices to while loading.")
    ] = None
    device: Device = "auto"
    threads: Threads = 0
    model_def: ModelDef = None

    def load(self, wanted: type[M], model: str) -> M:
        """Load a model of a class with a progress bar; note ops that missed the device.

        Raises:
            GraphllmError: the model cannot be loaded as such a class.
        """
        from ..progress import progress_line
        from ..terminal import note

        with progress_line() as progress:
            loaded = wanted.load(
                model, model_def=self.model_def, type=self.kind, device=self.device,
                threads=self.threads, progress=progress,
            )  # fmt: skip
        for line in loaded.misses():
            note(f"note: {line}")
        return loaded
