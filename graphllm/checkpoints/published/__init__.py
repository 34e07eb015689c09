"""Published quantised checkpoints: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes.

One module per method reads its ``quantization_config`` and its layout. A linear is stored either as
integers of 4 or 8 bits packed into int32, with a scale and perhaps a zero point per group of
elements, which `packed_linear` and `blocks` repack into block formats; as int8 or e4m3 with scales
per tensor, channel or tile, which `scaled_linear` joins into row formats; or as codes of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ...weights.safetensors import Safetensors
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq
from .packed_tensors import PackedTensors
from .stored_linear import StoredLinear


class Scheme(Protocol):
    """A ``quantization_config`` that is supported."""

    def linears(self, file: Safetensors) -> Iterable[StoredLinear]:
        """Return the quantised linears of a file."""


# By quant_method; a constructor raises ConfigError for a configuration that is not supported.
_SCHEMES: Mapping[str, Callable[[str, Mapping[str, Any]], Scheme]] = {
    "gptq": gptq.Scheme,
    "awq": awq.Scheme,
    compressed_tensors.METHOD: compressed_tensors.Scheme,
    fp8.METHOD: fp8.Scheme,
    bitsandbytes.METHOD: bitsandbytes.Scheme,
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
        A function that wraps the directory's tensors, with quantised linears in block or row
        formats.

    Raises:
        ConfigError: A key is unknown, or a value is not supported.
    """
    found = _SCHEMES[method](source, config)
    return lambda file: PackedTensors(file, list(found.linears(file)), source)
