"""Multi-turn chat that reuses the KV cache: each turn computes only its new tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..engine.completion import Completion
from ..tokenizer import Tokenizer
from .rendered_chat import RenderedChat, encode_chat
from .template import ChatTemplate

# Streams the answer to prompt ids and fills in the completion.
Answer = Callable[[list[int], Completion], Iterator[str]]


class Conversation:
    """A multi-turn chat: its messages, and the sampled token ids of its answers.

    Encoding the text of an answer may give other tokens than the sampled ones. With the sampled
    ids, the prompt of the next turn shares its prefix with the cache, provided the template
    reproduces the answer's text.

    Args:
        template: chat template.
        tokenizer: tokenizer of the model.
        answer: streams the text that follows some token ids.
        system: system message.
        parse_special: see `RenderedChat.encode`.
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
        """Forget all messages except the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._text, self._ids = "", list[int]()

    def ask(self, text: str, done: Completion | None = None) -> Generator[str, None, None]:
        """Add a user message and yield the answer piece by piece.

        The message and the part of the answer that was consumed become part of the conversation,
        even if the generator is closed early. A turn that fails before its first token does not.

        Args:
            text: the user message.
            done: filled in like the result of `LLM.chat`.

        Raises:
            RequestError: the template rejects the messages, or the context is too small.
        """
        done = Completion() if done is None else done
        turn = {"role": "user", "content": text}
        prompt = self.template.render_prompt([*self.messages, turn])
        answered = False
        try:
            for piece in self._answer(self._encode(prompt), done):
                answered = True
                yield piece
            answered = True
        finally:
            if answered or done.ids:
                self.messages += [turn, {"role": "assistant", "content": done.text}]
                self._remember(prompt, done)

    def _encode(self, prompt: RenderedChat) -> list[int]:
        """Return the prompt's ids; reuse those of the last turn if the prompt extends its text."""
        if self._text and prompt.text.startswith(self._text):
            rest = prompt.after(len(self._text)).encode(self.tokenizer, self._parse_special)
            # The rest can be encoded separately only if it begins with a special token.
            if rest and self.tokenizer.decode(rest[:1], continuation=True) == "":
                return self._ids + rest
        return encode_chat(self.tokenizer, prompt, self._parse_special)

    def _remember(self, prompt: RenderedChat, done: Completion) -> None:
        """Keep the ids of prompt and answer if the answer's ids decode exactly to its text."""
        shown = self.tokenizer.decode(done.ids, skip_special=False, continuation=True)
        exact = shown == done.text
        self._text = prompt.text + done.text if exact else ""
        self._ids = done.prompt_ids + done.ids if exact else []
