"""The Python API: `load` makes an `LLM`."""

from .llm import LLM

load = LLM.load

__all__ = ["LLM", "load"]
