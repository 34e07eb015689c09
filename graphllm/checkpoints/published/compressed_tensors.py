"""compressed-tensors checkpoints, as llm-compressor writes them.

pack-quantized: tensors of a linear [N, K] with P = 32 / bits integers per int32, low bits first,
stored plus 2^(bits - 1) so that they are unsigned:

- ``weight_packed`` int32 [N, K / P], packed along K,
- ``weight_scale`` [N, groups],
- ``weight_zero_point`` int32 [N / P, groups], packed along N, or int8 [N, groups] by old versions,
- ``weight_shape`` [2], N and K,
- ``weight_g_idx`` int32 [K], the group of each column.

int-quantized and float-quantized (activations are quantised at run time):

- ``weight`` [N, K], int8 or e4m3,
- ``weight_scale`` [1], [N, 1] or, for blocks of 128 x 128, [N / 128, K / 128] rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...errors import ModelFileError, quote
from ...formats.row_format import FP8, FP8_128, W8A8
from ...graph.dtype import I8, I32, DType
from ...weights.safetensors import Safetensors
from .blocks import unpack
from .module_patterns import ModulePatterns
from .packed_linear import PackedLinear
from .scaled_linear import BLOCK, CHANNEL, TENSOR, TILE, ScaledLinear
from .settings import STATIC_SCALES, Settings
from .stored_linear import StoredLinear, modules_with

METHOD = "compressed-tensors"
_PACKED, _INT, _FLOAT = _FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
_MIXED = "mixed-precision"  # each group states a format of its own
_WEIGHT, _SCALES, _ZEROS = "weight_packed", "weight_scale", "weight_zero_point"
_SHAPE, _ORDER = "weight_shape", "weight_g_idx"
_OBSERVER = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # of the quantising program


@dataclass(frozen=True)
class _Group:
    """Quantisation of the modules that ``targets`` names."""

    targets: ModulePatterns


@dataclass(frozen=True)
class _PackedGroup(_Group):
    bits: int
    symmetric: bool
    group_size: int
    ordered: bool  # whether groups may be scattered columns


@dataclass(frozen=True)
class _ScaledGroup(_Group):
    dtype: DType
    strategy: str  # of the scales of weights


_G = TypeVar("_G", bound=_Group)


class Scheme:
    """A ``quantization_config`` of compressed-tensors. ConfigError for a key or value that is not
    supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = Settings(source, config)
        keys.only("quant_method", METHOD)
        stated = keys.one_of("format", (*_FORMATS, _MIXED))
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

    def linears(self, file: Safetensors) -> Iterator[StoredLinear]:
        """Yield the quantised linears of a file. ModelFileError for wrong shapes or dtypes, and for
        a module that the configuration ignores or does not name."""
        for module in modules_with(file, _WEIGHT):
            yield CompressedLinear(file, module, self._group(file, module, _WEIGHT, _PackedGroup))
        for module in modules_with(file, _SCALES):
            if f"{module}.{_WEIGHT}" not in file.tensors:
                group = self._group(file, module, _SCALES, _ScaledGroup)
                yield ScaledLinear(file, module, group.dtype, _SCALES, group.strategy)

    def _group(self, file: Safetensors, module: str, part: str, kind: type[_G]) -> _G:
        """Return the group of a module, whose tensor ``part`` belongs to a group of that kind."""

        def error(text: str) -> ModelFileError:
            return ModelFileError(f"{file.path}: tensor {quote(f'{module}.{part}')}: {text}")

        try:
            group = max(self.groups, key=lambda each: each.targets.match(module))
            ignored, targeted = self.ignored.match(module), group.targets.match(module)
        except ValueError as wrong:
            raise error(str(wrong)) from None
        if ignored:
            raise error("quantised, but quantization_config ignores the module")
        if not targeted:
            raise error(f"no target of quantization_config names the module {quote(module)}")
        if not isinstance(group, kind):
            raise error("stored in another format than quantization_config states")
        return group


def _patterns(keys: Settings, name: str) -> ModulePatterns:
    found = keys.strings(name)
    try:
        return ModulePatterns(found)
    except ValueError as error:
        raise keys.error(name, found, str(error)) from None


