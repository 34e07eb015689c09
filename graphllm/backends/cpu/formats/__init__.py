"""Weight formats on the CPU: how rows are packed, unpacked and encoded. See `packed_format`.

Each family has a module, which is found here: a new one need not be added to this file.
"""

from importlib import import_module
from pkgutil import iter_modules

from .bit_layout import stacked
from .packed_format import (
    BLOCK_FORMATS,
    FORMATS,
    Block32,
    Block256,
    PackedFormat,
    by_code,
    register,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "Block32",
    "Block256",
    "PackedFormat",
    "by_code",
    "register",
    "stacked",
]
