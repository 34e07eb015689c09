"""What an oracle is, and what it tells of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

PathFilter = Callable[[str], bool]


@dataclass
class AttentionRecord:
    """What an attention read and gave: [H, T, D], [Hkv, T, D], [T, H, D]; and how it was asked."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    result: np.ndarray
    options: Mapping[str, Any]


@dataclass
class OracleRecord:
    """One run over all of the ids: ``logits`` [T, vocab]; by path what modules returned and read,
    [T, ...] or, by heads, [H, T, D]; attentions by the path of their module; and which modules
    there are, with what they are called."""

    logits: np.ndarray
    returned: dict[str, np.ndarray] = field(default_factory=dict)
    read: dict[str, np.ndarray] = field(default_factory=dict)
    attended: dict[str, AttentionRecord] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # attributes of modules


class Oracle(Protocol):
    """Who knows what a model should compute. ``name``: for people; ``lines``: what loading told of
    weights that are missing or were not used."""

    @property
    def name(self) -> str: ...
    @property
    def lines(self) -> Sequence[str]: ...
    def run(self, ids: Sequence[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        """One run; of modules whose path is ``wanted`` it keeps what they read and return."""
