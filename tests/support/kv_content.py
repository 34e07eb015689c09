"""Model of what a KV cache's pools contain: an oracle of block managers and schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphllm.model.batch import CacheSpec


def groups(**windows: int) -> list[CacheSpec]:
    """Cache groups by name, each with its window."""
    return [CacheSpec(name, (0,), {"k": (1,), "v": (1,)}, w) for name, w in windows.items()]


class KvContent:
    """Content of each pool row: a number for (all tokens that the key depends on, position).

    The keys of a token depend on all tokens up to it, and in a bidirectional prefix on all tokens
    of the prefix. Equal numbers mean equal content: they are given to the paths of a trie.
    """

    def __init__(self, specs: Sequence[CacheSpec], pool_blocks: Mapping[str, int], block: int):
        self.block = block
        self.windows = {spec.name: spec.window for spec in specs}
        self.rows = {name: np.full(pool_blocks[name] * block, -1) for name in self.windows}
        self._numbers: dict[Any, int] = {}

    def numbers(self, tokens: Sequence[int], prefix: int) -> np.ndarray:
        """The content of each token's keys."""
        found, last = [], self._number(("prefix", *tokens[:prefix]))
        for token in tokens:
            last = self._number((last, token))
            found.append(last)
        return np.array(found)

    def _number(self, path: Any) -> int:
        return self._numbers.setdefault(path, len(self._numbers))

    def _at(self, blocks: Any, group: str, start: int, stop: int) -> np.ndarray:
        at = np.arange(start, stop)
        held = blocks.tables[group][at // self.block]
        assert (held >= 0).all(), f"{group}: no block for some of tokens {start} to {stop - 1}"
        return held * self.block + at % self.block

    def write(self, blocks: Any, start: int, numbers: np.ndarray) -> None:
        """Store the keys of the tokens from ``start`` on in all groups."""
        for group, rows in self.rows.items():
            rows[self._at(blocks, group, start, start + len(numbers))] = numbers

    def read(self, blocks: Any, start: int, numbers: np.ndarray) -> None:
        """Check the keys that tokens ``start`` to the end attend to; ``numbers`` has all tokens."""
        for group, window in self.windows.items():
            first = max(0, start - window + 1) if window else 0
            have = self.rows[group][self._at(blocks, group, first, len(numbers))]
            wrong = np.flatnonzero(have != numbers[first:])
            assert not len(wrong), f"{group}: wrong keys at positions {first + wrong}"

    def copy(self, copies: Sequence[Any]) -> None:
        """Copy blocks."""
        for group, source, target in copies:
            rows = self.rows[group].reshape(-1, self.block)
            rows[target] = rows[source]

    def compute(self, blocks: Any, tokens: Sequence[int], start: int, prefix: int = 0) -> None:
        """Write and read the tokens from ``start`` on, as a step does."""
        numbers = self.numbers(tokens, prefix)
        self.write(blocks, start, numbers[start:])
        self.read(blocks, start, numbers)
