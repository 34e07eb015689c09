"""OpenAI's Responses API: ``/v1/responses``, and its events.

Responses are not stored: ``store`` of a response is false, and ``previous_response_id`` is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.completion import Completion
from ..tokenizer import Tokenizer
from .answers import Object, usage
from .block_answer import CALL, REASONING, TEXT, Block, BlockAnswer
from .chat_parts import with_system
from .chat_text import ChatText
from .completions import Completions
from .errors import ApiError
from .fields import sampling_settings, setting_names
from .response_fields import RESPONSES

_NAMES = {"prompt": "input", "messages": "input", "grammar": "tools", "response_format": "text",
          "reasoning_effort": "reasoning"}  # fmt: skip
_PREFIXES = {REASONING: "rs_", TEXT: "msg_", CALL: "fc_"}  # of the ids of items
_PARTS = {REASONING: "reasoning_text", TEXT: "output_text"}  # types of the only part of an item


class Responses:
    """The endpoint ``/v1/responses``; ``completions`` generates the answers."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, request: Request) -> ASGIApp:
        """``/v1/responses``."""
        own = self._completions
        given = await own.body(request)
        values = await own.check(request, given, RESPONSES, "input")
        names = {**_NAMES, **setting_names(RESPONSES, values)}
        chat_values = values | {
            "messages": with_system(values.get("instructions"), values["input"]),
            "response_format": values.get("text"),
            "reasoning_effort": values.get("reasoning"),
        }
        chat = await own.encode_chat(chat_values, names)
        given = {**own.served.defaults, **given}
        answer = ResponseAnswer(own.name, own.llm.tokenizer, chat.text, given)
        settings = sampling_settings(RESPONSES, values)
        return await own.run(request, own.chat_job(chat, settings, answer, values, names))


class ResponseAnswer(BlockAnswer):
    """As `BlockAnswer`, with OpenAI's items and events."""

    prefix = "resp_"

    def __init__(
        self, model: str, tokenizer: Tokenizer, text: ChatText, given: Mapping[str, Any]
    ) -> None:
        """As `BlockAnswer`; ``given``: the request with defaults; parts are repeated."""
        super().__init__(model, tokenizer, text)
        self._given = {name: value for name, value in given.items() if value is not None}
        self._ids: list[str] = []  # of the items
        self._count = 0  # of events

    # -- whole answers
    def result(self, done: Completion) -> Object:
        cut = self.reason == "length"
        status = {"length": "incomplete", "cancelled": "cancelled"}.get(self.reason, "completed")
        return self._response(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block) for block in self.blocks],
            "usage": self._usage(done),
        }

    def _response(self, status: str) -> Object:
        """Return a response without its output."""
        given = self._given
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": self._model,
            "output": [],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": False,
            "temperature": given.get("temperature", 1.0),
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": given.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self, done: Completion) -> Object:
        counts = usage([done])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens(done)},
            "total_tokens": counts["total_tokens"],
        }

    def _item(self, block: Block, begun: bool = False) -> Object:
        """Return an item; ``begun``: at its beginning, so that it is empty."""
        status = "in_progress" if begun else "completed" if block.complete else "incomplete"
        head = {"id": self._ids[block.index], "status": status}
        if block.kind == CALL:
            text = "" if begun else block.text
            known = {"call_id": block.call["id"], "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **known}
        content = [] if begun else [_part(block.kind, block.text)]
        if block.kind == REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    # -- events
    def _event(self, kind: str, **fields: Any) -> Object:
        event = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return event

    def _of(self, kind: str, block: Block, **fields: Any) -> Object:
        """Return an event about an item, or about the only part of one."""
        at = {} if block.kind == CALL else {"content_index": 0}
        known = {"item_id": self._ids[block.index], "output_index": block.index, **at}
        return self._event(f"response.{kind}", **known, **fields)

    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Object]:
        self._ids.append(_PREFIXES[block.kind] + secrets.token_hex(12))
        item = self._item(block, begun=True)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != CALL:
            yield self._of("content_part.added", block, part=_part(block.kind, ""))

    def added(self, block: Block, part: str) -> Iterator[Object]:
        kind = _PARTS.get(block.kind, "function_call_arguments")
        yield self._of(f"{kind}.delta", block, delta=part, **_logprobs(block))

    def closed(self, block: Block) -> Iterator[Object]:
        text = block.text
        if block.kind == CALL:
            done = {"name": block.name, "arguments": text}
            yield self._of("function_call_arguments.done", block, **done)
        else:
            yield self._of(f"{_PARTS[block.kind]}.done", block, text=text, **_logprobs(block))
            yield self._of("content_part.done", block, part=_part(block.kind, text))
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def finish(self, prompts: Sequence[Completion]) -> Iterator[Object]:
        found = self.result(prompts[0])
        yield self._event(f"response.{found['status']}", response=found)

    def error(self, error: ApiError) -> Object:
        known = error.body["error"]
        return self._event("error", **{name: known[name] for name in ("code", "message", "param")})


def _part(kind: str, text: str) -> Object:
    """Return the only part of an item."""
    own: Object = {"annotations": [], "logprobs": []} if kind == TEXT else {}
    return {"type": _PARTS[kind], "text": text, **own}


def _logprobs(block: Block) -> Object:
    """Return the log-probabilities that events of texts have, of which there are none."""
    return {"logprobs": []} if block.kind == TEXT else {}
