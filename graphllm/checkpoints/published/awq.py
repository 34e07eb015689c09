"""AWQ checkpoints (``quant_method: awq``, version gemm), as AutoAWQ writes them.

Tensors of a linear [N, K], with 8 integers of 4 bits per int32:

- ``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [groups, N / 8], packed along N,
- ``scales`` [groups, N].

Nibble i of a word, from the low bits on, belongs to column `NIBBLE_ORDER` [i] of its eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...graph.dtype import I32
from ...weights.safetensors import Safetensors
from .blocks import STRIP, unpack
from .packed_linear import PackedLinear
from .settings import Settings
from .stored_linear import modules_with

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WEIGHT, _ZEROS, _SCALES = "qweight", "qzeros", "scales"
_IGNORED = (  # kernels of other engines
    "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config",
)  # fmt: skip


class Scheme:
    """A ``quantization_config`` of AWQ. ConfigError for a key or value that is not supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = self._keys = Settings(source, config)
        keys.only("quant_method", "awq")
        keys.one_of("bits", (4,))
        keys.one_of("version", ("gemm", "GEMM"), "gemm")
        self.symmetric: bool = not keys.one_of("zero_point", (True, False))
        self.group_size = keys.group_size()
        self.ignored = keys.strings("modules_to_not_convert")
        keys.ignore(*_IGNORED)
        keys.finish()

    def linears(self, file: Safetensors) -> Iterator[PackedLinear]:
        """Yield the packed linears of a file. ModelFileError for wrong shapes or dtypes."""
        for module in modules_with(file, _WEIGHT):
            linear = AwqLinear(file, module, self)
            pattern = next((each for each in self.ignored if each in module), None)
            if pattern is not None:
                raise linear.error(_WEIGHT, f"modules_to_not_convert excludes it by {pattern!r}")
            yield linear


class AwqLinear(PackedLinear):
    """A linear of an AWQ checkpoint."""

    scale_part, zero_part = _SCALES, _ZEROS

    def __init__(self, file: Safetensors, module: str, scheme: Scheme) -> None:
        super().__init__(file, module, (_WEIGHT, _ZEROS, _SCALES), 4, scheme.symmetric)
        columns, words = self.matrix(_WEIGHT)
        self.set_shape(words * self.per_word, columns, scheme.group_size, _WEIGHT)
        self.check_floats(_SCALES, (self.groups, self.shape[0]))
        if not self.symmetric or self.has(_ZEROS):
            self.tensor(_ZEROS, (self.groups, words), I32.name)

    def words(self, rows: slice) -> np.ndarray:
        stored = self.integers(_WEIGHT)[:, rows.start // 8 : rows.stop // 8]
        columns, count = stored.shape
        eights = stored.reshape(columns // 8, 8, count)
        made = np.empty((count, 8, columns // 8), np.uint32)
        for start in range(0, columns // 8, STRIP):
            strip = slice(start, start + STRIP)
            words = eights[strip].swapaxes(0, 1).copy()
            _transpose_nibbles(words)
            for i, row in enumerate(NIBBLE_ORDER):
                made[:, row, strip] = words[i].T
        return made.reshape(-1, columns // 8)

    def scales(self) -> np.ndarray:
        return np.ascontiguousarray(self.floats(_SCALES).T)

    def zeros(self) -> np.ndarray | None:
        if not self.has(_ZEROS):
            return None
        stored = unpack(self.integers(_ZEROS), self.bits).reshape(self.groups, -1, 8)
        zeros = np.empty_like(stored)
        zeros[..., NIBBLE_ORDER] = stored
        return np.ascontiguousarray(zeros.reshape(self.groups, -1).T)


def _transpose_nibbles(words: np.ndarray) -> None:
    """Transpose each 8 x 8 matrix of nibbles of uint32 [8, ...], contiguous, in place.

    Swaps of blocks of 4, 2 and 1 nibbles off the diagonal (Warren, Hacker's Delight, 7-3).
    """
    for size, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        pairs = words.reshape(4 // size, 2, size, -1)
        low, high = pairs[:, 0], pairs[:, 1]
        shift = np.uint32(4 * size)
        swap = (low >> shift ^ high) & np.uint32(mask)
        high ^= swap
        low ^= swap << shift
