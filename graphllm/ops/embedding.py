"""Embedding: rows of a table by token id."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ModelFileError
from ..formats import ROW_FORMATS, WEIGHT_FORMATS, blocks_of
from ..formats.quantization import Blocks
from ..graph.dtype import BF16, F16, F32, I32, DType
from ..graph.op import Arg, Cost, Rng, Sample, Samples, Shape, expect, grid, op, out
from ..graph.tensor import Env, Meta, current_scope


def expect_weight(w: Meta, axes: int = 2) -> None:
    """Check in a shape rule that ``w`` has a weight format and ``axes`` axes.

    ModelFileError for a quantised format that is not supported.
    """
    if w.dtype.quantised and w.dtype.name not in WEIGHT_FORMATS:
        where, known = current_scope() or "w", ", ".join(WEIGHT_FORMATS)
        raise ModelFileError(f"{where}: weights in {w.dtype} are not supported, only in {known}")
    expect("w", w, axes, *WEIGHT_FORMATS)


def _infer(ids: Meta, w: Meta) -> Meta:
    expect("ids", ids, 1, "i32")
    expect_weight(w)
    return out((ids.shape[0], w.shape[1]))


def _cost(out: Meta, ids: Meta, w: Meta, *, env: Env) -> Cost:
    rows = ids.size  # only these rows of the table are read
    return Cost(out.size, rows * w.dtype.row_nbytes(w.inner[0]) + ids.nbytes + out.nbytes)


def _sample(rows: int, shape: Shape, kind: DType) -> Sample:
    def tokens(rng: Rng, count: Shape) -> np.ndarray:
        ids = rng.integers(0, shape[0], count)
        ids[-1:] = shape[0] - 1  # the last row, where a kernel may read past the end
        return ids

    return Sample((Arg(("T",), I32, make=tokens), Arg(shape, kind, leaf="weight")), {}, {"T": rows})


@op(
    "embedding",
    infer=_infer,
    cost=_cost,
    tol={"f32": 0.0},
    samples=Samples(lambda: [
        *grid(_sample, rows=(0, 1, 9), shape=((1, 1), (13, 63), (50, 640)), kind=(F32, F16, BF16)),
        *grid(_sample, rows=(0, 1, 9), shape=((1, 32), (13, 96), (50, 640)),
              kind=blocks_of(32, common=True)),
        *grid(_sample, rows=(0, 1, 9), shape=((1, 256), (37, 768)),
              kind=blocks_of(256, common=True)),
        *grid(_sample, rows=(1, 9), shape=((13, 96), (50, 640)),
              kind=blocks_of(32, common=False)),
        *grid(_sample, rows=(1, 9), shape=((37, 768),),
              kind=blocks_of(256, common=False)),
        *grid(_sample, rows=(0, 1, 9), shape=((1, 128), (50, 640)),
              kind=[form.dtype for form in ROW_FORMATS.values()]),
    ]),
)  # fmt: skip
def embedding(ids: np.ndarray, w: Any) -> np.ndarray:
    """Rows of the table as float32. ids [T] i32 below V, w [V, D] any weight format -> [T, D].

    Only the selected rows are read, so the table need not be in memory. Quantised formats are
    dequantised exactly as by `graphllm.formats.quantization`.
    """
    rows = w[ids]
    return rows.dequantise() if isinstance(rows, Blocks) else rows.astype(np.float32)
