"""Prompts to fill in the middle of a text, of models that were trained for it.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"; several
files as in Hui et al. 2024, "Qwen2.5-Coder Technical Report", and in llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tokenizer import Tokenizer
from ..tokenizer.vocabulary import FIM_NAMES
from .errors import ApiError


class InfillPrompts:
    """Makes prompts with the control tokens of a vocabulary.

    Raises:
        ApiError: the vocabulary has no tokens for a prefix, a suffix and a middle.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = _infill_ids(tokenizer)
        if missing := [part for part in ("prefix", "suffix", "middle") if part not in self._ids]:
            text = f"the model cannot fill in text: its vocabulary has no {missing[0]} token"
            raise ApiError(400, text, code="unsupported_value")

    def after(self, suffix: str) -> list[int]:
        """Return the token ids of a suffix, with the control tokens around it."""
        ids = self._ids
        return [ids["suffix"], *self._tokenizer.encode(suffix), ids["middle"]]

    def encode(
        self,
        prefix: str,
        after: Sequence[int],
        files: Sequence[tuple[str, str]] = (),
        middle: str = "",
    ) -> list[int]:
        """Return the token ids of a prompt, whose answer is text between prefix and suffix.

        Args:
            prefix: the text before the answer.
            after: what `after` returns for the text after the answer.
            files: names and texts of other files, for context.
            middle: text after the prefix with which the answer begins.
        """
        encode, ids, tokenizer = self._tokenizer.encode, self._ids, self._tokenizer
        own = list[int]()
        if "repository" in ids and files:
            own += [ids["repository"], *encode("project\n")]
        for name, text in files:
            head = [ids["file"], *encode(f"{name}\n")] if "file" in ids else encode(f"\n\n{name}\n")
            own += [*head, *encode(text)]
        if "file" in ids and own:
            own += [ids["file"], *encode("file\n")]
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            own.append(tokenizer.bos_id)
        before = [ids["prefix"], *encode(prefix), *encode(middle)]
        return [*own, *before, *after]


def _infill_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the control tokens that the vocabulary has, by what they begin."""
    parts = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle",
             "fim_rep": "repository", "fim_sep": "file"}  # fmt: skip
    found = dict[str, int]()
    for keys, names in FIM_NAMES:
        for name in names if keys[0] in parts else ():
            ids = tokenizer.encode(name, parse_special=True)
            if len(ids) == 1 and tokenizer.piece(ids[0]) == name.encode():
                found.setdefault(parts[keys[0]], ids[0])
    return found
