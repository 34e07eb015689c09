"""Writer of GPTQ, AWQ and compressed-tensors directories, from the definitions of their layouts."""

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
    """Integers of a linear [N, K]: codes [N, K], scales and zeros [N, groups], both unsigned."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int

    def dequantise(self) -> np.ndarray:
        """float32 [N, K]."""
        at = np.arange(self.codes.shape[1]) // self.group
        steps = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, at]
        return self.scales.astype(np.float32)[:, at] * steps


def integers_of(values: np.ndarray, bits: int, group_size: int, symmetric: bool) -> Packed:
    """Quantise float32 [N, K]; zero points are arbitrary if not symmetric."""
    rows, columns = values.shape
    group = columns if group_size == -1 else group_size
    at, middle = np.arange(columns) // group, 2 ** (bits - 1)
    groups = at[-1] + 1
    largest = np.stack([np.abs(values[:, at == i]).max(1) for i in range(groups)], 1)
    scales = (largest / (middle - 1)).astype(np.float16)
    low, high = (middle, middle + 1) if symmetric else (0, 2 * middle)
    zeros = np.random.default_rng(rows).integers(low, high, scales.shape).astype(np.uint8)
    steps = np.round(values / scales.astype(np.float32)[:, at]) + zeros[:, at]
    codes = np.clip(steps, 0, 2 * middle - 1).astype(np.uint8)
    codes[0, 0] = 0  # the lowest code, which rounding seldom makes
    return Packed(codes, scales, zeros, group)


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
        f"{name}.g_idx": (np.arange(p.codes.shape[1]) // p.group).astype(np.int32),
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


def compressed(name: str, p: Packed, bits: int, symmetric: bool) -> Tensors:
    made = {
        f"{name}.weight_packed": int32_of(p.codes, bits, 1),
        f"{name}.weight_scale": p.scales,
        f"{name}.weight_shape": np.array(p.codes.shape, np.int64),
    }
    if not symmetric:
        made[f"{name}.weight_zero_point"] = int32_of(p.zeros, bits, 0)
    return made


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


def write_pair(
    folder: Path, plain: Path, config: dict, bits: int, group_size: int, symmetric: bool,
    packed: Callable[[str, Packed], Tensors],
) -> None:  # fmt: skip
    """Write the directory ``folder`` with the linears of ``plain`` packed, and give ``plain`` the
    same weights dequantised. Embedding, head and routers stay floats."""
    tensors, made, same = load_file(plain / "model.safetensors"), {}, {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", ".w1", ".w2", ".w3")):
            made[name] = same[name] = value
            continue
        found = integers_of(value, bits, group_size, symmetric)
        made |= packed(module, found)
        same[name] = found.dequantise()
    folder.mkdir(exist_ok=True)
    write(folder / "model.safetensors", made)
    write(plain / "model.safetensors", same)
    keys = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": config}))


def write(path: Path, tensors: Tensors) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
