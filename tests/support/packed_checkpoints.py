"""Writer of GPTQ, AWQ, compressed-tensors and bitsandbytes directories, from the definitions of
their layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]


@dataclass
class Packed:
    """Integers of a linear [N, K]: codes [N, K], scales and zeros [N, groups], both unsigned, and
    the group of each column [K]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    at: np.ndarray

    def dequantise(self) -> np.ndarray:
        """float32 [N, K]."""
        steps = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, self.at]
        return self.scales.astype(np.float32)[:, self.at] * steps


def integers_of(
    values: np.ndarray, bits: int, group_size: int, symmetric: bool, seed: int | None = None
) -> Packed:
    """Quantise float32 [N, K]; zero points are arbitrary if not symmetric. ``seed``: of the order
    in which columns are dealt out to groups; without it, groups are neighbouring columns."""
    rows, columns = values.shape
    group = columns if group_size == -1 else group_size
    at, middle = (np.arange(columns) // group).astype(np.int32), 2 ** (bits - 1)
    groups = at[-1] + 1
    if seed is not None:
        at = np.random.default_rng(seed).permutation(at)
    largest = np.stack([np.abs(values[:, at == i]).max(1) for i in range(groups)], 1)
    scales = (largest / (middle - 1)).astype(np.float16)
    low, high = (middle, middle + 1) if symmetric else (0, 2 * middle)
    zeros = np.random.default_rng(rows).integers(low, high, scales.shape).astype(np.uint8)
    steps = np.round(values / scales.astype(np.float32)[:, at]) + zeros[:, at]
    codes = np.clip(steps, 0, 2 * middle - 1).astype(np.uint8)
    codes[0, 0] = 0  # the lowest code, which rounding seldom makes
    return Packed(codes, scales, zeros, at)


def int32_of(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack unsigned integers along an axis, low bits first, padded with zeros."""
    per = 32 // bits
    rows = np.moveaxis(values, axis, -1).astype(np.uint64)
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % per)])
    words = sum(rows[..., i::per] << np.uint64(bits * i) for i in range(per))
    return np.moveaxis(np.asarray(words).astype(np.uint32).view(np.int32), -1, axis)


def gptq(name: str, p: Packed, bits: int, version: int = 1) -> Tensors:
    zeros = (p.zeros.astype(int) - (version == 1)) % 2**bits
    return {
        f"{name}.qweight": int32_of(p.codes.T, bits, 0),
        f"{name}.qzeros": int32_of(zeros.T, bits, 1),
        f"{name}.scales": p.scales.T,
        f"{name}.g_idx": p.at,
    }


def awq(name: str, p: Packed, bits: int = 4) -> Tensors:
    def columns(values: np.ndarray) -> np.ndarray:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        eights = values.reshape(len(values), -1, 8)[..., order]
        return int32_of(eights.reshape(values.shape), bits, 1)

    return {
        f"{name}.qweight": columns(p.codes.T),
        f"{name}.qzeros": columns(p.zeros.T),
        f"{name}.scales": p.scales.T,
    }


def compressed(name: str, p: Packed, bits: int, symmetric: bool, ordered: bool = False) -> Tensors:
    made = {
        f"{name}.weight_packed": int32_of(p.codes, bits, 1),
        f"{name}.weight_scale": p.scales,
        f"{name}.weight_shape": np.array(p.codes.shape, np.int64),
    }
    if ordered:
        made[f"{name}.weight_g_idx"] = p.at
    if not symmetric:
        made[f"{name}.weight_zero_point"] = int32_of(p.zeros, bits, 0)
    return made


# NormalFloat (Dettmers et al. 2023, QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def nf4(module: str, values: np.ndarray, nested: bool = True) -> tuple[Tensors, np.ndarray]:
    """bitsandbytes' tensors of float32 [N, K], and the weight that they stand for."""
    table = np.array(NF4, np.float32)
    flat = values.ravel()
    blocks = np.pad(flat, (0, -flat.size % 64)).reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1)
    state: dict[str, Any] = {}
    made = {"absmax": largest, "quant_map": table}
    if nested:
        grid = (np.arange(256, dtype=np.float32) - 127) / np.float32(128)
        offset = largest.mean()
        parts = np.pad(largest - offset, (0, -largest.size % 256)).reshape(-1, 256)
        factors = np.abs(parts).max(axis=1)
        steps = np.rint(parts / np.maximum(factors, 1e-9)[:, None] * 128) + 127
        codes = np.clip(steps, 0, 255).astype(np.uint8)
        largest = (grid[codes] * factors[:, None]).ravel()[: largest.size] + offset
        made |= {"absmax": codes.ravel()[: largest.size], "nested_absmax": factors}
        made["nested_quant_map"] = grid
        state = {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(offset)
    scaled = blocks / np.where(largest == 0, 1, largest)[:, None]
    codes = np.abs(scaled[..., None] - table).argmin(axis=-1)
    weight = (table[codes] * largest[:, None]).ravel()[: flat.size].reshape(values.shape)
    codes = codes.astype(np.uint8).ravel()[: flat.size]
    packed = (codes[::2] << 4 | codes[1::2])[:, None]
    names = {f"{module}.weight.{name}": value for name, value in made.items()}
    names[f"{module}.weight.quant_state.bitsandbytes__nf4"] = nf4_state(values.shape, **state)
    return {f"{module}.weight": packed, **names}, weight


def nf4_state(shape: tuple[int, ...], /, **keys: Any) -> np.ndarray:
    """The JSON object of a linear, uint8."""
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*shape], **keys
    }  # fmt: skip
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def nf4_config(**keys: Any) -> dict:
    return {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False,
        "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0, **keys,
    }  # fmt: skip


