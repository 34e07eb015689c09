"""Storage formats of weights and activations: layout, and NumPy formulas to decode and encode.

Importing the package declares the block formats. Each family has a module, which is found here: a
new one need not be added to this file.
"""

from importlib import import_module
from pkgutil import iter_modules

# Formats are listed in the order of their declaration: first the families below, in this order.
# isort: off
from .activations import A8_32, A8_256
from .block_format import BLOCK_FORMATS, WEIGHT_FORMATS, BlockFormat, blocks_of, declare
from .legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from .k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from .iq4 import IQ4_NL, IQ4_XS
from .mxfp4 import MXFP4
# isort: on

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "A8_32", "A8_256", "BLOCK_FORMATS", "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_0", "Q4_1",
    "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "WEIGHT_FORMATS", "BlockFormat", "blocks_of",
    "declare",
]  # fmt: skip
