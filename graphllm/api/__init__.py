"""Public Python API: `load` returns an `LLM`."""

from .llm import LLM

load = LLM.load

__all__ = ["LLM", "load"]
