"""Published integer checkpoints: GPTQ, AWQ and compressed-tensors, repacked into block formats.

Each of these methods stores a linear as integers of 4 or 8 bits packed into int32, a scale per
group of elements and, if it is asymmetric, a zero point per group. One module per method reads
its ``quantization_config`` and its layout; `packed_linear` and `blocks` repack the integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ...weights.safetensors import Safetensors
from . import awq, compressed_tensors, gptq
from .packed_linear import PackedLinear
from .packed_tensors import PackedTensors


class Scheme(Protocol):
    """A ``quantization_config`` that is supported."""

    def linears(self, file: Safetensors) -> Iterable[PackedLinear]:
        """Return the packed linears of a file."""


# By quant_method; a constructor raises ConfigError for a configuration that is not supported.
_SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], Scheme]] = {
    "gptq": gptq.Scheme,
    "awq": awq.Scheme,
    compressed_tensors.METHOD: compressed_tensors.Scheme,
}
METHODS = tuple(_SCHEMES)


def scheme(
    method: str, source: str, config: Mapping[str, Any]
) -> Callable[[Safetensors], PackedTensors]:
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
    found = _SCHEMES[method](source, config)
    return lambda file: PackedTensors(file, list(found.linears(file)), source)
