"""The verbs: one module each, with a function of the same name."""

from __future__ import annotations

from importlib import import_module

from .declarations import VERBS, Verb

NAMES = (
    "attribute", "bench", "chat", "classify", "compare", "diff", "doctor", "embed", "inspect",
    "new", "perplexity", "plan", "profile", "quantize", "replay", "rerank", "run", "serve",
    "tokenize", "validate",
)  # fmt: skip


def find_verb(name: str) -> Verb | None:
    """Import the module of a verb; None if there is no such verb."""
    if name not in NAMES:
        return None
    import_module(f".{name}", __package__)
    return VERBS[name]
