"""Oracle protocol, and the record of one oracle run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

PathFilter = Callable[[str], bool]  # selects modules by path


@dataclass
class AttentionRecord:
    """Inputs, result and options of one attention.

    query [H, T, D]; key and value [Hkv, T, D]; result [T, H, D].
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    result: np.ndarray
    options: Mapping[str, Any]


@dataclass
class OracleRecord:
    """Record of one oracle run over all ids.

    Attributes:
        logits: [T, vocab]; the hidden states [T, dim] of an encoder.
        returned: outputs of modules by path, [T, ...] or by heads [H, T, D].
        read: inputs of modules by path.
        attended: attentions by path of their module.
        modules: class names of the modules by path.
        facts: selected attributes of the modules by path, as ``eps``.
    """

    logits: np.ndarray
    returned: dict[str, np.ndarray] = field(default_factory=dict)
    read: dict[str, np.ndarray] = field(default_factory=dict)
    attended: dict[str, AttentionRecord] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Oracle(Protocol):
    """Independent source of what a model should compute.

    ``name``: shown in reports; ``lines``: messages on missing or unused weights.
    """

    @property
    def name(self) -> str: ...
    @property
    def lines(self) -> Sequence[str]: ...
    def run(self, ids: Sequence[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        """Run over ``ids``; record inputs and outputs of the modules selected by ``wanted``."""
