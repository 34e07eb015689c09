"""A linear stored as packed integers, scales and zero points; its repacking into blocks."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from ...errors import ModelFileError
from ...graph.dtype import F16, I32
from ...weights.safetensors import Safetensors
from .blocks import block_dtype, make_blocks, reorder, to_float16, unpack
from .settings import GROUP
from .stored_linear import StoredLinear

Array = np.ndarray
_TILE = 1 << 20  # elements repacked at once, so that intermediate results stay in a cache
_MIN_ROWS = 512  # of a tile; AWQ stores the transpose with 8 rows a word, so this is 256 bytes


class PackedLinear(StoredLinear):
    """A weight [N, K] as packed integers. Subclasses state the layout of a method.

    Attributes:
        group: Elements of a row that share a scale; the last group of a row may be smaller.
    """

    scale_part: str  # suffixes of the tensors, for error messages
    zero_part: str

    def __init__(
        self, file: Safetensors, module: str, parts: tuple[str, ...], bits: int, symmetric: bool
    ) -> None:
        super().__init__(file, module, parts)
        self.bits, self.symmetric = bits, symmetric
        self.dtype = block_dtype(bits, symmetric)
        self.per_word = 32 // bits
        self.group = 0
        self._stored_groups: Array | None = None  # of each column
        self._groups: Array | None = None  # the same, if the weight is float16

    def set_shape(self, rows: int, columns: int, group_size: int, part: str) -> None:
        """Set the shape and the group; ``part`` is the packed tensor, for error messages."""
        if columns % GROUP or not rows or not columns:
            text = f"is a weight of {rows} x {columns}, whose rows are not whole blocks of {GROUP}"
            raise self.error(part, text)
        self.shape = (rows, columns)
        self.group = columns if group_size == -1 else min(group_size, columns)

    @property
    def groups(self) -> int:
        """Number of groups of a row."""
        return -(-self.shape[1] // self.group)

    @abstractmethod
    def words(self, rows: slice) -> Array:
        """Return unsigned integers of some rows: uint32 [n, K * bits / 32], low bits first."""

    @abstractmethod
    def scales(self) -> Array:
        """Return the scale of each group, float32 [N, groups]."""

    @abstractmethod
    def zeros(self) -> Array | None:
        """Return the zero point of each group, uint8 [N, groups]; None stands for the middle."""

    def check_values(self) -> None:
        """Check the values of tensors other than integers, scales and zero points."""

    def raw(self) -> Array:
        """Return the weight's blocks, read-only uint8 [N, row_bytes], repacked by tiles of rows."""
        self.check_values()
        rows, columns = self.shape
        blocks = columns // GROUP
        d, zeros = self._float16_scales(), self._zeros()
        made = np.empty((rows, self.dtype.row_nbytes(columns)), np.uint8)
        step = max(_MIN_ROWS, _TILE // columns // 8 * 8)
        for start in range(0, rows, step):
            tile = slice(start, min(rows, start + step))
            if self._groups is not None:
                made[tile] = self._floats_of(tile, d, zeros)
                continue
            scale, zero = (
                np.repeat(each[tile], self.group // GROUP, axis=1)[:, :blocks]
                for each in (d, zeros)
            )
            words = self.words(tile)
            if self.order is not None:
                words = reorder(words, self.order, self.bits)
            made[tile] = make_blocks(words, scale, zero, self.dtype)
        made.flags.writeable = False
        return made

    def _floats_of(self, tile: slice, d: Array, zeros: Array) -> Array:
        """Return some rows in the stored order of columns as float16, uint8 [n, row_bytes]."""
        assert self._groups is not None
        steps = unpack(self.words(tile), self.bits).astype(np.float32)
        steps -= zeros[tile].astype(np.float32)[:, self._groups]
        with np.errstate(over="ignore"):
            values = (steps * d[tile].astype(np.float32)[:, self._groups]).astype(np.float16)
        if not np.isfinite(values).all():
            text = "times its integers, a scale is beyond the range of f16"
            raise self.error(self.scale_part, text)
        return values.view(np.uint8)

    def _float16_scales(self) -> Array:
        """Return the scales as float16 [N, groups], which must be finite and not zero."""
        scales = self.scales()
        bad = ~np.isfinite(scales) | (scales == 0)
        if bad.any():
            raise self.value_error(
                self.scale_part, bad, scales, "a scale must be finite and not zero"
            )
        d, self.inexact_scales = to_float16(scales)
        wide = np.isinf(d)
        if not self.symmetric:  # the offset is at most this
            wide |= np.abs(scales) * (2**self.bits - 1) > np.finfo(np.float16).max
        if wide.any():
            raise self.value_error(
                self.scale_part, wide, scales, "a scale is beyond the range of f16"
            )
        return d

    def _zeros(self) -> Array:
        zeros, middle = self.zeros(), 2 ** (self.bits - 1)
        if zeros is None:
            return np.full((self.shape[0], self.groups), middle, np.uint8)
        if self.symmetric and (zeros != middle).any():
            text = f"a zero point is not {middle}, but the weights are declared symmetric"
            raise self.value_error(self.zero_part, zeros != middle, zeros, text)
        return zeros

    def value_error(self, part: str, bad: Array, values: Array, text: str) -> ModelFileError:
        """Return the error for the first of the ``bad`` values [N, groups]."""
        row, group = (int(i) for i in np.argwhere(bad)[0])
        value = str(values[row, group]).replace("nan", "NaN")
        return self.error(part, f"row {row}, group {group} is {value}: {text}")

    # ------------------------------------------------------------------------------ stored tensors

    def matrix(self, part: str) -> tuple[int, int]:
        """Return the shape of a matrix of int32."""
        shape = self.tensor(part, None, I32.name).shape
        if len(shape) != 2:
            raise self.error(part, f"has shape {list(shape)}, which is no matrix")
        return shape[0], shape[1]

    def read_order(self, part: str) -> None:
        """Set ``order`` from ``part``, the group of each column, if groups are not neighbouring
        columns."""
        groups = np.frombuffer(self.file.small(self.name(part)), "<i4")
        counts = np.bincount(groups[(groups >= 0) & (groups < self.groups)], minlength=self.groups)
        want = np.bincount(np.arange(self.shape[1]) // self.group)
        if not np.array_equal(counts, want):
            group = int((counts != want).argmax())
            text = f"has {counts[group]} columns of group {group}, not {want[group]}"
            raise self.error(part, text)
        self._stored_groups = groups
        if (np.diff(groups) < 0).any():
            self.order = np.argsort(groups, kind="stable").astype("<i4")

    def restore_order(self) -> None:
        """Let the weight have the stored order of columns, as float16; see `PackedTensors`. No
        effect on weights of methods without an order."""
        if self._stored_groups is not None:
            self._groups, self.order, self.dtype = self._stored_groups, None, F16

    def check_group_index(self, part: str) -> None:
        """Check that ``part``, the group of each column, has groups of neighbouring columns."""
        want = np.arange(self.shape[1]) // self.group
        if not np.array_equal(self.integers(part), want):
            text = "groups of scattered columns are not what quantization_config states (desc_act)"
            raise self.error(part, text)
