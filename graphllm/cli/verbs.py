"""All verbs, registered with the application that parses the command line."""

from __future__ import annotations

from . import (
    bench,
    chat,
    compare,
    diff,
    doctor,
    inspect,
    new,
    plan,
    profile,
    run,
    tokenize,
    validate,
)
from .options import app

__all__ = [
    "app", "bench", "chat", "compare", "diff", "doctor", "inspect", "new", "plan", "profile", "run",
    "tokenize", "validate",
]  # fmt: skip
