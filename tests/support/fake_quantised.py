"""transformers' models with the weights and inputs of linears rounded by compressed-tensors: the
oracle for W8A8 and FP8 directories of mixtures, which transformers does not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

# Not quantised in published checkpoints: the head and routers. DeepSeek's own code multiplies the
# absorbed matrices of latent attention by floats.
FLOATS = ("lm_head", "gate", "kv_b_proj")


def logits(
    folder: Path, plain: Path, scheme: Mapping[str, Any], prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits float32 [N, T, vocab] of a directory with float inputs of linears, and with
    quantised ones.

    Args:
        folder: the quantised directory.
        plain: the same model in floats; gets the dequantised weights.
        scheme: ``weights`` and ``input_activations`` as compressed-tensors states them.
        prompts: token ids [N, T].
    """
    _dequantise(folder, plain, QuantizationArgs(**scheme["weights"]))
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **kinds)
    ids = torch.from_numpy(prompts)
    with torch.no_grad():
        floats = model(ids, use_cache=False).logits.numpy()
        with _QuantisedInputs(model, QuantizationArgs(**scheme["input_activations"])):
            return floats, model(ids, use_cache=False).logits.numpy()


def _dequantise(folder: Path, plain: Path, args: QuantizationArgs) -> None:
    stored, made = load_file(folder / "model.safetensors"), {}
    scales = {name.removesuffix("_inv"): stored.pop(name) for name in [*stored] if "_scale" in name}
    for name, value in stored.items():
        scale = scales.get(f"{name}_scale")
        made[name] = value if scale is None else dequantize(value.float(), scale, args=args)
    save_file(made, plain / "model.safetensors", metadata={"format": "pt"})


class _QuantisedInputs(TorchFunctionMode):
    """Quantises the inputs of a model's linears, those of experts included."""

    def __init__(self, model: PreTrainedModel, args: QuantizationArgs) -> None:
        super().__init__()
        self._args = args
        self._weights = {  # experts' matrices are views of one parameter
            value.untyped_storage().data_ptr()
            for name, value in model.named_parameters()
            if not name.removesuffix(".weight").endswith(FLOATS)
        }

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is torch.nn.functional.linear:
            x, weight, *rest = args
            if weight.untyped_storage().data_ptr() in self._weights:
                args = (self._rounded(x), weight, *rest)
        return function(*args, **(kwargs or {}))

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, x.shape[-1])  # "token" means the first two axes
        scales = compute_dynamic_scales_and_zp(rows, self._args, None)
        q = quantize(rows, *scales, self._args)
        if self._args.type == "int":
            q = q.clamp(min=-127)  # a8_row has no -128
        return dequantize(q, *scales, self._args).reshape(x.shape)
