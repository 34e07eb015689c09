"""Calibration: statistics of the inputs of a model's matrices over a text.

They are llama.cpp's importance matrix (`tools/imatrix`): the sum of the squares of each column of a
matrix's input, over all tokens of chunks that are computed with an empty cache. The inputs of an
expert are those of the tokens that were routed to it. The output matrix is left out, and so are
embeddings, whose rows are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..arguments import Integer, Optional, Rule, check
from ..checkpoints.checkpoint import open_checkpoint
from ..engine.trace import Tracer
from ..errors import NumericError
from ..loading.loaded_model import LoadedModel
from ..quantize.driver import open_source
from ..quantize.imatrix import ImportanceMatrix, InputStatistics
from ..quantize.linear_sites import linear_sites
from .perplexity import MIN_CONTEXT, split_text

CONTEXT = 512  # tokens of a chunk, as in llama.cpp

_S = TypeVar("_S", bound=InputStatistics)
Empty = Callable[[tuple[int, int]], _S]  # of a weight's number of matrices and of columns

# Called with the number of chunks done, and of all chunks.
ChunksProgress = Callable[[int, int], None]


def calibrate(
    model: str | Path, text: str | Sequence[int], *, context: int = CONTEXT,
    chunks: int | None = None, options: Mapping[str, Any] | None = None,
    progress: ChunksProgress = lambda done, total: None,
) -> ImportanceMatrix:  # fmt: skip
    """Return the importance matrix of a model that `quantize` reads, by GGUF's tensor names.

    Args:
        model: the model, see `graphllm.quantize.quantize`.
        text: a text or token ids, at least two chunks.
        context: tokens of a chunk.
        chunks: maximum number of chunks.
        options: keyword arguments of `LoadedModel.load`.
        progress: called after each chunk.

    Raises:
        RequestError: an argument is invalid, or the text too short.
        ModelFileError: the model cannot be quantised or run.
        NumericError: an input is infinite or NaN.
    """
    source = open_source(model)  # first, since it refuses models that cannot be written
    try:
        found, count = observe(
            source.path, text, InputStatistics.empty, context=context, chunks=chunks,
            options=options, progress=progress,
        )  # fmt: skip
        entries = dict[str, InputStatistics]()
        for weight, statistics in found.items():
            for name, own in statistics.split(source.stored_names(weight)):
                entries.setdefault(name, own)  # matrices with a common input may be one tensor
        return ImportanceMatrix(entries, count, context)
    finally:
        source.close()


def observe(
    path: Path, text: str | Sequence[int], empty: Empty[_S], *, context: int = CONTEXT,
    chunks: int | None = None, options: Mapping[str, Any] | None = None,
    progress: ChunksProgress = lambda done, total: None,
) -> tuple[dict[str, _S], int]:  # fmt: skip
    """Run a model on a text; return statistics of the inputs of matrices, and the number of chunks.

    Args:
        path: the model's file or directory.
        empty: returns statistics of no rows, such as `InputStatistics.empty`.
        text, context, chunks, options, progress: see `calibrate`.

    Raises:
        RequestError, ModelFileError, NumericError: see `calibrate`.
    """
    rules: dict[str, Rule] = {"context": Integer(MIN_CONTEXT), "chunks": Optional(Integer(1))}
    check(rules, {"context": context, "chunks": chunks})
    file = open_checkpoint(path)
    try:
        given = {**(options or {}), "context": context, "max_sequences": 1}
        with LoadedModel.load(file, **given) as llm:
            parts = split_text(llm, text, context, chunks)
            return collect_statistics(llm, parts, empty, progress), len(parts)
    finally:
        file.close()


def collect_statistics(
    llm: LoadedModel, chunks: np.ndarray, empty: Empty[_S],
    progress: ChunksProgress = lambda done, total: None,
) -> dict[str, _S]:  # fmt: skip
    """Return statistics of the inputs of matrices, by canonical names of the weights.

    Args:
        llm: the model, which runs no other request meanwhile.
        chunks: token ids int32 [chunks, context], see `split_text`.
        empty: returns statistics of no rows, such as `InputStatistics.empty`.
        progress: called after each chunk.

    Raises:
        NumericError: an input is infinite or NaN.
    """
    sites = list(linear_sites(llm.engine.outputs["hidden"]))
    found = {site.input: empty(site.shape) for site in sites}
    nodes = dict.fromkeys(node for pair in found for node in pair if node is not None)
    names = {node: f"value {index}" for index, node in enumerate(nodes)}
    tracer = Tracer(llm.engine, {name: node for node, name in names.items()})
    with llm.engine.lock.hold("calibration"):
        for done, chunk in enumerate(chunks, 1):
            with closing(tracer.steps(chunk.tolist())) as steps:
                for values in steps:
                    for (x, ids), own in found.items():
                        chosen = None if ids is None else values[names[ids]]
                        own.add(values[names[x]], chosen)
            for site in sites:
                if not np.isfinite(found[site.input].sums).all():
                    raise NumericError(f"{site.weight}: its input has an infinite value or NaN")
            progress(done, len(chunks))
    return {site.weight: found[site.input] for site in sites}
