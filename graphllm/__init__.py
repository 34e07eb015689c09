"""Language models as lazy graphs, with op-level placement and profiles.

import graphllm
llm = graphllm.load("model.gguf")
print(llm.generate("The capital of France is", max_tokens=32).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    ConfigError,
    GraphError,
    GraphllmError,
    ModelFileError,
    PlacementError,
    RequestError,
)
from .version import __version__

if TYPE_CHECKING:
    from .api import LLM, RequestHandle, load
    from .api.async_llm import AsyncLLM
    from .embedding import (
        EmbeddingModel,
        Filling,
        MaskedLanguageModel,
        RankedDocument,
        SequenceClassifier,
        TokenClassifier,
        TokenLabel,
    )
    from .engine.completion import Completion
    from .engine.request import Sampling
    from .engine.step_result import TokenLogprobs
    from .profiler.compare.comparison import compare
    from .profiler.diff.comparison import diff
    from .profiler.prediction import dry_run
    from .runtime.executor import Executor
    from .validation import validate

__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "ConfigError",
    "EmbeddingModel",
    "Executor",
    "Filling",
    "GraphError",
    "GraphllmError",
    "MaskedLanguageModel",
    "ModelFileError",
    "PlacementError",
    "RankedDocument",
    "RequestError",
    "RequestHandle",
    "Sampling",
    "SequenceClassifier",
    "TokenClassifier",
    "TokenLabel",
    "TokenLogprobs",
    "__version__",
    "compare",
    "diff",
    "dry_run",
    "load",
    "validate",
]

_MODULE_OF = {
    "load": "api",
    "LLM": "api",
    **dict.fromkeys(
        (
            "EmbeddingModel",
            "Filling",
            "MaskedLanguageModel",
            "RankedDocument",
            "SequenceClassifier",
            "TokenClassifier",
            "TokenLabel",
        ),
        "embedding",
    ),
    "AsyncLLM": "api.async_llm",
    "RequestHandle": "api",
    "Completion": "engine.completion",
    "Sampling": "engine.request",
    "TokenLogprobs": "engine.step_result",
    "Executor": "runtime.executor",
    "compare": "profiler.compare.comparison",
    "diff": "profiler.diff.comparison",
    "dry_run": "profiler.prediction",
    "validate": "validation",
}


def __getattr__(name: str) -> Any:
    """Import public names at first use, so that ``import graphllm`` stays light."""
    from importlib import import_module

    if name in _MODULE_OF:
        return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    if name in ("ops", "models"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'graphllm' has no attribute {name!r}")
