"""Mix of formats for a file of a given size, with the least expected KL divergence.

`attribution` measures what one format of each tensor costs. The divergence grows with the square of
the change of a matrix's output, whose expected value follows from the rounding errors of the
weights and the importance of the columns. So one measurement gives the cost of all formats of a
tensor. Starting from the smallest formats, the bytes are spent on the tensor whose next larger
format saves most divergence per byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.gguf_writer import TensorEntry, file_bytes
from ..checkpoints.mixed_weights import quantized_checkpoint
from ..errors import RequestError
from ..formats.quantization import Blocks, dequantise, quantise
from ..graph.dtype import DTYPES, DType
from ..quantize.driver import expert_count, file_metadata, open_source
from ..quantize.encode import encode_blocks
from ..quantize.imatrix import ImportanceMatrix
from ..quantize.mixes import FILE_TYPES, MEASURED, is_quantised, ladder
from ..quantize.source import Source
from .attribution import Attribution, TensorProgress, attribute
from .calibration import calibrate

Array = np.ndarray
_ROWS = 96  # of a matrix, whose errors stand for those of all rows


@dataclass(frozen=True)
class Choice:
    """A format of a tensor, and the KL divergence that it is expected to cost."""

    dtype: DType
    nbytes: int
    kld: float


@dataclass(frozen=True)
class Mix:
    """A format for each matrix.

    Attributes:
        kind: the type of files whose format has the most bytes.
        formats: names of formats by GGUF's tensor names.
        file_bytes: size of the file.
        expected_kld: expected mean KL divergence, the sum of those of the tensors.
        additivity: measured divergence of the model with all tensors quantised, over the sum of
            those of single tensors; None if only some were measured.
    """

    kind: str
    formats: Mapping[str, str]
    file_bytes: int
    expected_kld: float
    additivity: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm attribute --json`` prints as ``mix``."""
        return {
            "file_bytes": self.file_bytes, "expected_kld": self.expected_kld,
            "additivity": self.additivity, "formats": dict(self.formats),
        }  # fmt: skip

    def summary(self) -> str:
        """Return a line with the size and the expected divergence."""
        found = f"mix: {self.file_bytes / 1e6:.1f} MB, expected KLD {self.expected_kld:.6f}"
        if self.additivity is None:
            return found
        return f"{found} (all matrices in one format: {self.additivity:.2f} times the sum of each)"

    def table(self) -> str:
        """Return the summary, and a line for each format with its tensors."""
        names: dict[str, list[str]] = {}
        for name, kind in self.formats.items():
            names.setdefault(kind, []).append(name)
        kinds = sorted(names, key=lambda kind: _bits(DTYPES[kind]))
        lines = (f"{kind:>8}: {', '.join(names[kind])}" for kind in kinds)
        return "\n".join((self.summary(), *lines))


def _bits(dtype: DType) -> float:
    return dtype.nbytes / dtype.block


def check_target(model: str | Path, target_bytes: int) -> None:
    """Raise RequestError if no mix of block formats is that small. Nothing is measured.

    ModelFileError: the model cannot be quantised.
    """
    source = open_source(model)
    try:
        smallest = dict[str, str]()
        for each in source.tensors:
            forms = ladder(each.shape[-1]) if is_quantised(each.name, each.shape) else []
            if forms and not each.dtype.quantised:
                smallest[each.name] = min(forms, key=_bits).name
        if not smallest:
            raise RequestError(f"{source.path}: no matrix can be quantised")
        if (least := _size(source, smallest)) > target_bytes:
            raise RequestError(
                f"a size of {target_bytes / 1e6:.1f} MB is too small: the smallest formats make "
                f"{least / 1e6:.1f} MB"
            )
    finally:
        source.close()


