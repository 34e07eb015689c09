"""Quantisation of model files: `quantize` writes a GGUF file of another type, `quantize_directory`
a Hugging Face directory with int8 or FP8 weights.

`mixes` chooses the format of each tensor, `source` and `hf_source` read the model, `encode` encodes
rows, `imatrix` reads importance matrices, `driver` writes the file, and `compressed_directory` the
directory.
"""

from .compressed_directory import quantize_directory
from .driver import Report, quantize
from .mixes import DIRECTORY_TYPES, FILE_TYPES

__all__ = ["DIRECTORY_TYPES", "FILE_TYPES", "Report", "quantize", "quantize_directory"]
