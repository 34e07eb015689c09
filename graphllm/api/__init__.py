"""The Python API: `load` makes an `LLM`."""

from .llm import LLM
from .loading import load

__all__ = ["LLM", "load"]
