"""Pairs of texts as one sequence, such as a query and a document for a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..errors import ModelFileError
from ..tokenizer import Tokenizer


class PairTemplate:
    """Special tokens around and between two texts, and the token types, of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        types: Number of token types of the model; types are zeros unless it has several.

    Raises:
        ModelFileError: the tokenizer cannot join texts.
    """

    def __init__(self, tokenizer: Tokenizer, types: int) -> None:
        engine = getattr(tokenizer, "engine", None)
        if engine is None:
            raise ModelFileError("pairs of texts need a tokenizer.json, which the directory lacks")
        found = engine.encode("a", "a")
        rows = zip(found.sequence_ids, found.ids, found.type_ids, strict=True)
        # Parts in order: the text (0 or 1), or None with the special tokens; and the token type.
        self._parts = [
            (text, kind if types > 1 else 0, [row[1] for row in group] if text is None else [])
            for (text, kind), group in groupby(rows, key=lambda row: (row[0], row[2]))
        ]
        if [text for text, _, _ in self._parts if text is not None] != [0, 1]:
            raise ModelFileError("the tokenizer's template does not have two texts")
        self.special = sum(len(ids) for _, _, ids in self._parts)

    def join(self, *texts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return token ids and token types of a pair, from the token ids of its two texts."""
        ids: list[int] = []
        types: list[int] = []
        for text, kind, special in self._parts:
            part = special if text is None else texts[text]
            ids += part
            types += [kind] * len(part)
        return ids, types


def longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Return the tokens to keep of two texts: the longer one loses tokens until both are as long.

    That is the strategy ``longest_first`` of transformers; of an odd number, the second text keeps
    one more, as in the tokenizers package.
    """
    if first + second <= most:
        return first, second
    if min(first, second) > most // 2:
        short, long = most // 2, most - most // 2
        return (short, long) if first <= second else (long, short)
    return (first, most - first) if first <= second else (most - second, second)
