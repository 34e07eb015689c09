"""Storage formats of weights and activations: layout, and NumPy formulas to decode and encode.

Importing the package declares the block formats and the row formats. Each family has a module,
which is found here: a new one need not be added to this file.
"""

from importlib import import_module
from pkgutil import iter_modules

# isort: off
from .activations import A8_32, A8_256, ACTIVATIONS
from .block_format import (
    BLOCK_FORMATS,
    WEIGHT_FORMATS,
    BlockFormat,
    blocks_of,
    declare,
    gguf_formats,
)
from . import legacy, k_quants, iq4, microscaling  # formats are listed in this order, others after
from .row_format import ROW_FORMATS, RowFormat, activation_of, fallback_of
# isort: on

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "A8_32",
    "A8_256",
    "ACTIVATIONS",
    "BLOCK_FORMATS",
    "ROW_FORMATS",
    "WEIGHT_FORMATS",
    "BlockFormat",
    "RowFormat",
    "activation_of",
    "blocks_of",
    "declare",
    "fallback_of",
    "gguf_formats",
    "iq4",
    "k_quants",
    "legacy",
    "microscaling",
]
