"""The endpoints that generate: ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..api.async_llm import AsyncLLM, AsyncRequest
from ..engine.completion import Completion
from ..errors import GraphllmError, RequestError
from .answers import Answer, ChatAnswer, Object, usage
from .chat_text import chat_messages, chat_text, tool_use
from .errors import ApiError, api_error
from .fields import APPLY_TEMPLATE, CHAT, COMPLETION, MAX_CHOICES, check_fields, sampling_settings
from .json_data import json_bytes
from .metrics import Metrics
from .request_body import read_json
from .streaming import ClientDisconnected, EventStream, until_disconnect

MAX_PENDING = 1024  # choices of all requests that run or wait; more are refused
_FIELDS = {"json_schema": "response_format", "grammar": "tools"}  # of requests, by `Sampling`'s
# OpenAI's defaults, where they differ from those of `Sampling`. Penalties consider as many tokens
# as the engine keeps.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "penalty_last_n": -1}


@dataclass
class _Job:
    """A checked request.

    Attributes:
        prompts: prompts as text or token ids.
        settings: fields of `Sampling`.
        answer: makes the objects of the answer.
        echo: whether the text of the prompt precedes the answer.
    """

    prompts: Sequence[str | list[int]]
    settings: Mapping[str, Any]
    answer: Answer
    echo: bool = False

    @property
    def samples(self) -> int:
        """Number of choices of each prompt."""
        return self.settings.get("n", 1)

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return len(self.prompts) * self.samples


class Completions:
    """Generates answers with one model.

    Args:
        llm: the model.
        name: its name in the API.
        max_body: bytes of a request body at most.
        metrics: counts prompts and tokens.
    """

    def __init__(self, llm: AsyncLLM, name: str, max_body: int, metrics: Metrics) -> None:
        self._llm, self._name, self._max_body, self._metrics = llm, name, max_body, metrics
        self._pending = 0

    # -- endpoints
    async def complete(self, request: Request) -> ASGIApp:
        """``/v1/completions``."""
        values = check_fields(COMPLETION, await read_json(request, self._max_body), "prompt")
        self._check_common(values)
        settings = _DEFAULTS | {"max_tokens": 16} | sampling_settings(COMPLETION, values)
        echo, stream = values.get("echo", False), values.get("stream", False)
        if echo and "logprobs" in values:
            if stream:
                raise ApiError(400, "echo with logprobs cannot be streamed", "echo")
            settings["prompt_logprobs"] = values["logprobs"]
        include_usage = values.get("stream_options", False)
        answer = Answer(self._name, self._llm.llm.tokenizer, include_usage)
        job = _Job(values["prompt"], settings, answer, echo)
        return await self._run(request, job, stream, "prompt")

    async def chat(self, request: Request) -> ASGIApp:
        """``/v1/chat/completions``."""
        values = check_fields(CHAT, await read_json(request, self._max_body), "messages")
        self._check_common(values)
        settings: dict[str, Any] = {**_DEFAULTS, "max_tokens": self._llm.llm.limits.context}
        settings |= sampling_settings(CHAT, values)
        if values.get("top_logprobs") and not values.get("logprobs"):
            raise ApiError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        if values.get("logprobs"):
            settings["logprobs"] = values.get("top_logprobs", 0)
        include_usage = values.get("stream_options", False)
        llm = self._llm.llm
        try:
            tools = tool_use(values, llm.template.source)
            messages, variables = chat_messages(values["messages"], tools, llm.template.source)
            ids = await asyncio.to_thread(partial(llm.encode_chat, messages, **variables))
        except Exception as error:
            raise api_error(error, "messages") from None
        if tools is not None:
            settings["grammar"] = tools.grammar
        restricted = any(settings.get(name) is not None for name in _FIELDS)
        end = llm.tokenizer.decode(ids[-16:], skip_special=False)
        text = chat_text(llm.template.source, end, tools, restricted)
        answer = ChatAnswer(self._name, llm.tokenizer, text, include_usage)
        job = _Job([ids], settings, answer)
        return await self._run(request, job, values.get("stream", False), "messages")

    async def apply_template(self, request: Request) -> Response:
        """``/apply-template``: the text of a chat's prompt."""
        values = check_fields(APPLY_TEMPLATE, await read_json(request, self._max_body), "messages")
        try:
            render = self._llm.llm.template.render
            text = await asyncio.to_thread(render, values["messages"])
        except Exception as error:
            raise api_error(error, "messages") from None
        return Response(json_bytes({"prompt": text}), media_type="application/json")

    def _check_common(self, values: Mapping[str, Any]) -> None:
        """Check what the fields' own rules cannot see. ApiError: a field is invalid."""
        model = values.get("model", self._name)
        if model != self._name:
            text = f"the model {model[:100]!r} does not exist; this server has {self._name!r}"
            raise ApiError(404, text, "model", "model_not_found")
        if "stream_options" in values and not values.get("stream"):
            raise ApiError(400, "stream_options needs stream = true", "stream_options")
        if len(values.get("prompt", [0])) * values.get("n", 1) > MAX_CHOICES:
            raise ApiError(400, f"n times the number of prompts exceeds {MAX_CHOICES}", "n")

    # -- running
    async def _run(self, request: Request, job: _Job, stream: bool, param: str) -> ASGIApp:
        """Return the response to a request; ``param``: its field with the prompt."""
        if self._pending + job.choices > MAX_PENDING:
            text = "the server has too many requests; try again later"
            raise ApiError(503, text, code="server_overloaded", headers={"retry-after": "1"})
        self._pending += job.choices
        requests: list[AsyncRequest] = []
        streams = False
        try:
            for prompt in job.prompts:
                own = self._llm.submit(prompt, last_only=not stream, **job.settings)
                requests.append(await own)
            if stream:
                events = self._events(job, requests)
                response = EventStream(events, lambda: self._end(job, requests))
                streams = True
                return response
            done = await until_disconnect(request.receive, _results(requests))
            choices = [
                job.answer.choice(index, each, self._echo(job, each))
                for index, each in enumerate(each for one in done for each in one.choices)
            ]
            return Response(
                json_bytes(job.answer.whole(choices, usage(done))), media_type="application/json"
            )
        except ClientDisconnected:
            raise
        except RequestError as error:
            field = _FIELDS.get(error.argument or "")
            raise (ApiError(400, str(error), field) if field else api_error(error, param)) from None
        except Exception as error:
            raise api_error(error, param) from None
        finally:
            if not streams:
                self._end(job, requests)

    def _end(self, job: _Job, requests: Sequence[AsyncRequest]) -> None:
        """End the requests of a job, and count what they computed."""
        self._pending -= job.choices
        for each in requests:
            each.handle.cancel()
            with suppress(GraphllmError):  # the client was told
                each.handle.poll()
            first, *others = each.completions
            first.alternatives = others
            self._metrics.count(first)

    async def _events(
        self, job: _Job, requests: Sequence[AsyncRequest]
    ) -> AsyncGenerator[Object, None]:
        """Yield the chunks of an answer, of several prompts one after another."""
        answer = job.answer
        for index in range(job.choices):
            echo = self._echo(job, requests[index // job.samples].handle.completion)
            if first := answer.first(index, echo):
                yield answer.chunk([first])
        for index, request in enumerate(requests):  # all are computed meanwhile
            async for pieces in _pieces(answer, request, index * job.samples):
                yield answer.chunk(pieces)
        if answer.include_usage:
            yield answer.chunk([], usage(each.handle.completion for each in requests))

    def _echo(self, job: _Job, done: Completion) -> str | None:
        """Return the text of the prompt if the answer echoes it."""
        return self._llm.llm.tokenizer.decode(done.prompt_ids) if job.echo else None


async def _results(requests: Sequence[AsyncRequest]) -> list[Completion]:
    return [await each.result() for each in requests]


async def _pieces(
    answer: Answer, request: AsyncRequest, first: int
) -> AsyncGenerator[list[Object], None]:
    """Yield the new pieces of a request's samples whenever there are any, and then their ends.

    ``first``: number of the choice that is sample 0.
    """
    seen = [(0, 0)] * len(request.completions)  # characters and log-probabilities
    ended = False
    while not ended:
        _, ended = await request.poll()
        pieces = []
        for sample, done in enumerate(request.completions):
            text, tokens = done.text[seen[sample][0] :], done.logprobs[seen[sample][1] :]
            seen[sample] = len(done.text), len(done.logprobs)
            if text or tokens:
                pieces.append(answer.piece(first + sample, text, tokens))
        if pieces:
            yield pieces
    for sample, done in enumerate(request.completions):
        yield [answer.piece(first + sample, "", (), done.finish_reason)]
