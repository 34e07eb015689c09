"""The verb ``embed``: embeddings of the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np

from ..errors import RequestError
from .declarations import Option, verb
from .encoder_options import EncoderOptions, NoTruncate, TextFile, text_lines
from .options import Model
from .output import check_writable, output_file, show, show_json, write_file

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


@verb
def embed(
    model: Model,
    options: EncoderOptions,
    file: TextFile = None,
    output: Output = None,
    pooling: Pooling = None,
    prompt: PromptName = None,
    truncate_dim: Annotated[
        int | None, Option("--truncate-dim", help="Number of columns to keep; all by default.")
    ] = None,
    raw: Annotated[bool, Option("--no-normalize", help="Do not scale to length one.")] = False,
    refuse: NoTruncate = False,
) -> None:
    """Compute the embeddings of the lines of a text file.

    graphllm embed minilm -f lines.txt -o vectors.npy
    """
    if output is not None:
        from ..checkpoints.model_files import check_not_input

        if output.suffix not in (".npy", ".jsonl"):
            raise RequestError(f"-o {output}: the name must end in .npy or .jsonl")
        check_writable(output)
        check_not_input(
            output,
            models=[model],
            files=[("the file of the texts", file), ("the model file", options.model_def)],
            flag="-o",
        )
    texts = text_lines(file)
    from ..embedding import EmbeddingModel

    with options.load(EmbeddingModel, model) as loaded:
        vectors = loaded.embed(
            texts,
            normalize=not raw,
            pooling=pooling,
            prompt=prompt,
            truncate_dim=truncate_dim,
            truncate=not refuse,
        )
    if output is None:
        for vector in vectors:
            show_json(_numbers(vector))
        return
    _write(output, vectors)
    show(f"{output}: {len(vectors)} embeddings of {vectors.shape[1]} columns")


def _numbers(vector: np.ndarray) -> list[float]:
    """Return numbers for JSON, with the digits that distinguish any two float32."""
    return [float(f"{x:.9g}") for x in vector]


def _write(path: Path, vectors: np.ndarray) -> None:
    """Write the embeddings in the format that the name states. OutputError."""
    if path.suffix == ".jsonl":
        write_file(path, "".join(f"{json.dumps(_numbers(vector))}\n" for vector in vectors))
        return
    with output_file(path) as file:
        np.save(file, vectors)
