"""A chat in turns, each of which costs its new tokens only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..engine.request import Completion
from ..tokenizer import Tokenizer
from .rendered_chat import RenderedChat, encode_chat
from .template import ChatTemplate

Answer = Callable[[list[int], Completion], Iterator[str]]  # to the ids; fills in the completion


class Conversation:
    """A chat that remembers its messages, and the tokens that its answers were made of.

    An answer's text need not be encoded to the tokens that the model drew; with those the next
    turn's prompt begins as the cache does, wherever the template leaves the answer as it was.
    ``answer`` makes the text that follows some ids. ``parse_special``: see `RenderedChat.encode`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        answer: Answer,
        system: str | None,
        parse_special: bool = False,
    ) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._parse_special = parse_special
        self._answer, self._system = answer, system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message if there is one."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._text, self._ids = "", list[int]()

    def ask(self, text: str, done: Completion | None = None) -> Generator[str, None, None]:
        """Say ``text`` and get the answer piece by piece.

        What was said is remembered with as much of the answer as was taken: an answer that is
        broken off counts as given. A turn that fails before its first token is forgotten.
        """
        done = Completion() if done is None else done
        turn = {"role": "user", "content": text}
        prompt = self.template.render_prompt([*self.messages, turn])
        said = False
        try:
            for piece in self._answer(self._encode(prompt), done):
                said = True
                yield piece
            said = True
        finally:
            if said or done.ids:
                self.messages += [turn, {"role": "assistant", "content": done.text}]
                self._remember(prompt, done)

    def _encode(self, prompt: RenderedChat) -> list[int]:
        """The prompt's ids, beginning with those of the last turn where its text does."""
        if self._text and prompt.text.startswith(self._text):
            rest = prompt.after(len(self._text)).encode(self.tokenizer, self._parse_special)
            # Text is encoded on its own only where a special piece parts it from the text before.
            if rest and self.tokenizer.decode(rest[:1], continuation=True) == "":
                return self._ids + rest
        return encode_chat(self.tokenizer, prompt, self._parse_special)

    def _remember(self, prompt: RenderedChat, done: Completion) -> None:
        """Keep the tokens of prompt and answer, if the answer's are the whole of its text."""
        shown = self.tokenizer.decode(done.ids, skip_special=False, continuation=True)
        exact = shown == done.text
        self._text = prompt.text + done.text if exact else ""
        self._ids = done.prompt_ids + done.ids if exact else []
