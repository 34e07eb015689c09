"""A rendered chat, and its token ids: control tokens are the template's alone."""

from __future__ import annotations

from dataclasses import dataclass

from ..tokenizer import Tokenizer


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat. ``content``: spans [start, end) of ``text`` that came from the caller."""

    text: str
    content: tuple[tuple[int, int], ...] = ()

    def after(self, start: int) -> RenderedChat:
        """What follows the first ``start`` characters."""
        moved = [(max(0, a - start), b - start) for a, b in self.content if b > start]
        return RenderedChat(self.text[start:], tuple(moved))

    def encode(self, tokenizer: Tokenizer, parse_special: bool = False) -> list[int]:
        """The ids. The text of a special token that came from the caller, or of which a part did,
        is encoded as text, unless ``parse_special``."""
        literal = () if parse_special else self.content
        return tokenizer.encode(self.text, parse_special=True, literal=literal)


def encode_chat(
    tokenizer: Tokenizer, prompt: RenderedChat, parse_special: bool = False
) -> list[int]:
    """Ids of a rendered chat, with one begin token first.

    Some templates write the begin token themselves, some leave it to the tokenizer.
    """
    ids = prompt.encode(tokenizer, parse_special)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids
