"""bitsandbytes checkpoints (``quant_method: bitsandbytes``) of 4 bits with the type nf4.

Tensors of a linear [N, K], which is quantised in blocks of ``blocksize`` elements of the flattened
weight:

- ``weight`` uint8 [N * K / 2, 1], the first of two elements in the high half of a byte,
- ``weight.absmax`` [blocks], the largest magnitude of each block,
- ``weight.quant_map`` [16], the values from -1 to 1 that four bits stand for,
- ``weight.quant_state.bitsandbytes__nf4`` uint8, a JSON object.

With double quantisation ``absmax`` is uint8, and the magnitude of block i is ``nested_offset`` (in
the JSON object) + ``weight.nested_quant_map`` [absmax[i]] * ``weight.nested_absmax`` [i / 256].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import quote
from ...formats.iq4 import NF4, NF4_VALUES
from ...weights.safetensors import Safetensors
from ...weights.strict_json import json_object
from .blocks import make_blocks, to_float16
from .settings import GROUP, Settings
from .stored_linear import Array, StoredLinear, modules_with

METHOD = "bitsandbytes"
_TYPE = "nf4"
_WEIGHT, _ABSMAX, _VALUES = "weight", "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_VALUES = "weight.nested_absmax", "weight.nested_quant_map"
_STATE = f"weight.quant_state.bitsandbytes__{_TYPE}"
_BLOCK_SIZES = tuple(2**i for i in range(5, 13))
_NESTED_BLOCK = 256
_TILE = 1 << 20  # elements repacked at once, so that intermediate results stay in a cache
_IGNORED = (  # of computation, and of matrices of 8 bits
    "bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "llm_int8_threshold",
)  # fmt: skip


class Scheme:
    """A ``quantization_config`` of bitsandbytes. ConfigError for a key or value that is not
    supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = Settings(source, config)
        keys.only("quant_method", METHOD)
        for prefix in ("", "_"):
            keys.only(f"{prefix}load_in_8bit", False)
            keys.only(f"{prefix}load_in_4bit", True)
        keys.one_of("bnb_4bit_quant_type", (_TYPE,), "fp4")
        keys.only("bnb_4bit_quant_storage", "uint8")
        keys.only("bnb_4bit_use_double_quant", True, False)  # tensors say which
        self.ignored = keys.strings("llm_int8_skip_modules")
        keys.ignore(*_IGNORED)
        keys.finish()

    def linears(self, file: Safetensors) -> Iterator[StoredLinear]:
        """Yield the quantised linears of a file. ModelFileError for wrong shapes or dtypes."""
        for module in modules_with(file, _STATE):
            linear = NormalFloatLinear(file, module)
            if any(f".{each}." in f".{module}." for each in self.ignored):
                text = f"llm_int8_skip_modules names the module {quote(module)}"
                raise linear.error(_WEIGHT, f"quantised, but {text}")
            yield linear


class NormalFloatLinear(StoredLinear):
    """A linear of four bits."""

    dtype = NF4

    def __init__(self, file: Safetensors, module: str) -> None:
        parts = (_WEIGHT, _ABSMAX, _VALUES, _NESTED_ABSMAX, _NESTED_VALUES, _STATE)
        super().__init__(file, module, parts)
        state = self._state()
        rows, columns = self.shape
        if columns % GROUP:
            text = f"is a weight of {rows} x {columns}, whose rows are not whole blocks of {GROUP}"
            raise self.error(_WEIGHT, text)
        self.tensor(_WEIGHT, (rows * columns // 2, 1), "u8")
        blocks = -(-rows * columns // self.block)
        self.tensor(_ABSMAX, (blocks,), "u8" if self.nested else "f32")
        self.tensor(_VALUES, (len(NF4_VALUES),), "f32")
        if self.nested:
            self.offset: float = state.keys("nested_offset", float)
            state.one_of("nested_blocksize", (_NESTED_BLOCK,))
            state.only("nested_dtype", "float32")
            self.tensor(_NESTED_ABSMAX, (-(-blocks // _NESTED_BLOCK),), "f32")
            self.tensor(_NESTED_VALUES, (256,), "f32")
        state.finish()

    @property
    def nested(self) -> bool:
        """Whether the magnitudes of blocks are quantised, too."""
        return self.has(_NESTED_ABSMAX)

    def _state(self) -> Settings:
        """Read the shape and the size of blocks from the JSON object; return its other keys."""
        self.tensor(_STATE, None, "u8")
        source = f"{self.file.path}: tensor {quote(self.name(_STATE))}"
        state = Settings(source, json_object(self.file.small(self.name(_STATE)), source))
        state.one_of("quant_type", (_TYPE,))
        self.block: int = state.one_of("blocksize", _BLOCK_SIZES)
        shape = state.keys("shape", list)
        if len(shape) != 2 or any(type(n) is not int or not 0 < n < 2**31 for n in shape):
            raise state.error("shape", shape, "only the two dimensions of a matrix")
        self.shape = (shape[0], shape[1])
        state.ignore("dtype")  # of dequantised weights
        return state

    def raw(self) -> Array:
        """See `StoredLinear.raw`; repacked by tiles of rows."""
        rows, columns = self.shape
        with np.errstate(over="ignore"):
            values = self.floats(_VALUES).astype(np.float16)
        if not np.array_equal(values, NF4_VALUES):
            raise self.error(_VALUES, f"has other values than {_TYPE}")
        magnitudes, self.inexact_scales = to_float16(self._magnitudes())
        if np.isinf(magnitudes).any():
            raise self.error(_ABSMAX, "a magnitude is beyond the range of f16")
        d = np.repeat(magnitudes, self.block // GROUP)[: rows * columns // GROUP].reshape(rows, -1)
        stored = self.file.raw(self.name(_WEIGHT)).reshape(rows, columns // 2)
        made = np.empty((rows, self.dtype.row_nbytes(columns)), np.uint8)
        step = max(1, _TILE // columns)
        for start in range(0, rows, step):
            tile = slice(start, start + step)
            codes = stored[tile] << np.uint8(4) | stored[tile] >> np.uint8(4)  # low half first
            made[tile] = make_blocks(codes.view(np.uint32), d[tile], None, self.dtype)
        made.flags.writeable = False
        return made

    def _magnitudes(self) -> Array:
        """Return the largest magnitude of each block, float32. ModelFileError if it cannot be one:
        zero is, of a block of zeros, and double quantisation may round it to a negative number."""
        if not self.nested:
            found = self.floats(_ABSMAX)
            good = np.isfinite(found) & (found >= 0)
            text = "a magnitude must be finite and not negative"
        else:
            factors = np.repeat(self.floats(_NESTED_ABSMAX), _NESTED_BLOCK)
            codes = self.integers(_ABSMAX)
            with np.errstate(all="ignore"):
                values = self.floats(_NESTED_VALUES)[codes] * factors[: len(codes)]
                found = values + np.float32(self.offset)
            good = np.isfinite(found)
            text = "with its nested values, a magnitude must be finite"
        if not good.all():
            block = int(good.argmin())
            value = str(found[block]).replace("nan", "NaN")
            raise self.error(_ABSMAX, f"block {block} is {value}: {text}")
        return found
