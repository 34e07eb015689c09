"""The endpoints that generate: ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..api.async_llm import AsyncLLM, AsyncRequest
from .answer_events import answer_events
from .answers import Answer, ChatAnswer
from .bills import asks_bill, bill_field
from .chat_text import ChatText, ToolUse, chat_messages, chat_text, tool_use
from .errors import ApiError, api_error, overloaded
from .fields import (
    CHAT,
    COMPLETION,
    MAX_CHOICES,
    Field,
    check_fields,
    sampling_settings,
    setting_names,
)
from .infill import InfillPrompts
from .json_data import encode_json, json_response
from .metrics import Metrics
from .prompt_parts import check_prompt_sizes
from .reasoning import reasoning_variables
from .request_body import read_json
from .served_model import ServedModel
from .streaming import ClientDisconnected, EventStream, until_disconnect
from .structured_fields import is_restricted
from .template_variables import with_variables

Value = TypeVar("Value")
MAX_PENDING = 1024  # choices of all requests that run or wait; more are refused
# OpenAI's defaults, where they differ from those of `Sampling`. Penalties consider as many tokens
# as the engine keeps.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "penalty_last_n": -1}


@dataclass(frozen=True)
class Chat:
    """The prompt of a chat.

    Attributes:
        ids: its token ids.
        text: splits the answers.
        grammar: grammar of the answers if they must be calls of tools.
    """

    ids: list[int]
    text: ChatText
    grammar: str | None


@dataclass
class Job:
    """A checked request.

    Attributes:
        prompts: prompts as text or token ids.
        settings: fields of `Sampling`.
        answer: makes the objects of the answer.
        stream: whether the answer is a stream.
        names: the request's names of its prompt (``prompt``) and of fields of `Sampling`.
    """

    prompts: Sequence[str | list[int]]
    settings: Mapping[str, Any]
    answer: Answer
    stream: bool
    names: Mapping[str, str]

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

    Every endpoint that generates makes a `Job` of its request, and `run` returns the response.

    Args:
        llm: the model.
        served: how it is served.
        metrics: counts prompts and tokens.
    """

    def __init__(self, llm: AsyncLLM, served: ServedModel, metrics: Metrics) -> None:
        self.llm, self.name, self.served, self._metrics = llm.llm, served.name, served, metrics
        self._async, self._profile, self._recording = llm, served.profile, served.recording
        self._recorded: dict[AsyncRequest, int] = {}  # numbers in the recording
        self._pending = 0

    # -- endpoints
    async def complete(self, request: Request) -> ASGIApp:
        """``/v1/completions``."""
        values = await self.read_prompts(request, COMPLETION)
        defaults = {**_DEFAULTS, "max_tokens": 16, **self.served.defaults}
        settings = defaults | sampling_settings(COMPLETION, values)
        echo, stream = values.get("echo", False), values.get("stream", False)
        if echo and "logprobs" in values:
            if stream:
                raise ApiError(400, "echo with logprobs cannot be streamed", "echo")
            settings["prompt_logprobs"] = values["logprobs"]
        include_usage = values.get("stream_options", False)
        answer = Answer(self.name, self.llm.tokenizer, include_usage, echo)
        names = {**setting_names(COMPLETION, values), "prompt": "prompt"}
        prompts = values["prompt"]
        if suffix := values.get("suffix"):
            prompts = await asyncio.to_thread(self._infill, prompts, suffix, echo)
        return await self.run(request, Job(prompts, settings, answer, stream, names))

    def _infill(self, prompts: Sequence[Any], suffix: str, echo: bool) -> list[list[int]]:
        """Return prompts whose answers precede a suffix. ApiError: there are none."""
        if echo or not all(isinstance(prompt, str) for prompt in prompts):
            text = "suffix needs prompts that are texts, and no echo"
            raise ApiError(400, text, "suffix")
        try:
            infill = self.infill_prompts
            after = infill.after(suffix)
            if len(after) > self.llm.limits.context:
                text = f"suffix has more tokens than the context ({self.llm.limits.context})"
                raise ApiError(400, text, "suffix", "context_length_exceeded")
            return [infill.encode(prompt, after) for prompt in prompts]
        except ApiError as error:
            raise ApiError(400, error.message, "suffix", error.code) from None

    @cached_property
    def infill_prompts(self) -> InfillPrompts:
        """See `InfillPrompts`. ApiError: the model cannot fill in text."""
        return InfillPrompts(self.llm.tokenizer)

    async def chat(self, request: Request) -> ASGIApp:
        """``/v1/chat/completions``."""
        values = await self.read(request, CHAT, "messages")
        if values.get("top_logprobs") and not values.get("logprobs"):
            raise ApiError(400, "top_logprobs needs logprobs = true", "top_logprobs")
        settings = sampling_settings(CHAT, values)
        if values.get("logprobs"):
            settings["logprobs"] = values.get("top_logprobs", 0)
        include_usage = values.get("stream_options", False)
        names = {"grammar": "tools", **setting_names(CHAT, values), "prompt": "messages"}
        chat = await self.encode_chat(values, names)
        shown = None
        if values.get("verbose"):
            shown = self.llm.tokenizer.decode(chat.ids, skip_special=False)
        answer = ChatAnswer(self.name, self.llm.tokenizer, chat.text, include_usage, shown)
        return await self.run(request, self.chat_job(chat, settings, answer, values, names))

    async def count_chat(self, request: Request) -> Response:
        """``/v1/chat/completions/input_tokens``: the number of tokens of a chat's prompt."""
        values = await self.read(request, CHAT, "messages")
        chat = await self.encode_chat(values, {"prompt": "messages"})
        return json_response({"input_tokens": len(chat.ids)})

    # -- requests
    async def read(
        self, request: Request, table: Mapping[str, Field], *required: str
    ) -> dict[str, Any]:
        """Return the values of a request's fields; see `check`."""
        return await self.check(request, await self.body(request), table, *required)

    async def read_prompts(self, request: Request, table: Mapping[str, Field]) -> dict[str, Any]:
        """Return the values of the fields of a request with prompts that may be token ids."""
        body = await self.body(request)
        check_prompt_sizes(body, self.llm.limits.context)
        return await self.check(request, body, table, "prompt")

    async def body(self, request: Request) -> Any:
        """Return the JSON value of a request's body; see `read_json`."""
        return await read_json(request, self.served.max_body)

    async def check(
        self, request: Request, body: Any, table: Mapping[str, Field], *required: str
    ) -> dict[str, Any]:
        """Return the values of the fields of a body, which is checked in a thread if it is large.

        Args:
            request: the request, whose body was read.
            body: its JSON value.
            table: fields of the endpoint.
            *required: fields that must be present.

        Raises:
            ApiError, RequestError: a field is invalid, missing or refused.
        """
        if request.state.is_large:
            return await asyncio.to_thread(self._check, body, table, *required)
        return self._check(body, table, *required)

    def _check(self, body: Any, table: Mapping[str, Field], *required: str) -> dict[str, Any]:
        values = check_fields(table, body, *required)
        self.served.check_model(values)
        if "stream_options" in values and not values.get("stream"):
            raise ApiError(400, "stream_options needs stream = true", "stream_options")
        prompts = values.get("prompt")
        count = len(prompts) if isinstance(prompts, list) else 1
        if count * values.get("n", 1) > MAX_CHOICES:
            raise ApiError(400, f"n times the number of prompts exceeds {MAX_CHOICES}", "n")
        return values

    async def encode_chat(self, values: Mapping[str, Any], names: Mapping[str, str]) -> Chat:
        """Return the prompt of a chat.

        Args:
            values: fields as those of ``/v1/chat/completions``: ``messages``, ``tools``,
                ``tool_choice``, ``parallel_tool_calls``, ``chat_template_kwargs``,
                `structured_fields.FORMATS` and ``reasoning_effort``; see `reasoning_variables` for
                ``reasoning_required``.
            names: see `Job`.

        Raises:
            ApiError: the messages do not fit the template, or the fields do not fit each other.
        """
        tools, ids = await self._with_template(values, names, self.llm.encode_chat)
        grammar = None if tools is None else tools.grammar
        restricted = grammar is not None or is_restricted(values)
        end = self.llm.tokenizer.decode(ids[-16:], skip_special=False)
        text = chat_text(self.llm.template.source, end, tools, restricted)
        return Chat(ids, text, grammar)

    async def render(
        self, values: Mapping[str, Any], names: Mapping[str, str], **variables: Any
    ) -> str:
        """Return the text of a chat's prompt; see `encode_chat`. ``variables``: of the template."""

        def render(messages: list[Any], **own: Any) -> str:
            return self.llm.template.render(messages, **own, **variables)

        return (await self._with_template(values, names, render))[1]

    async def _with_template(
        self, values: Mapping[str, Any], names: Mapping[str, str], call: Callable[..., Value]
    ) -> tuple[ToolUse | None, Value]:
        """Return the tools of a chat, and what ``call`` returns for messages and variables."""

        def apply_template() -> tuple[ToolUse | None, Value]:
            source = self.llm.template.source
            tools = tool_use(values, source)
            messages, variables = chat_messages(values["messages"], tools, source)
            variables |= reasoning_variables(
                source, values.get("reasoning_effort"), values.get("reasoning_required", True)
            )
            variables = with_variables(variables, values.get("chat_template_kwargs", {}))
            return tools, call(messages, **variables)

        try:
            return await asyncio.to_thread(apply_template)
        except Exception as error:  # the server's template is no field of the request
            raise self._renamed(error, {"chat_template": names["prompt"], **names}) from None

    def chat_job(
        self, chat: Chat, settings: Mapping[str, Any], answer: Answer, values: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> Job:  # fmt: skip
        """Return the job of a chat; ``settings``: fields of `Sampling` that the request sets."""
        defaults = {**_DEFAULTS, "max_tokens": self.llm.limits.context, **self.served.defaults}
        own: dict[str, Any] = {**defaults, **settings}
        if chat.grammar is not None:
            own["grammar"] = chat.grammar
        return Job([chat.ids], own, answer, values.get("stream", False), names)

    @staticmethod
    def _renamed(error: Exception, names: Mapping[str, str]) -> ApiError:
        """Return the error that a client gets, about a field that the request has."""
        found = api_error(error, names["prompt"])
        found.param = names.get(found.param or "", found.param)
        return found

    # -- running
    async def run(self, request: Request, job: Job) -> ASGIApp:
        """Return the response to a request. ApiError: it is invalid or failed."""
        job.answer.bills = asks_bill(request, job.settings, len(job.prompts))
        settings = {**job.settings, "profile": job.answer.bills or self._profile}
        if self._pending + job.choices > MAX_PENDING:
            raise overloaded()
        self._pending += job.choices
        requests: list[AsyncRequest] = []
        stream = None
        if job.stream:
            events = answer_events(request, job.answer, requests, job.samples)
            stream = EventStream(events, job.answer, lambda: self._end(job, requests))
        arrived = None if stream is None else stream.wake
        streams = False
        try:
            for prompt in job.prompts:
                if requests:  # those of 128 prompts take some 0.1 s
                    await asyncio.sleep(0)
                own = self._async.submit(
                    prompt, last_only=not job.stream, arrived=arrived, **settings
                )
                requests.append(await own)
                self._record(request, prompt, settings, requests[-1])
            if stream is not None:
                streams = True
                return stream
            body = await until_disconnect(request.receive, _whole(request, job, requests))
            return Response(body, media_type="application/json")
        except ClientDisconnected:
            raise
        except Exception as error:
            raise self._renamed(error, job.names) from None
        finally:
            if not streams:
                self._end(job, requests)

    def _end(self, job: Job, requests: list[AsyncRequest]) -> None:
        """End the requests of a job, and count what they computed."""
        self._pending -= job.choices
        for each in requests:
            each.handle.cancel()
            failure: Exception | None = None
            try:
                each.handle.poll()
            except Exception as error:  # the response has told the client
                failure = error
            first, *others = each.completions
            first.alternatives = others
            self._metrics.count(first)
            if self._recording is not None and each in self._recorded:
                why = None if failure is None else str(failure)
                self._recording.answer(self._recorded.pop(each), first.choices, why)
        requests.clear()  # their listeners refer to the stream, which refers to this list

    def _record(
        self, request: Request, prompt: str | list[int], settings: Mapping[str, Any],
        own: AsyncRequest,
    ) -> None:  # fmt: skip
        """Record a request that was submitted."""
        if self._recording is None:
            return
        done, encodes = own.handle.completion, self.llm.seq2seq is not None
        self._recorded[own] = self._recording.request(
            prompt if encodes else done.prompt_ids,
            {**settings, "seed": done.seed},
            request.state.arrived_ns,
        )


async def _whole(request: Request, job: Job, requests: Sequence[AsyncRequest]) -> bytes:
    """Return the body of a whole answer, when the requests of its prompts have ended."""
    done = [await each.result() for each in requests]
    whole = job.answer.whole(done)
    if job.answer.bills:
        whole |= bill_field(request, done)
    return await encode_json(whole)
