"""A directory's tensors with each quantised linear as one tensor in a block or row format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import ModelFileError, join_names, quote
from ...graph.dtype import I32
from ...weights.mapped_file import TensorInfo
from ...weights.safetensors import Safetensors
from .packed_linear import PackedLinear
from .stored_linear import StoredLinear


class PackedTensors:
    """Tensors of a file, in which ``{module}.weight`` replaces a module's packed tensors.

    Columns of a weight in ``orders`` are not in the stored order: the tensor it names, which is not
    among `tensors`, has the stored column of each.

    The weight is repacked whenever it is read. All other tensors stay as stored, so the rules of
    a model (stacked experts, fused projections) apply as they do to floats.

    Args:
        file: The stored tensors.
        linears: The packed linears among them.
        source: The file and the key that declare them, for error messages.

    Raises:
        ModelFileError: There is no packed linear, or one has float weights as well.
    """

    def __init__(self, file: Safetensors, linears: Sequence[StoredLinear], source: str) -> None:
        self._file = file
        self._linears = {linear.name("weight"): linear for linear in linears}
        if not linears:
            raise ModelFileError(f"{file.path}: no packed weights, which {source} declares")
        replaced = {linear.name(part): linear for linear in linears for part in linear.parts}
        both = next((n for n in self._linears if n in file.tensors and n not in replaced), None)
        if both is not None:
            raise ModelFileError(f"{file.path}: tensor {quote(both)}: stored packed as well")
        ordered = [(linear, linear.order) for linear in linears if linear.order is not None]
        self.orders = {linear.name("weight"): linear.name("columns") for linear, _ in ordered}
        self._columns = {linear.name("columns"): order for linear, order in ordered}
        self._restored = 0
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in file.tensors.items():
            made = replaced[name].info if name in replaced else info
            self.tensors.setdefault(made.name, made)

    @property
    def path(self) -> Path:
        return self._file.path

    def restore_order(self, name: str) -> None:
        """Let a packed weight have the stored order of columns, for models that cannot reorder its
        input or that stack it on such weights. It becomes float16."""
        linear = self._linears.get(name)
        if isinstance(linear, PackedLinear):
            linear.restore_order()
            self.tensors[name] = linear.info
            self.orders.pop(name, None)
            self._restored += 1

    def readable(self, name: str) -> TensorInfo:
        """See `TensorFiles.readable`."""
        order = self._columns.get(name)
        if order is not None:
            return TensorInfo(name, order.shape, I32, order.nbytes, 0)
        packed = name in self._linears
        return self.tensors[name] if packed else self._file.readable(name)

    def raw(self, name: str) -> np.ndarray:
        """See `TensorFiles.raw`; a packed linear is repacked, and its stored pages released."""
        if name in self._columns:
            return self._columns[name].view(np.uint8).reshape(1, -1)
        linear = self._linears.get(name)
        if linear is None:
            return self._file.raw(name)
        made = linear.raw()
        linear.release()
        return made

    def release(self, name: str) -> None:
        """See `TensorFiles.release`. Repacked bytes are freed with their last view."""
        if name in self._file.tensors and name not in self._linears:
            self._file.release(name)

    def notes(self) -> list[str]:
        """Return a line for weights in the stored order of columns, and one if scales read so far
        lost precision as float16."""
        lines = []
        if self._restored:
            text = "their groups are scattered columns, and their inputs cannot be reordered"
            lines.append(f"{self._restored} matrices are f16: {text}")
        found = [linear for linear in self._linears.values() if linear.inexact_scales]
        if not found:
            return lines
        count = sum(linear.inexact_scales for linear in found)
        modules = join_names([linear.module for linear in found])
        return [*lines, f"{count} scales are too small to be exact in f16: those of {modules}"]

    def close(self) -> None:
        self._file.close()
