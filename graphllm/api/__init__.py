"""Public Python API: `load` returns an `LLM`."""

from .llm import LLM
from .request_handle import RequestHandle, RequestProgress

load = LLM.load

__all__ = ["LLM", "RequestHandle", "RequestProgress", "load"]
