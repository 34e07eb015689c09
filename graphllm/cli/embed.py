"""The verb ``embed``: embeddings of the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np

from ..errors import RequestError
from .declarations import Option, verb
from .options import Device, Model, ModelDef, Threads, read_text
from .output import OutputError, check_writable, show, show_json, write_file

TextFile = Annotated[
    Path | None,
    Option("-f", "--file", help="Text file, one text per line; standard input by default."),
]
Output = Annotated[
    Path | None,
    Option(
        "-o",
        "--output",
        help="File for the embeddings, one per text: .npy (float32 array) or .jsonl; by default "
        "JSON lines on standard output.",
    ),
]
Pooling = Annotated[
    str | None,
    Option(
        "--pooling",
        help="cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken; the model's own by "
        "default.",
    ),
]
PromptName = Annotated[
    str | None,
    Option("--prompt-name", help="Name of a prompt of the model to put before each text."),
]
Type = Annotated[
    str | None, Option("--type", help="Block format to quantise matrices to while loading.")
]


@verb
def embed(
    model: Model,
    file: TextFile = None,
    output: Output = None,
    pooling: Pooling = None,
    prompt: PromptName = None,
    raw: Annotated[bool, Option("--no-normalize", help="Do not scale to length one.")] = False,
    refuse: Annotated[
        bool, Option("--no-truncate", help="Report texts that are too long as an error.")
    ] = False,
    kind: Type = None,
    device: Device = "auto",
    threads: Threads = 0,
    model_def: ModelDef = None,
) -> None:
    """Compute the embeddings of the lines of a text file.

    graphllm embed minilm -f lines.txt -o vectors.npy
    """
    if output is not None:
        if output.suffix not in (".npy", ".jsonl"):
            raise RequestError(f"-o {output}: the name must end in .npy or .jsonl")
        check_writable(output)
    texts = _lines(read_text(file))
    from ..embedding import EmbeddingModel
    from ..progress import progress_line
    from ..terminal import note

    with progress_line() as progress:
        loaded = EmbeddingModel.load(
            model, model_def=model_def, type=kind, device=device, threads=threads, progress=progress
        )
    with loaded:
        for line in loaded.misses():
            note(f"note: {line}")
        vectors = loaded.embed(
            texts, normalize=not raw, pooling=pooling, prompt=prompt, truncate=not refuse
        )
    if output is None:
        for vector in vectors:
            show_json(_numbers(vector))
        return
    _write(output, vectors)
    show(f"{output}: {len(vectors)} embeddings of {vectors.shape[1]} columns")


def _lines(text: str) -> list[str]:
    """Return the lines of a text; empty lines count, the end of the last one does not."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _numbers(vector: np.ndarray) -> list[float]:
    """Return numbers for JSON, with the digits that distinguish any two float32."""
    return [float(f"{x:.9g}") for x in vector]


def _write(path: Path, vectors: np.ndarray) -> None:
    """Write the embeddings in the format that the name states. OutputError."""
    if path.suffix == ".jsonl":
        write_file(path, "".join(f"{json.dumps(_numbers(vector))}\n" for vector in vectors))
        return
    try:
        with path.open("wb") as file:
            np.save(file, vectors)
    except OSError as error:
        raise OutputError(f"-o {path}: {error.strerror}") from None
