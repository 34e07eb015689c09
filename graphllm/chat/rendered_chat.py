"""Rendered chat and its token ids: only text of the template becomes control tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat. ``content``: spans [start, end) of ``text`` that came from the caller."""

    text: str
    content: tuple[tuple[int, int], ...] = ()

    def after(self, start: int) -> RenderedChat:
        """Return the chat without its first ``start`` characters."""
        moved = [(max(0, a - start), b - start) for a, b in self.content if b > start]
        return RenderedChat(self.text[start:], tuple(moved))

    def encode(self, tokenizer: Tokenizer, parse_special: bool = False) -> list[int]:
        """Return the token ids.

        A special token's text that came from the caller, in whole or in part, is encoded as text
        unless ``parse_special``.
        """
        literal = () if parse_special else self.content
        return tokenizer.encode(self.text, parse_special=True, literal=literal)


def encode_chat(
    tokenizer: Tokenizer, prompt: RenderedChat, parse_special: bool = False
) -> list[int]:
    """Return the token ids of a rendered chat with exactly one BOS token.

    Some templates write the BOS token themselves, others leave it to the tokenizer.
    """
    ids = prompt.encode(tokenizer, parse_special)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids
