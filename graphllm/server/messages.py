"""Anthropic's Messages API: ``/v1/messages``, its events, and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..engine.completion import Completion
from ..tokenizer import Tokenizer
from .answers import Object, matched_stop
from .block_answer import CALL, REASONING, TEXT, Block, BlockAnswer
from .chat_parts import with_system
from .chat_text import ChatText
from .completions import Chat, Completions
from .errors import ApiError, anthropic_body
from .fields import sampling_settings, setting_names
from .json_data import json_response
from .message_fields import COUNT_TOKENS, MESSAGES, chat_values

_NAMES = {"prompt": "messages", "grammar": "tools", "json_schema": "output_config",
          "response_format": "output_config"}  # fmt: skip
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# The key of a block's content, and the type and the key of its parts in a stream.
_KEYS = {
    REASONING: ("thinking", "thinking_delta", "thinking"),
    TEXT: ("text", "text_delta", "text"),
    CALL: ("input", "input_json_delta", "partial_json"),
}


class Messages:
    """The endpoints of Anthropic's API; ``completions`` generates the answers."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, request: Request) -> ASGIApp:
        """``/v1/messages``."""
        own = self._completions
        values = await own.read(request, MESSAGES, "model", "max_tokens", "messages")
        names = {**_NAMES, **setting_names(MESSAGES, values)}
        chat = await self._encode(values, names)
        settings = sampling_settings(MESSAGES, values)
        schema = chat_values(values)["response_format"]
        if schema is not None:
            settings["json_schema"] = schema
        stops = values.get("stop_sequences", ())
        answer = MessageAnswer(own.name, own.llm.tokenizer, chat.text, stops)
        return await own.run(request, own.chat_job(chat, settings, answer, values, names))

    async def count_tokens(self, request: Request) -> Response:
        """``/v1/messages/count_tokens``: the number of tokens of a prompt."""
        values = await self._completions.read(request, COUNT_TOKENS, "model", "messages")
        chat = await self._encode(values, _NAMES)
        return json_response({"input_tokens": len(chat.ids)})

    async def _encode(self, values: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
        messages = with_system(values.get("system"), values["messages"])
        given = chat_values(values) | {"messages": messages}
        from_thinking = given["reasoning_effort"] == values.get("thinking")
        effort = {"reasoning_effort": "thinking" if from_thinking else "output_config"}
        return await self._completions.encode_chat(given, {**names, **effort})


class MessageAnswer(BlockAnswer):
    """As `BlockAnswer`, with Anthropic's blocks and events."""

    prefix = "msg_"

    def __init__(
        self, model: str, tokenizer: Tokenizer, text: ChatText, stops: Sequence[str]
    ) -> None:
        """As `BlockAnswer`; ``stops``: the stop strings of the request."""
        super().__init__(model, tokenizer, text)
        self._stops = stops
        self._prompt: Completion | None = None  # until the first event

    # -- whole answers
    def result(self, done: Completion) -> Object:
        content = [self._block(block) for block in self.blocks]
        return self._message(content, done) | self._stop(done)

    def _message(self, content: list[Object], done: Completion) -> Object:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(done),
        }

    def _stop(self, done: Completion) -> Object:
        """Return why the answer stopped."""
        reason = _REASONS.get(self.reason, "end_turn")
        stop = matched_stop(self.tokenizer, done, self._stops)
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and any(block.kind == CALL for block in self.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, done: Completion) -> Object:
        return {
            "input_tokens": len(done.prompt_ids) - done.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": done.cached_tokens,
            "output_tokens": len(done.ids),
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens(done)},
        }

    def _block(self, block: Block) -> Object:
        """Return a block with its content."""
        content: Any = block.text
        if block.kind == CALL:
            try:
                content = json.loads(content)
            except ValueError:  # the answer was cut off
                content = {}
        return self._head_of(block) | {_KEYS[block.kind][0]: content}

    @staticmethod
    def _head_of(block: Block) -> Object:
        """Return a block without content."""
        if block.kind == REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        if block.kind == TEXT:
            return {"type": "text", "text": ""}
        own = block.call["id"].replace("call_", "toolu_")
        return {"type": "tool_use", "id": own, "name": block.name, "input": {}}

    # -- events
    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        self._prompt = prompts[0]  # the first event has its cached tokens, which are not known yet
        yield from ()

    def _begun(self) -> Iterator[Object]:
        if self._prompt is not None:
            message = self._message([], self._prompt)
            self._prompt = None
            yield {"type": "message_start", "message": message}

    def opened(self, block: Block) -> Iterator[Object]:
        yield from self._begun()
        head = self._head_of(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": head}

    def added(self, block: Block, part: str) -> Iterator[Object]:
        _, kind, key = _KEYS[block.kind]
        delta = {"type": kind, key: part}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def closed(self, block: Block) -> Iterator[Object]:
        yield {"type": "content_block_stop", "index": block.index}

    def finish(self, prompts: Sequence[Completion]) -> Iterator[Object]:
        yield from self._begun()
        done = prompts[0]
        yield {"type": "message_delta", "delta": self._stop(done), "usage": self._usage(done)}
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> Object:
        return anthropic_body(error)
