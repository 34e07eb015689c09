"""The verb ``quantize``: write a model as a GGUF file, or a directory, of another type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..terminal import note
from .declarations import Argument, Option, verb
from .options import Device, Threads, read_text_file, target_size
from .output import show

if TYPE_CHECKING:
    from ..quantize import Report

_KIND = "q4_k_m"  # default of --type


@dataclass
class Calibration:
    """What a run of the model over a text tells, or a file of it; search for formats."""

    imatrix: Annotated[
        Path | None,
        Option(
            "--imatrix", help="Importance matrix of llama.cpp's imatrix tool.", show_default=False
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        Option(
            "--calibrate",
            metavar="FILE",
            help="Text to run the model on, to collect the importance matrix, or statistics for "
            "SmoothQuant (w8a8); - reads standard input.",
            show_default=False,
        ),
    ] = None
    chunks: Annotated[
        int | None,
        Option(
            "--chunks",
            help="Maximum number of chunks of 512 tokens of --calibrate; all by default.",
            show_default=False,
        ),
    ] = None
    write_imatrix: Annotated[
        Path | None,
        Option(
            "--write-imatrix",
            metavar="OUT",
            help="Write the importance matrix of --calibrate as llama.cpp's imatrix tool does.",
            show_default=False,
        ),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "--target-size",
            metavar="SIZE",
            help="Instead of --type: search for the formats of least KL divergence on --calibrate, "
            "in a file of at most this size, such as 1.1GB or 900MiB.",
            show_default=False,
        ),
    ] = None
    device: Device = "auto"

    def check_flags(self) -> None:
        """Raise RequestError for options that do not fit together."""
        if self.imatrix is not None and self.calibrate is not None:
            raise RequestError("give --imatrix FILE or --calibrate FILE, not both")
        if self.calibrate is None:
            for flag, value in (
                ("--chunks", self.chunks), ("--write-imatrix", self.write_imatrix),
                ("--target-size", self.target),
                ("--device", None if self.device == "auto" else self.device),
            ):  # fmt: skip
                if value is not None:
                    raise RequestError(f"{flag} needs --calibrate FILE")

    def check(self, model: str, model_output: Path, force: bool) -> None:
        """Raise RequestError if options do not fit together, or an output exists or is an input."""
        from ..atomic_file import check_output
        from ..checkpoints.model_files import check_not_input

        self.check_flags()
        if self.write_imatrix and self.write_imatrix.resolve() == model_output.resolve():
            raise RequestError(f"--write-imatrix {self.write_imatrix}: is the model to write")
        inputs = (("the text", self.calibrate), ("the importance matrix", self.imatrix))
        for path, flag in ((model_output, ""), (self.write_imatrix, "--write-imatrix")):
            if path is not None:
                check_not_input(path, models=[model], files=inputs, flag=flag)
                check_output(path, force)

    def check_directory(self, kind: str, allow_requantize: bool) -> None:
        """Raise RequestError for options that do not fit together, or have no effect on a directory
        of the type ``kind``."""
        from ..quantize.mixes import SMOOTHED_TYPES

        self.check_flags()
        given = {
            "--imatrix": self.imatrix, "--write-imatrix": self.write_imatrix,
            "--calibrate": self.calibrate if kind not in SMOOTHED_TYPES else None,
            "--allow-requantize": allow_requantize,
        }  # fmt: skip
        for flag, value in given.items():
            if value:
                raise RequestError(f"{flag} has no effect with --type {kind}")

    def directory_arguments(self, path: Path, threads: int) -> dict[str, Any]:
        """Return arguments of `quantize_directory`, after a run of the model if needed."""
        if self.calibrate is None:
            return {}
        from ..quality.calibration import observe
        from ..quantize.smoothing import ChannelStatistics

        text, options = read_text_file(self.calibrate), {"device": self.device, "threads": threads}
        with progress_line("calibrating") as bar:
            inputs, _ = observe(
                path, text, ChannelStatistics.empty, chunks=self.chunks, options=options,
                progress=lambda done, total: bar("calibrating", done, total),
            )  # fmt: skip
        return {"inputs": inputs}

    def arguments(self, model: str, threads: int, force: bool) -> dict[str, Any]:
        """Return arguments of `graphllm.quantize.quantize`, after a run of the model if needed."""
        if self.calibrate is None:
            return {"imatrix": self.imatrix}
        from ..quality.calibration import calibrate

        text = read_text_file(self.calibrate)
        target = None if self.target is None else target_size(model, self.target)
        options = {"device": self.device, "threads": threads}
        with progress_line("calibrating") as bar:
            found = calibrate(
                model, text, chunks=self.chunks, options=options,
                progress=lambda done, total: bar("calibrating", done, total),
            )  # fmt: skip
        if self.write_imatrix is not None:
            found.write(self.write_imatrix, str(self.calibrate), force)
        if target is None:
            return {"imatrix": found}
        from ..quality.mix_search import search_mix

        with progress_line("measuring") as bar:
            mix = search_mix(
                model, text, found, target, options,
                progress=lambda done, total, name: bar("measuring", done, total, name),
            )  # fmt: skip
        show(mix.summary())
        return {"imatrix": found, "kind": mix.kind, "formats": mix.formats}


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
    output: Annotated[
        Path, Argument(help="The .gguf file or the directory to write.", show_default=False)
    ],
    calibration: Calibration,
    kind: Annotated[
        str | None,
        Option(
            "--type",
            help="Type of the file: f16, bf16, q8_0, q4_0, q4_k_m (the default), iq4_xs, ...; an "
            "unknown type lists all. Of a directory: w8a8, fp8.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Overwrite existing files, or the directory.")
    ] = False,
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

    With --calibrate, the model is first run on a text, to find out which
    columns of each matrix matter most. With --target-size, it is loaded once
    for each matrix, to find out which ones need more bits.

    The types w8a8 and fp8 write a Hugging Face directory in the format of
    compressed-tensors, from a directory with weights in floats. For w8a8,
    --calibrate moves outliers of activations into the weights (SmoothQuant).

    graphllm quantize ~/models/Qwen3-0.6B qwen3-q4_k_m.gguf --type q4_k_m

    graphllm quantize ~/models/Qwen3-0.6B qwen3-w8a8 --type w8a8

    graphllm quantize f16.gguf q3_k_m.gguf --type q3_k_m --calibrate book.txt

    graphllm quantize f16.gguf small.gguf --target-size 1.1GB --calibrate book.txt

    graphllm quantize f16.gguf iq4_xs.gguf --type iq4_xs --imatrix imatrix.gguf
    """
    from .. import quantize as package
    from ..checkpoints.checkpoint import checkpoint_path
    from ..quantize.compressed_directory import check_paths
    from ..quantize.mixes import file_type

    if kind is not None and calibration.target is not None:
        raise RequestError("give --type or --target-size, not both")
    arguments: dict[str, Any] = {"kind": (kind or _KIND).lower()}
    run: Callable[..., Report] = package.quantize
    if arguments["kind"] in package.DIRECTORY_TYPES:
        calibration.check_directory(arguments["kind"], allow_requantize)
        path, run = checkpoint_path(model), package.quantize_directory
        check_paths(path, output, force)
        arguments |= calibration.directory_arguments(path, threads)
    else:
        file_type(arguments["kind"])  # an unknown type is reported before the model runs
        calibration.check(model, output, force)
        arguments["allow_requantize"] = allow_requantize
        arguments |= calibration.arguments(model, threads, force)
    bar = progress_line("quantising") if sys.stderr.isatty() else nullcontext()
    with bar as progress:
        done = run(model, output, force=force, threads=threads, progress=progress, **arguments)
    _show_report(done)


def _show_report(done: Report) -> None:
    for line in done.notes:
        note(f"note: {line}")
    formats = ", ".join(f"{count} {name}" for name, count in sorted(done.formats.items()))
    rate = done.read_bytes / done.seconds / 1e6
    show(f"{done.path}: {done.written_bytes / 1e6:.1f} MB, {formats} tensors")
    show(f"{done.read_bytes / 1e6:.1f} MB read in {done.seconds:.1f} s ({rate:.0f} MB/s)")
