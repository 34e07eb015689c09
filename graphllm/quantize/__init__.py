"""Quantisation of model files: `quantize` writes a GGUF file of another type.

`mixes` chooses the format of each tensor, `source` and `hf_source` read the model, `encode` encodes
rows, `imatrix` reads importance matrices, and `driver` writes the file.
"""

from .driver import Report, quantize
from .mixes import FILE_TYPES

__all__ = ["FILE_TYPES", "Report", "quantize"]