def search_mix(
    model: str | Path, text: str | Sequence[int], importance: ImportanceMatrix, target_bytes: int,
    options: Mapping[str, Any] | None = None,
    progress: TensorProgress = lambda done, total, name: None,
) -> Mix:  # fmt: skip
    """Measure what quantising each matrix costs on a chunk of ``text``, and return the mix.

    The model is loaded once for each matrix. See `find_mix` and `attribution.attribute`.
    """
    base = open_checkpoint(model)
    try:
        other = quantized_checkpoint(base, MEASURED)
        given = {**(options or {}), "linear": "float"}  # activations are not what is compared
        found = attribute(base, other, text, importance.context, 1, "*", given, progress)
    finally:
        base.close()
    return find_mix(model, found, importance.weights(), target_bytes)


def propose_mix(
    model: str | Path, found: Attribution, target_bytes: int, text: str | Sequence[int],
    **calibration: Any,
) -> Mix:  # fmt: skip
    """As `find_mix`, with the importance of columns on a text; ``calibration``: see `calibrate`."""
    return find_mix(model, found, calibrate(model, text, **calibration).weights(), target_bytes)


def find_mix(
    model: str | Path, found: Attribution, importance: Mapping[str, Array], target_bytes: int
) -> Mix:
    """Return the mix of a model for a file of at most ``target_bytes``.

    Args:
        model: the model, see `graphllm.quantize.quantize`.
        found: costs of its float matrices in any block format. Other tensors stay as stored.
        importance: importance of columns by GGUF's tensor names, see `ImportanceMatrix.weights`.
        target_bytes: size of the file with all metadata.

    Raises:
        RequestError: no mix of the measured matrices is that small, see `check_target`.
        ModelFileError: the model cannot be quantised.
    """
    source = open_source(model)
    try:
        measured = _measured(source, found)
        matrices = [t for t in source.tensors if is_quantised(t.name, t.shape)]
        choices = {
            each.name: _choices(source, each, *measured[each.name], importance.get(each.name))
            for each in matrices if each.name in measured and ladder(each.shape[-1])
        }  # fmt: skip
        if not choices:
            raise RequestError("no measured matrix can be stored in a block format")
        formats = {each.name: each.dtype.name for each in matrices}
        smallest = {name: min(every, key=_bytes) for name, every in choices.items()}
        fixed = _size(source, _named(smallest)) - sum(map(_bytes, smallest.values()))
        taken = _best(choices, target_bytes - fixed)
        if not taken:
            raise RequestError(
                f"no mix of the {len(choices)} measured matrices makes {target_bytes / 1e6:.1f} MB"
            )
        formats |= _named(taken)
        size = _size(source, formats)
    finally:
        source.close()
    return Mix(_kind(taken), formats, size, _total(taken), _additivity(found))


def _additivity(found: Attribution) -> float | None:
    """See `Mix`."""
    total = math.fsum(each.mean_kld for each in found.tensors)
    complete = sum(each.saved_bytes for each in found.tensors) == found.saved_bytes
    return found.mean_kld / total if complete and total else None


def _bytes(choice: Choice) -> int:
    return choice.nbytes


def _total(taken: Mapping[str, Choice]) -> float:
    return math.fsum(choice.kld for choice in taken.values())


def _named(taken: Mapping[str, Choice]) -> dict[str, str]:
    return {name: choice.dtype.name for name, choice in taken.items()}


def _measured(source: Source, found: Attribution) -> dict[str, tuple[DType, float]]:
    """Return the format and the divergence that were measured, by stored names."""
    measured: dict[str, tuple[DType, float]] = {}
    for cost in found.tensors:
        names = source.stored_names(cost.name)
        for name in names:  # several weights may be one tensor, and experts a tensor each
            kld = measured[name][1] if name in measured else 0.0
            measured[name] = DTYPES[cost.type], kld + cost.mean_kld / len(names)
    return measured


