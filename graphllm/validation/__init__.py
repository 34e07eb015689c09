"""Is a model right? `graphllm.validate`: a directory, or a model file's small models, against
transformers, check by check."""

from __future__ import annotations

from .report import Check, Report, Run
from .runner import validate

__all__ = ["Check", "Report", "Run", "validate"]
