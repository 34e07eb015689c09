"""The verb ``quantize``: write a model as a GGUF file of another type."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from ..progress import progress_line
from ..terminal import note
from .declarations import Argument, Option, verb
from .options import Threads
from .output import show


@verb
def quantize(
    model: Annotated[
        str,
        Argument(
            help="A .gguf file (the first part of a split file), a Hugging Face directory or "
            "ORG/NAME, or 'demo'.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, Argument(help="The .gguf file to write.", show_default=False)],
    kind: Annotated[
        str,
        Option(
            "--type",
            help="Type of the file: f16, bf16, q8_0, q4_0, q4_k_m, iq4_xs, ...; an unknown type "
            "lists all.",
        ),
    ] = "q4_k_m",
    imatrix: Annotated[
        Path | None,
        Option(
            "--imatrix", help="Importance matrix of llama.cpp's imatrix tool.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False,
    allow_requantize: Annotated[
        bool,
        Option(
            "--allow-requantize",
            help="Convert tensors that are quantised already, which loses more quality.",
        ),
    ] = False,
    threads: Threads = 0,
) -> None:
    """Quantise a model: write it as a GGUF file of another type.

    graphllm quantize ~/models/Qwen3-0.6B qwen3-q4_k_m.gguf --type q4_k_m

    graphllm quantize model-f16.gguf model-iq4_xs.gguf --type iq4_xs --imatrix imatrix.gguf
    """
    from ..quantize import quantize as run

    bar = progress_line("quantising") if sys.stderr.isatty() else nullcontext()
    with bar as progress:
        done = run(
            model, output, kind, imatrix=imatrix, force=force, allow_requantize=allow_requantize,
            threads=threads, progress=progress,
        )  # fmt: skip
    for line in done.notes:
        note(f"note: {line}")
    formats = ", ".join(f"{count} {name}" for name, count in sorted(done.formats.items()))
    rate = done.read_bytes / done.seconds / 1e6
    show(f"{done.path}: {done.written_bytes / 1e6:.1f} MB, {formats} tensors")
    show(f"{done.read_bytes / 1e6:.1f} MB read in {done.seconds:.1f} s ({rate:.0f} MB/s)")
