"""Validation of models: `graphllm.validate` checks a directory or a model file against
transformers or another oracle.
"""

from __future__ import annotations

from .report import Check, Report, Run
from .runner import validate

__all__ = ["Check", "Report", "Run", "validate"]
