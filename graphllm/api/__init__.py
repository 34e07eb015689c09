"""Public Python API: `load` returns an `LLM`, or an `EmbeddingModel` for an encoder."""

from .llm import LLM
from .loader import load
from .request_handle import RequestHandle, RequestProgress

__all__ = ["LLM", "RequestHandle", "RequestProgress", "load"]
