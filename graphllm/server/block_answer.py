"""Chat answers that are lists of blocks, as in OpenAI's Responses and Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..engine.completion import Completion
from ..tokenizer import Tokenizer
from .answers import Answer, Object, Piece
from .chat_text import ChatText, call_object
from .json_data import json_bytes
from .tool_call_parser import Part, Text

REASONING, TEXT, CALL = "reasoning", "text", "call"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        kind: `REASONING`, `TEXT` or `CALL`.
        index: its number in the answer.
        parts: its text, or the JSON text of a call's arguments, in parts.
        call: object of a call in OpenAI's API, which has its id and name.
        complete: whether the block was not cut off.
    """

    kind: str
    index: int
    parts: list[str] = field(default_factory=list)
    call: Object = field(default_factory=dict)
    complete: bool = True

    @property
    def text(self) -> str:
        """All parts joined."""
        return "".join(self.parts)

    @property
    def name(self) -> str:
        """Name of the function that a call calls."""
        return self.call["function"]["name"]


class BlockAnswer(Answer):
    """Base class of the answers; whole ones are built by the same calls as streams.

    Subclasses define the events of a block's beginning, of its parts and of its end, and `finish`
    and `result`.

    Attributes:
        blocks: the blocks so far.
        reason: ``finish_reason`` of ``/v1/chat/completions``; empty until the end.
    """

    last = b""

    def __init__(self, model: str, tokenizer: Tokenizer, text: ChatText) -> None:
        """As `Answer`; ``text`` splits the answer."""
        super().__init__(model, tokenizer)
        self._chat_text = text
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.reason = ""

    # -- for subclasses
    def result(self, done: Completion) -> Object:
        """Return the whole answer."""
        raise NotImplementedError

    def opened(self, block: Block) -> Iterator[Object]:
        """Yield the events of the beginning of a block."""
        raise NotImplementedError

    def added(self, block: Block, part: str) -> Iterator[Object]:
        """Yield the events of a part of a block."""
        raise NotImplementedError

    def closed(self, block: Block) -> Iterator[Object]:
        """Yield the events of the end of a block."""
        raise NotImplementedError

    def reasoning_tokens(self, done: Completion) -> int:
        """Return how many tokens of the answer are reasoning, with what precedes it."""
        size = sum(len(block.text) for block in self.blocks if block.kind == REASONING)
        stream = self.tokenizer.stream(continuation=True)
        return self._chat_text.reasoning_tokens(map(stream.push, done.ids), size)

    # -- as `Answer`
    def whole(self, prompts: Sequence[Completion]) -> Object:
        (done,) = prompts
        for _ in self.begin(prompts, 1):
            pass
        for _ in self._read(done.text, done.finish_reason):
            pass
        return self.result(done)

    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        yield from ()

    def pieces(self, new: Sequence[Piece]) -> Iterator[Object]:
        for _, text, _ in new:
            yield from self._read(text, None)

    def encoded(self, new: Sequence[Piece]) -> Iterator[bytes]:
        yield from map(self.frame, self.pieces(new))

    def ended(self, index: int, finish: str) -> Iterator[Object]:
        yield from self._read("", finish)

    def frame(self, event: Object) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(event))

    def framed(self, event: Object) -> Iterator[bytes]:
        yield self.frame(event)

    # -- blocks
    def _read(self, text: str, finish: str | None) -> Iterator[Object]:
        """Yield the events of new text; ``finish``: finish_reason, if the text is the last one."""
        parts, reason = self._chat_text.parts(0, text, finish)
        for part in parts:
            yield from self._add(part)
        if reason is not None:
            self.reason = reason
            if self._open is not None:
                self._open.complete = finish != "length"
                yield from self._close()

    def _add(self, part: Part) -> Iterator[Object]:
        """Yield the events of a part; only the first one of a call has a name."""
        if isinstance(part, Text):
            kind, text, call = REASONING if part.reasoning else TEXT, part.text, None
        else:
            kind, text, call = CALL, part.arguments, call_object(part) if part.name else None
        if self._open is None or self._open.kind != kind or call is not None:
            yield from self._close()
            self._open = Block(kind, len(self.blocks), call=call or {})
            self.blocks.append(self._open)
            yield from self.opened(self._open)
        if text:
            self._open.parts.append(text)
            yield from self.added(self._open, text)

    def _close(self) -> Iterator[Object]:
        if self._open is not None:
            block, self._open = self._open, None
            yield from self.closed(block)
