"""Published integer checkpoints: GPTQ, AWQ and compressed-tensors, repacked into block formats.

Each of these methods stores a linear as integers of 4 or 8 bits packed into int32, a scale per
group of elements and, if it is asymmetric, a zero point per group. One module per method reads
its ``quantization_config`` and its layout; `packed_linear` and `blocks` repack the integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...weights.safetensors import Safetensors
from . import awq, gptq
from .packed_linear import PackedLinear
from .packed_tensors import PackedTensors

# By quant_method: reads quantization_config (ConfigError for an unsupported one), and returns a
# function that finds the packed linears of a file.
_SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], gptq.Scheme | awq.Scheme]] = {
    "gptq": gptq.Scheme,
    "awq": awq.Scheme,
}
METHODS = tuple(_SCHEMES)


def scheme(method: str, source: str, config: Mapping[str, Any]) -> Callable[..., PackedTensors]:
    """Read a ``quantization_config``.

    Args:
        method: One of `METHODS`.
        source: The file and the key, for error messages.
        config: Value of ``quantization_config``.

    Returns:
        A function that wraps the directory's tensors, with packed linears as block formats.

    Raises:
        ConfigError: A key is unknown, or a value is not supported.
    """
    find = _SCHEMES[method](source, config).linears

    def wrap(file: Safetensors) -> PackedTensors:
        found: list[PackedLinear] = list(find(file))
        return PackedTensors(file, found, source)

    return wrap
