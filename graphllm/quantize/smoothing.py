"""SmoothQuant: move outliers of activations into the weights (Xiao et al. 2023, section 4).

Columns of a matrix are multiplied by factors, and what makes its input is divided by them: the norm
before it, or the rows of the matrix before it. Products stay the same in exact arithmetic, but
scales per token of the input get smaller.

The factor of channel j is max|x_j|^a / max|w_j|^(1 - a), divided by the geometric mean of all. The
strength a is the one of `_STRENGTHS` with the least expected error of the product, where rounding
errors count as uniform and independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..formats.quantization import Blocks
from ..graph.rewrite import toposort
from ..graph.tensor import WEIGHT, Tensor
from .imatrix import InputStatistics

Array = np.ndarray

_STRENGTHS = (0.4, 0.5, 0.6, 0.7)
# A channel that calibration hardly excites may be large in another text, so factors are bounded.
_LARGEST_FACTOR = 256.0
_NORMS = ("rms_norm", "layer_norm")
_ROWS, _ROWS_AT_ONCE = 128, 8  # rows kept of an input, and of each step


@dataclass(frozen=True)
class ChannelStatistics(InputStatistics):
    """Statistics of the rows of a linear's input; those of experts have the sums only.

    Attributes:
        largest: largest magnitude of each column [columns].
        rows: some of the rows [n, columns].
    """

    largest: Array
    rows: list[Array]

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> ChannelStatistics:
        """See `InputStatistics.empty`."""
        of_none = InputStatistics.empty(shape)
        return cls(of_none.sums, of_none.counts, np.zeros(shape[1], np.float32), [])

    def add(self, x: Array, ids: Array | None) -> None:
        """See `InputStatistics.add`."""
        super().add(x, ids)
        if ids is not None or x.ndim != 2:
            return
        np.maximum(self.largest, np.abs(x).max(axis=0), out=self.largest)
        step = -(-len(x) // _ROWS_AT_ONCE)
        kept = x[step // 2 :: step]  # without the first token of a text, whose values are unusual
        if len(self.rows) + len(kept) <= _ROWS:
            self.rows.extend(kept.copy())


@dataclass(frozen=True, eq=False)
class Fold:
    """Matrices with a common input whose columns can be scaled.

    Attributes:
        matrices: canonical names of the matrices [N, K], whose columns are multiplied.
        producers: weights that make the input, and are divided: a norm's vectors, or a matrix and
            perhaps its bias.
        channels: index of the row of the producers that makes each column of the input [K].
    """

    matrices: tuple[str, ...]
    producers: tuple[str, ...]
    channels: Array


def find_folds(hidden: Tensor) -> list[Fold]:
    """Return the folds of a model's graph, those into matrices before those into norms.

    These are norms that only linears read; the up projection of a gated MLP, before the down
    projection; and values, before the output projection of attention. Experts have none.

    Args:
        hidden: hidden states of all tokens.
    """
    order = toposort([hidden])
    users = Counter(source for node in order for source in node.sources)
    uses = Counter(source.name for node in order for source in node.sources if source.op == WEIGHT)
    linears: dict[Tensor, list[Tensor]] = {}  # by their input
    for node in order:
        if node.op == "linear":
            linears.setdefault(node.sources[0], []).append(node.sources[1])
    found: dict[bool, list[Fold]] = {False: [], True: []}  # by whether a norm makes the input
    for x, matrices in linears.items():
        maker, channels = _maker(x, users)
        own = () if maker is None else maker.sources[1:]
        once = all(leaf.op == WEIGHT and uses[leaf.name] == 1 for leaf in (*matrices, *own))
        if own and once and users[x] == len(matrices):
            names, producers = (tuple(leaf.name for leaf in each) for each in (matrices, own))
            found[x.op in _NORMS].append(Fold(names, producers, channels))
    return found[False] + found[True]


def _maker(x: Tensor, users: Counter[Tensor]) -> tuple[Tensor | None, Array]:
    """Return the norm or linear whose weights can scale the columns of ``x``, or None, and the
    index of its output column for each of them."""
    columns = np.arange(math.prod(x.meta.inner))
    if x.op in _NORMS:
        return x, columns
    if x.op == "mul":
        up = x.sources[1]
        return (up if up.op == "linear" and users[up] == 1 else None), columns
    attention = _whole(x, users)
    written = attention.src[2] if attention is not None and attention.op == "attention" else None
    if written is None or written.op != "kv_write" or users[written] != 1:
        return None, columns
    values = _whole(written.sources[1], users)
    if values is None or values.op != "linear":
        return None, columns
    kv_heads, width = written.meta.inner
    head, column = columns // width, columns % width
    return values, head // (len(columns) // width // kv_heads) * width + column


def _whole(x: Tensor, users: Counter[Tensor]) -> Tensor | None:
    """Return the node of which ``x`` is another shape, if nothing else reads it."""
    base = x.base
    same = x.meta.inner_contiguous and math.prod(x.meta.inner) == math.prod(base.meta.inner)
    return base if same and users[base] == 1 else None


@dataclass(frozen=True)
class Smoothing:
    """Factors by canonical names of weights.

    Attributes:
        columns: factors of the columns of matrices [K].
        rows: divisors of the rows of matrices, or of the elements of vectors [N].
    """

    columns: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, Array] = field(default_factory=dict)

    def apply(self, name: str, x: Array, first: int) -> Array:
        """Return rows of a matrix, float32 [n, K] from row ``first`` on, with factors applied."""
        if (divisors := self.rows.get(name)) is not None:
            x = x / divisors[first : first + len(x), None]
        if (factors := self.columns.get(name)) is not None:
            x = x * factors
        return x


def smooth(
    folds: Sequence[Fold],
    matrix: Callable[[str], Blocks],
    inputs: Mapping[str, ChannelStatistics],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Smoothing:
    """Return the factors of all folds.

    Args:
        folds: result of `find_folds`.
        matrix: returns a matrix by its canonical name.
        inputs: statistics of the inputs of matrices.
        progress: called with the number of folds done, and of all.
    """
    found = Smoothing()
    for done, fold in enumerate(folds, 1):
        factors = _FoldFactors(fold, matrix, found).best(inputs[fold.matrices[0]])
        found.columns.update(dict.fromkeys(fold.matrices, factors[fold.channels]))
        found.rows.update(dict.fromkeys(fold.producers, factors))
        progress(done, len(folds))
    return found


class _FoldFactors:
    """Chooses the factors of a fold, from statistics of its matrices and of their input."""

    def __init__(self, fold: Fold, matrix: Callable[[str], Blocks], done: Smoothing) -> None:
        self._fold, self._matrix, self._done = fold, matrix, done
        self._largest = np.zeros(len(fold.channels), np.float32)
        self._squares = np.zeros(len(fold.channels))
        for tile in self._tiles():
            np.maximum(self._largest, np.abs(tile).max(axis=0), out=self._largest)
            self._squares += np.einsum("nk,nk->k", tile, tile)

    def _tiles(self) -> Iterator[Array]:
        """Yield the matrices as float32 [n, K], with the divisors of their rows applied."""
        for name in self._fold.matrices:
            for first, tile in self._matrix(name).tiles():
                yield self._done.apply(name, tile, first)

    def best(self, inputs: ChannelStatistics) -> Array:
        """Return the factors with the least expected error, float32 [channels]."""
        choices = [self._choice(inputs.largest, strength) for strength in _STRENGTHS]
        scales = [choice[self._fold.channels] for choice in choices]
        # A rounding error has the variance step^2 / 12, and a step is proportional to the largest
        # magnitude of its row: constant factors are left out.
        row_steps = np.zeros(len(choices))
        for tile in self._tiles():
            size = np.abs(tile)
            for i, scale in enumerate(scales):
                row_steps[i] += np.square((size * scale).max(axis=1)).sum()
        errors, mean_squares, rows = [], inputs.mean()[0], np.abs(inputs.rows)
        for scale, steps in zip(scales, row_steps, strict=True):
            token_steps = np.square((rows / scale).max(axis=1)).mean()
            of_inputs = token_steps * (self._squares * np.square(scale)).sum()
            of_matrices = steps * (mean_squares / np.square(scale)).sum()
            errors.append(of_inputs + of_matrices)
        return choices[int(np.argmin(errors))]

    def _choice(self, inputs: Array, strength: float) -> Array:
        """Return the factors of SmoothQuant's formula; 1 for channels that are always zero."""
        channels = self._fold.channels
        x, w = np.zeros((2, channels.max() + 1), np.float32)
        np.maximum.at(x, channels, inputs)
        np.maximum.at(w, channels, self._largest)
        live = (x > 0) & (w > 0)
        logs = np.zeros(len(x))
        logs[live] = strength * np.log(x[live]) - (1 - strength) * np.log(w[live])
        logs[live] -= logs[live].mean() if live.any() else 0
        bound = math.log(_LARGEST_FACTOR)
        return np.exp(np.clip(logs, -bound, bound)).astype(np.float32)