def _group(keys: Settings, stated: str) -> _Group:
    """Read an object of ``config_groups``; ``stated`` is the format of the whole checkpoint."""
    known, default = (_FORMATS, ...) if stated == _MIXED else ((stated,), stated)
    form = keys.one_of("format", known, default)
    keys.only("output_activations")
    targets = _patterns(keys, "targets")
    weights = keys.object("weights")
    weights.only("dynamic", False)
    weights.ignore(*_OBSERVER)
    if form == _PACKED:
        keys.only("input_activations")
        group: _Group = _packed_group(targets, weights)
    else:
        group = _scaled_group(targets, weights, keys.object("input_activations"), form == _FLOAT)
    weights.finish()
    keys.finish()
    return group


def _packed_group(targets: ModulePatterns, weights: Settings) -> _PackedGroup:
    bits: int = weights.one_of("num_bits", (4, 8))
    weights.only("type", "int")
    # 8 bits with a zero point would need a block format with an offset.
    symmetric: bool = weights.one_of("symmetric", (True,) if bits == 8 else (True, False), True)
    group_size = weights.group_size(-1)
    want = "channel" if group_size == -1 else "group"
    weights.only("strategy", want)
    weights.only("actorder", False, "weight", "static", "group")
    ordered = weights.keys("actorder", object, None) == "group"  # others do not change the layout
    weights.only("block_structure")
    return _PackedGroup(targets, bits, symmetric, group_size, ordered)


def _scaled_group(
    targets: ModulePatterns, weights: Settings, activations: Settings, floats: bool
) -> _ScaledGroup:
    """Read weights of 8 bits with activations of 8 bits, which are quantised at run time."""
    if not activations.one_of("dynamic", (True, False), False):
        raise activations.error("dynamic", False, STATIC_SCALES)
    for keys in (weights, activations):
        keys.one_of("num_bits", (8,))
        keys.one_of("type", ("float" if floats else "int",))
        keys.one_of("symmetric", (True,), True)
        keys.only("actorder")
    known = (TENSOR, CHANNEL, BLOCK) if floats else (TENSOR, CHANNEL)
    strategy: str = weights.one_of("strategy", known)
    weights.only("group_size")
    blocks = strategy == BLOCK
    if blocks:
        weights.one_of("block_structure", ([TILE, TILE],))
        activations.one_of("group_size", (TILE,))
    else:
        weights.only("block_structure")
        activations.only("group_size")
    activations.one_of("strategy", ("group" if blocks else "token",))
    activations.only("block_structure")
    activations.ignore(*_OBSERVER)
    activations.finish()
    return _ScaledGroup(targets, FP8_128 if blocks else FP8 if floats else W8A8, strategy)


class CompressedLinear(PackedLinear):
    """A linear of the format pack-quantized."""

    scale_part, zero_part = _SCALES, _ZEROS

    def __init__(self, file: Safetensors, module: str, group: _PackedGroup) -> None:
        parts = (_WEIGHT, _SCALES, _ZEROS, _SHAPE, _ORDER)
        super().__init__(file, module, parts, group.bits, group.symmetric)
        rows, words = self.matrix(_WEIGHT)
        self.set_shape(rows, words * self.per_word, group.group_size, _WEIGHT)
        self.check_floats(_SCALES, (rows, self.groups))
        self.tensor(_SHAPE, (2,), "i64", I32.name)
        if not self.symmetric or self.has(_ZEROS):
            packed = self.tensor(_ZEROS, None, I32.name, I8.name).dtype is I32
            count = -(-rows // self.per_word) if packed else rows
            self.tensor(_ZEROS, (count, self.groups), I32.name, I8.name)
        self._ordered = group.ordered
        if self._ordered or self.has(_ORDER):
            self.tensor(_ORDER, (self.shape[1],), I32.name)
        if self._ordered:
            self.read_order(_ORDER)

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
        if self.has(_ORDER) and not self._ordered:
            self.check_group_index(_ORDER)