def gptq_config(bits: int = 4, group_size: int = 32, sym: bool = True, **keys: Any) -> dict:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym,
        "desc_act": False, "damp_percent": 0.01, "true_sequential": True, **keys,
    }  # fmt: skip


def awq_config(group_size: int = 32, zero_point: bool = True, **keys: Any) -> dict:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm",
        "zero_point": zero_point, "modules_to_not_convert": None, **keys,
    }  # fmt: skip


def weights_config(bits: int = 4, group_size: int = 32, symmetric: bool = True, **keys: Any):
    strategy = "channel" if group_size == -1 else "group"
    stated = None if group_size == -1 else group_size
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
        "group_size": stated, "dynamic": False, "actorder": None, "block_structure": None,
        "observer": "minmax", "observer_kwargs": {}, **keys,
    }  # fmt: skip


def compressed_config(*groups: dict, targets: str = "Linear", **keys: Any) -> dict:
    """``groups``: the weights of each group; ``targets`` may have {i}, the group's number."""
    made = {
        f"group_{i}": {
            "targets": [targets.format(i=i)], "weights": weights, "input_activations": None,
            "output_activations": None,
        }
        for i, weights in enumerate(groups)
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": made,
        "ignore": ["lm_head", "re:.*gate$"], "quantization_status": "compressed",
        "kv_cache_scheme": None, "global_compression_ratio": 1.5, "sparsity_config": {},
        "version": "0.20.0", **keys,
    }  # fmt: skip


# What makes the tensors of a module, and the weight that they stand for, of its name and weight.
Quantiser = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]


def integers(
    bits: int,
    group_size: int,
    symmetric: bool,
    pack: Callable[[str, Packed], Tensors],
    order: Callable[[str, np.ndarray], int | None] = lambda module, values: None,
) -> Quantiser:
    """The quantiser of a layout of packed integers. ``order``: see ``seed`` of `integers_of`, for a
    module and its weight."""

    def quantise(module: str, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        found = integers_of(values, bits, group_size, symmetric, order(module, values))
        return pack(module, found), found.dequantise()

    return quantise


def write_pair(folder: Path, plain: Path, config: dict, quantise: Quantiser) -> None:
    """Write the directory ``folder`` with the linears of ``plain`` quantised, and give ``plain``
    the same weights dequantised. Embedding, head and routers stay floats."""
    tensors, made, same = load_file(plain / "model.safetensors"), {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "_mqa", ".w1", ".w2", ".w3")):
            made[name] = same[name] = value
            continue
        stored, same[name] = quantise(module, value)
        made |= stored
    folder.mkdir(exist_ok=True)
    write(folder / "model.safetensors", made)
    write(plain / "model.safetensors", same)
    keys = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": config}))


def write(path: Path, tensors: Tensors) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
