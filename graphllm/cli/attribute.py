"""The verb ``attribute``: what quantising each tensor of a model costs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Annotated

from ..errors import RequestError
from ..progress import progress_line
from .declarations import Option, verb
from .options import (
    AsJson,
    KvType,
    Model,
    PlacementOptions,
    TextFile,
    Threads,
    read_text_file,
    target_size,
)
from .output import show_json, show_table


@verb
def attribute(
    model: Model,
    placement: PlacementOptions,
    file: TextFile = None,
    against: Annotated[
        str | None,
        Option(
            "--against", metavar="MODEL", help="Quantised model to take tensors from, not --type."
        ),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            "--target-size",
            metavar="SIZE",
            help="Also propose formats for a GGUF file of at most this size, such as 1.1GB.",
            show_default=False,
        ),
    ] = None,
    pattern: Annotated[
        str, Option("--tensors", metavar="PATTERN", help="Pattern of the tensors to measure.")
    ] = "*",
    context: Annotated[int, Option("-c", "--ctx-size", help="Tokens of a chunk.")] = 512,
    chunks: Annotated[int, Option("--chunks", help="Maximum number of chunks of the text.")] = 1,
    threads: Threads = 0,
    kv_type: KvType = None,
    as_json: AsJson = False,
) -> None:
    """Rank the tensors of a model by what quantising each one costs.

    Each tensor is quantised by itself: to the format --type, or as it is in
    the model --against. The KL divergence from MODEL is measured as by
    `perplexity`, and divided by the bytes saved. The model is loaded once for
    each tensor.

    graphllm attribute f16.gguf -f book.txt --type q4_k

    graphllm attribute f16.gguf -f book.txt --against q4_k_m.gguf --tensors '*.mlp.*'

    graphllm attribute f16.gguf -f book.txt --type q4_0 --target-size 1.1GB
    """
    from ..checkpoints.checkpoint import open_checkpoint
    from ..checkpoints.mixed_weights import quantized_checkpoint
    from ..quality.attribution import attribute as attributed
    from ..quality.mix_search import propose_mix
    from ..quality.perplexity import chunks_per_step

    kind, placement.type = placement.type, None
    if (kind is None) == (against is None):
        raise RequestError("give --type FORMAT, or --against MODEL")
    if file is None:
        raise RequestError("-f FILE is missing: the text to measure the divergence on")
    size = None if target is None else target_size(model, target)
    text = read_text_file(file)
    base = open_checkpoint(model)
    other = quantized_checkpoint(base, kind) if kind is not None else open_checkpoint(against or "")
    options = placement.arguments() | {"threads": threads, "kv_type": kv_type}
    options["max_sequences"] = chunks_per_step(context)
    with progress_line() if sys.stderr.isatty() else nullcontext() as show_bar:

        def progress(done: int, total: int, name: str) -> None:
            if show_bar is not None:
                show_bar("tensors", done, total, name)

        found = attributed(base, other, text, context, chunks, pattern, options, progress)
    mix = size and propose_mix(
        model, found, size, text, context=context, chunks=chunks,
        options={"device": placement.device, "threads": threads},
    )  # fmt: skip
    if as_json:
        show_json({"model": model, **found.as_dict(), **({"mix": mix.as_dict()} if mix else {})})
    else:
        show_table("\n\n".join(each.table() for each in (found, mix) if each))
