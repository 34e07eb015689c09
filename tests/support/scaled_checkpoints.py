"""Writer of W8A8 and FP8 directories, from the definitions of their layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from packed_checkpoints import compressed_config
from safetensors.torch import load_file, save_file

E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def scaled(values: np.ndarray, floats: bool, strategy: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 [N, K]; return the elements, and scales per tensor, channel or block."""
    rows, columns = values.shape
    tall, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[strategy]
    down, across = -(-rows // tall), -(-columns // wide)
    scales = np.empty((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            part = values[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
            scales[i, j] = np.abs(part).max() / (448 if floats else 127)
    full = expanded(scales, tall, wide)[:rows, :columns]
    made = values / full
    return made.astype(E4M3) if floats else np.rint(made).astype(np.int8), scales


def expanded(scales: np.ndarray, tall: int, wide: int) -> np.ndarray:
    return np.repeat(np.repeat(scales, tall, 0), wide, 1)


def arguments(floats: bool, strategy: str, **keys: Any) -> dict[str, Any]:
    """Settings of weights, or of activations if they are dynamic."""
    block = [128, 128] if strategy == "block" else None
    return {
        "num_bits": 8, "type": "float" if floats else "int", "symmetric": True,
        "strategy": strategy, "group_size": 128 if strategy == "group" else None,
        "block_structure": block, "dynamic": False, "actorder": None, "observer": None,
        "observer_kwargs": {}, **keys,
    }  # fmt: skip


def config(floats: bool, strategy: str, **keys: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    made = compressed_config(arguments(floats, strategy))
    group = made["config_groups"]["group_0"]
    each = "group" if strategy == "block" else "token"
    group["input_activations"] = arguments(floats, each, dynamic=True)
    made["format"] = group["format"] = "float-quantized" if floats else "int-quantized"
    return {**made, **keys}


def fp8_config(**keys: Any) -> dict[str, Any]:
    """quantization_config of DeepSeek's and Qwen's FP8."""
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"], **keys,
    }  # fmt: skip


def tensors(module: str, values: np.ndarray, floats: bool, strategy: str, scale: str) -> Tensors:
    q, scales = scaled(values, floats, strategy)
    bits = torch.from_numpy(q.view(np.int8).copy())
    return {
        f"{module}.weight": bits.view(torch.float8_e4m3fn) if floats else bits,
        f"{module}.{scale}": torch.from_numpy(scales[0] if strategy == "tensor" else scales),
    }


def write(plain: Path, folder: Path, stated: dict[str, Any], make: Callable[..., Tensors]) -> None:
    """Write ``folder`` with the linears of ``plain`` quantised by ``make(module, values)``."""
    made: Tensors = {}
    for name, value in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(("_proj", "_mqa", ".w1", ".w2", ".w3")):
            made |= make(module, value.float().numpy())
        else:
            made[name] = value
    folder.mkdir(exist_ok=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "quantization_config": stated}))
