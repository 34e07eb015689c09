"""GPTQ checkpoints (``quant_method: gptq``), as AutoGPTQ and GPTQModel write them.

Tensors of a linear [N, K] with P = 32 / bits integers per int32, low bits first:

- ``qweight`` int32 [K / P, N], packed along K,
- ``qzeros`` int32 [groups, N / P], packed along N,
- ``scales`` [groups, N],
- ``g_idx`` int32 [K], the group of each column.

In ``checkpoint_format: gptq`` (version 1) zeros are stored minus one, modulo 2^bits; in ``gptq_v2``
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...graph.dtype import I32
from ...weights.safetensors import Safetensors
from .blocks import transpose, unpack
from .packed_linear import PackedLinear
from .settings import Settings
from .stored_linear import modules_with

_WEIGHT, _ZEROS, _SCALES, _ORDER = "qweight", "qzeros", "scales", "g_idx"
# Keys of calibration, of the writer, and of kernels of other engines.
_IGNORED = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "meta",
    "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config",
    "max_input_length", "model_seqlen", "pad_token_id", "backend", "quantizer", "lm_head",
    "act_group_aware", "hyb_act",
)  # fmt: skip


class Scheme:
    """A ``quantization_config`` of GPTQ. ConfigError for a key or value that is not supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = Settings(source, config)
        keys.only("quant_method", "gptq")
        self.bits: int = keys.one_of("bits", (4, 8))
        # 8 bits with a zero point would need a block format with an offset.
        self.symmetric: bool = keys.one_of("sym", (True,) if self.bits == 8 else (True, False))
        self.group_size = keys.group_size()
        stated = keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self.zero_offset = int(stated == "gptq")
        # Whether groups may be scattered columns, see `g_idx`.
        self.ordered: bool = keys.one_of("desc_act", (True, False), False)
        keys.only("is_marlin_format", False)
        keys.only("pack_dtype", "int32")
        keys.only("dynamic", {})
        keys.ignore(*_IGNORED)
        keys.finish()

    def linears(self, file: Safetensors) -> Iterator[PackedLinear]:
        """Yield the packed linears of a file. ModelFileError for wrong shapes or dtypes."""
        for module in modules_with(file, _WEIGHT):
            yield GptqLinear(file, module, self)


class GptqLinear(PackedLinear):
    """A linear of a GPTQ checkpoint."""

    scale_part, zero_part = _SCALES, _ZEROS

    def __init__(self, file: Safetensors, module: str, scheme: Scheme) -> None:
        parts = (_WEIGHT, _ZEROS, _SCALES, _ORDER)
        super().__init__(file, module, parts, scheme.bits, scheme.symmetric)
        self.zero_offset = scheme.zero_offset
        words, rows = self.matrix(_WEIGHT)
        self.set_shape(rows, words * self.per_word, scheme.group_size, _WEIGHT)
        self.check_floats(_SCALES, (self.groups, rows))
        self.tensor(_ZEROS, (self.groups, -(-rows // self.per_word)), I32.name)
        if scheme.ordered or self.has(_ORDER):
            self.tensor(_ORDER, (self.shape[1],), I32.name)
        self._ordered = scheme.ordered
        if self._ordered:
            self.read_order(_ORDER)

    def words(self, rows: slice) -> np.ndarray:
        return transpose(self.integers(_WEIGHT)[:, rows])

    def scales(self) -> np.ndarray:
        return np.ascontiguousarray(self.floats(_SCALES).T)

    def zeros(self) -> np.ndarray:
        stored = unpack(self.integers(_ZEROS), self.bits)[:, : self.shape[0]]
        zeros = stored + np.uint8(self.zero_offset)  # modulo 2^8
        return np.ascontiguousarray((zeros & np.uint8(2**self.bits - 1)).T)

    def check_values(self) -> None:
        if self.has(_ORDER) and not self._ordered:
            self.check_group_index(_ORDER)