def _choices(
    source: Source, entry: TensorEntry, kind: DType, kld: float, importance: Array | None
) -> list[Choice]:
    """Return the block formats of a tensor with what each is expected to cost.

    ``kld``: measured divergence in the format ``kind``, as it is encoded on load.
    """
    samples = list(_samples(source, entry, importance))
    source.release(entry.name)
    error = sum(_error(x, dequantise(quantise(x, kind), kind), w) for x, w in samples)
    found = []
    for dtype in ladder(entry.shape[-1]):
        encoded = (dequantise(encode_blocks(x, dtype, w), dtype) for x, w in samples)
        made = sum(_error(x, y, w) for (x, w), y in zip(samples, encoded))
        share = made / error if error else 0.0
        size = TensorEntry(entry.name, entry.shape, dtype).padded_bytes
        found.append(Choice(dtype, size, kld * share))
    return found


def _samples(
    source: Source, entry: TensorEntry, importance: Array | None
) -> Iterator[tuple[Array, Array | None]]:
    """Yield evenly spaced rows as float32 [n, columns], with the importance of their columns."""
    values = Blocks(source.raw(entry.name), entry.dtype, entry.shape[-1])
    experts = expert_count(entry)
    weights = [None] * experts if importance is None else [*importance.reshape(experts, -1)]
    rows = len(values) // experts
    count = max(1, _ROWS // experts)
    for expert, weight in enumerate(weights):
        chosen = expert * rows + np.unique(np.linspace(0, rows - 1, min(rows, count)).astype(int))
        yield np.ascontiguousarray(values[chosen].dequantise()), weight


def _error(x: Array, y: Array, importance: Array | None) -> float:
    columns = np.square(x - y).sum(axis=0, dtype=np.float64)
    return float(columns.sum() if importance is None else columns @ importance)


def _convex(choices: Sequence[Choice]) -> list[Choice]:
    """Return the lower convex hull, by size: each further byte saves less than those before."""
    hull: list[Choice] = []
    for each in sorted(choices, key=lambda c: (c.nbytes, c.kld)):
        if hull and each.kld >= hull[-1].kld:
            continue  # larger, and no better
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], each):
            hull.pop()
        hull.append(each)
    return hull


def _gain(small: Choice, large: Choice) -> float:
    """Return the divergence that a byte saves."""
    return (small.kld - large.kld) / (large.nbytes - small.nbytes)


def _size(source: Source, formats: Mapping[str, str]) -> int:
    entries = [
        TensorEntry(t.name, t.shape, DTYPES[formats[t.name]] if t.name in formats else t.dtype)
        for t in source.tensors
    ]
    return file_bytes(file_metadata(source, 0), entries)


def _best(choices: Mapping[str, list[Choice]], budget: int) -> dict[str, Choice]:
    """Return the choices of at most ``budget`` bytes with the least divergence.

    A greedy solution is close to the best one as long as steps are small. A large tensor, such as
    an embedding, has large steps, so each of its formats is tried.
    """
    largest = max(choices, key=lambda name: max(c.nbytes for c in choices[name]))
    hulls = {name: _convex(every) for name, every in choices.items()}
    found = (_spend({**hulls, largest: [choice]}, budget) for choice in choices[largest])
    tried = [taken for taken in found if taken]
    return min(tried, key=_total, default={})


def _spend(hulls: Mapping[str, list[Choice]], budget: int) -> dict[str, Choice]:
    """Return a choice for each tensor by greedy steps; none if the smallest ones are too large."""
    taken = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(choice.nbytes for choice in taken.values())
    steps = sorted(
        ((_gain(small, large), name, large) for name, hull in hulls.items()
         for small, large in pairwise(hull)),
        key=lambda step: -step[0],
    )  # fmt: skip
    full = set[str]()
    for _, name, large in steps:
        more = large.nbytes - taken[name].nbytes
        if name in full or more > left:
            full.add(name)  # its further formats are larger still
            continue
        taken[name], left = large, left - more
    return taken if left >= 0 else {}


def _kind(taken: Mapping[str, Choice]) -> str:
    """Return the type of files of the format with the most bytes."""
    sizes: dict[str, int] = {}
    for each in taken.values():
        sizes[each.dtype.name] = sizes.get(each.dtype.name, 0) + each.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    return next(kind.name for kind in FILE_TYPES.values() if kind.format == most)
