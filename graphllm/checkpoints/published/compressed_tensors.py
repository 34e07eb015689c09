"""compressed-tensors checkpoints of the format pack-quantized, as llm-compressor writes them.

Tensors of a linear [N, K] with P = 32 / bits integers per int32, low bits first, stored plus
2^(bits - 1) so that they are unsigned:

- ``weight_packed`` int32 [N, K / P], packed along K,
- ``weight_scale`` [N, groups],
- ``weight_zero_point`` int32 [N / P, groups], packed along N, or int8 [N, groups] by old versions,
- ``weight_shape`` [2], N and K,
- ``weight_g_idx`` int32 [K], the group of each column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import quote
from ...graph.dtype import I8, I32
from ...weights.safetensors import Safetensors
from .blocks import unpack
from .module_patterns import ModulePatterns
from .packed_linear import PackedLinear, modules_with
from .settings import Settings

METHOD, _FORMAT = "compressed-tensors", "pack-quantized"
_MIXED = "mixed-precision"  # each group states a format of its own
_WEIGHT, _SCALES, _ZEROS = "weight_packed", "weight_scale", "weight_zero_point"
_SHAPE, _ORDER = "weight_shape", "weight_g_idx"


@dataclass(frozen=True)
class _Group:
    """Quantisation of the modules that ``targets`` names."""

    targets: ModulePatterns
    bits: int
    symmetric: bool
    group_size: int


class Scheme:
    """A ``quantization_config`` of compressed-tensors. ConfigError for a key or value that is not
    supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = Settings(source, config)
        keys.only("quant_method", METHOD)
        stated = keys.one_of("format", (_FORMAT, _MIXED))
        keys.only("quantization_status", "compressed")
        keys.only("kv_cache_scheme")
        keys.only("transform_config", {})
        keys.only("moe_sparsity_config", {})
        sparsity = keys.keys("sparsity_config", dict, {})
        if sparsity and sparsity.get("format") != "dense":  # zeros may be stored as well
            raise keys.error("sparsity_config", sparsity, "only the format 'dense'")
        self.ignored = _patterns(keys, "ignore")
        groups = keys.objects("config_groups")
        self.groups = [_group(each, stated) for each in groups]
        keys.ignore("global_compression_ratio", "version")
        keys.finish()

    def linears(self, file: Safetensors) -> Iterator[PackedLinear]:
        """Yield the packed linears of a file. ModelFileError for wrong shapes or dtypes, and for a
        module that the configuration ignores or does not name."""
        for module in modules_with(file, _WEIGHT):
            yield CompressedLinear(file, module, self)


def _patterns(keys: Settings, name: str) -> ModulePatterns:
    found = keys.strings(name)
    try:
        return ModulePatterns(found)
    except ValueError as error:
        raise keys.error(name, found, str(error)) from None


def _group(keys: Settings, stated: str) -> _Group:
    """Read an object of ``config_groups``; ``stated`` is the format of the whole checkpoint."""
    keys.one_of("format", (_FORMAT,), ... if stated == _MIXED else _FORMAT)
    keys.only("input_activations")
    keys.only("output_activations")
    targets = _patterns(keys, "targets")
    weights = keys.object("weights")
    keys.finish()
    bits: int = weights.one_of("num_bits", (4, 8))
    weights.only("type", "int")
    # 8 bits with a zero point would need a block format with an offset.
    symmetric: bool = weights.one_of("symmetric", (True,) if bits == 8 else (True, False), True)
    group_size = weights.group_size(-1)
    want = "channel" if group_size == -1 else "group"
    weights.only("strategy", want)
    weights.only("dynamic", False)
    weights.only("actorder", False, "weight", "static")  # do not change the layout
    weights.only("block_structure")
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.finish()
    return _Group(targets, bits, symmetric, group_size)


class CompressedLinear(PackedLinear):
    """A linear of a compressed-tensors checkpoint."""

    scale_part, zero_part = _SCALES, _ZEROS

    def __init__(self, file: Safetensors, module: str, scheme: Scheme) -> None:
        group = max(scheme.groups, key=lambda each: each.targets.match(module))
        parts = (_WEIGHT, _SCALES, _ZEROS, _SHAPE, _ORDER)
        super().__init__(file, module, parts, group.bits, group.symmetric)
        if scheme.ignored.match(module):
            raise self.error(_WEIGHT, "packed, but quantization_config ignores the module")
        if not group.targets.match(module):
            text = f"no target of quantization_config names the module {quote(module)}"
            raise self.error(_WEIGHT, text)
        rows, words = self.matrix(_WEIGHT)
        self.set_shape(rows, words * self.per_word, group.group_size, _WEIGHT)
        self.check_floats(_SCALES, (rows, self.groups))
        self.tensor(_SHAPE, (2,), "i64", I32.name)
        if not self.symmetric or self.has(_ZEROS):
            packed = self.tensor(_ZEROS, None, I32.name, I8.name).dtype is I32
            count = -(-rows // self.per_word) if packed else rows
            self.tensor(_ZEROS, (count, self.groups), I32.name, I8.name)
        if self.has(_ORDER):
            self.tensor(_ORDER, (self.shape[1],), I32.name)

    def words(self, rows: slice) -> np.ndarray:
        return np.ascontiguousarray(self.integers(_WEIGHT)[rows])

    def scales(self) -> np.ndarray:
        return self.floats(_SCALES)

    def zeros(self) -> np.ndarray | None:
        if not self.has(_ZEROS):
            return None
        stored = self.integers(_ZEROS)
        if stored.dtype == np.uint32:
            packed = np.ascontiguousarray(stored.T)
            return np.ascontiguousarray(unpack(packed, self.bits)[:, : self.shape[0]].T)
        zeros = stored.astype(np.int16) + 2 ** (self.bits - 1)
        bad = (zeros < 0) | (zeros >= 2**self.bits)
        if bad.any():
            raise self.value_error(_ZEROS, bad, stored, f"no integer of {self.bits} bits")
        return zeros.astype(np.uint8)

    def check_values(self) -> None:
        stated = tuple(self.integers(_SHAPE).tolist())
        if stated != self.shape:
            text = f"is {list(stated)}, but {_WEIGHT} holds {list(self.shape)}"
            raise self.error(_SHAPE, text)
        if self.has(_ORDER):
            self.check_group_index(_ORDER)
