"""FP8 checkpoints with blocks (``quant_method: fp8``), as DeepSeek and Qwen publish them.

Tensors of a linear [N, K]: ``weight`` e4m3 [N, K] and ``weight_scale_inv`` [N / 128, K / 128],
rounded up, which multiplies the elements in spite of its name. Activations are quantised at run
time, per token and 128 elements (DeepSeek-AI 2024, DeepSeek-V3, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import quote
from ...formats.row_format import FP8_128
from ...weights.safetensors import Safetensors
from .scaled_linear import BLOCK, TILE, WEIGHT, ScaledLinear
from .settings import STATIC_SCALES, Settings
from .stored_linear import modules_with

METHOD = "fp8"
_SCALE = "weight_scale_inv"


class Scheme:
    """A ``quantization_config`` of the method fp8. ConfigError for a key or value that is not
    supported."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        keys = Settings(source, config)
        keys.only("quant_method", METHOD)
        if keys.one_of("activation_scheme", ("dynamic", "static")) == "static":
            raise keys.error("activation_scheme", "static", STATIC_SCALES)
        keys.only("fmt", "e4m3")
        keys.one_of("weight_block_size", ([TILE, TILE],))
        keys.only("scale_fmt")  # ue8m0 would round the scales of activations to powers of 2
        self.ignored = keys.strings("modules_to_not_convert")
        keys.finish()

    def linears(self, file: Safetensors) -> Iterator[ScaledLinear]:
        """Yield the quantised linears of a file. ModelFileError for wrong shapes or dtypes."""
        for module in modules_with(file, _SCALE):
            linear = ScaledLinear(file, module, FP8_128, _SCALE, BLOCK)
            if any(_names(each, module) for each in self.ignored):
                text = f"modules_to_not_convert names the module {quote(module)}"
                raise linear.error(WEIGHT, f"quantised, but {text}")
            yield linear


def _names(pattern: str, module: str) -> bool:
    """Whether a path of ``modules_to_not_convert`` is that of a module or of one around it."""
    return f"{module}.".startswith(f"{pattern}.")
