"""`AsyncLLM`: an `LLM` for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ..checkpoints.checkpoint import Checkpoint
from ..engine.completion import Completion
from ..engine.generation import Delivery
from ..engine.request import Sampling
from .llm import LLM
from .prompts import Prompt, check_one_sample, parse_prompt, parse_prompts, parse_settings
from .request_handle import RequestHandle

if TYPE_CHECKING:
    from ..chat import Message

# See `_Mailbox`. 64 streams of a server take about 1 ms, so that they get 40 events a second.
_SHARE, _MAX_REST_S = 0.04, 0.025
# Characters or ids of a prompt that takes at most about 0.2 ms to encode and to check.
_QUICK = 1000


class AsyncRequest:
    """A request of `AsyncLLM.submit`, whose results one task of the event loop awaits.

    Attributes:
        handle: progress and cancellation; a handle without references cancels its request.
    """

    def __init__(self, handle: RequestHandle, arrived: asyncio.Event) -> None:
        """``arrived`` is set in the event loop after each result."""
        self.handle, self._arrived = handle, arrived

    @property
    def completions(self) -> list[Completion]:
        """What was consumed so far, of each sample."""
        return [each.completion for each in (self.handle, *self.handle.alternatives)]

    async def poll(self) -> tuple[str, bool]:
        """Wait for results and consume all that are there; see `RequestHandle.poll`.

        Call it until it returns that the request has ended, and not afterwards.
        """
        await self._arrived.wait()
        self._arrived.clear()  # before the results are read, so that no later one is missed
        return self.handle.poll()

    async def result(self) -> Completion:
        """Wait for the end of the request; see `RequestHandle.result`."""
        while not self.handle.done:
            self._arrived.clear()
            if not self.handle.done:
                await self._arrived.wait()
        return self.handle.result()  # without waiting


class AsyncLLM:
    """An `LLM` whose requests are awaited in an asyncio event loop.

    The requests of all tasks run as one batch, in a thread that lives as long as there are any, so
    the event loop is never blocked. Cancelling a task cancels its request. `close`, or the end of
    an ``async with`` block, closes the model.

    Example::

        async with await graphllm.AsyncLLM.load("model.gguf") as llm:
            async for piece in llm.stream("Hello"):
                print(piece, end="")

    Attributes:
        llm: the model, for everything else, such as ``llm.encode``.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._mailbox: _Mailbox | None = None

    @classmethod
    async def load(cls, model: str | Path | Checkpoint, **options: Any) -> AsyncLLM:
        """Load a model in a thread; see `LLM.load` for arguments and errors."""
        return cls(await asyncio.to_thread(LLM.load, model, **options))

    # -- requests
    def stream(self, prompt: Prompt, **sampling: Any) -> AsyncIterator[str]:
        """Generate from a prompt and yield the text piece by piece.

        Results that arrive while the consumer does something else are joined to one piece.

        Args:
            prompt: a string or token ids.
            **sampling: see `LLM.generate`.

        Raises:
            RequestError: invalid argument.
            ModelFileError: the model has no tokenizer.
        """
        _ = self.llm.tokenizer  # raises if there is none: no text could be yielded
        found = parse_prompt(prompt, "llm.stream")
        settings = parse_settings(sampling, None, "llm.stream")[0]
        check_one_sample(settings, "llm.stream")
        return self._stream(found, settings)

    @overload
    async def generate(self, prompt: Prompt, **sampling: Any) -> Completion: ...
    @overload
    async def generate(self, prompt: Sequence[Prompt], **sampling: Any) -> list[Completion]: ...
    async def generate(
        self, prompt: Prompt | Sequence[Prompt], **sampling: Any
    ) -> Completion | list[Completion]:
        """Generate from one prompt or from several; see `LLM.generate`."""
        found = parse_prompts(prompt, "llm.generate")
        if not isinstance(found, tuple):
            settings = parse_settings(sampling, None, "llm.generate")
            return (await self._complete_all([found], settings))[0]
        return await self._complete_all(found, parse_settings(sampling, len(found), "llm.generate"))

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> Completion:
        """Answer a list of chat messages; see `LLM.chat`."""
        settings = parse_settings(sampling, None, "llm.chat")
        ids = await asyncio.to_thread(self.llm.encode_chat, messages)
        return (await self._complete_all([ids], settings))[0]

    def chat_stream(self, messages: Sequence[Message], **sampling: Any) -> AsyncIterator[str]:
        """As `chat`, but yield the text piece by piece."""
        settings = parse_settings(sampling, None, "llm.chat_stream")[0]
        check_one_sample(settings, "llm.chat_stream")
        return self._stream(lambda: self.llm.encode_chat(messages), settings)

    async def submit(
        self,
        prompt: Prompt,
        *,
        last_only: bool = False,
        arrived: Callable[[], object] | None = None,
        **sampling: Any,
    ) -> AsyncRequest:
        """Begin a request that runs in the background; see `LLM.submit`.

        Args:
            prompt: a string or token ids.
            last_only: wake the task at the end of the request only, for `AsyncRequest.result`.
            arrived: called in the event loop when there are results, instead of waking a task that
                waits in `AsyncRequest.poll`. It must not raise.
            **sampling: see `LLM.generate`.

        Raises:
            RequestError: invalid argument, or the prompt does not fit the context.
        """
        found = parse_prompt(prompt, "llm.submit")
        settings = parse_settings(sampling, None, "llm.submit")[0]
        return await self._submit(found, settings, last_only, arrived=arrived)

    async def _stream(
        self, prompt: str | list[int] | Callable[[], list[int]], settings: Sampling
    ) -> AsyncIterator[str]:
        request = await self._submit(prompt, settings)
        try:
            ended = False
            while not ended:
                text, ended = await request.poll()
                if text:
                    yield text
        finally:
            request.handle.cancel()

    async def _complete_all(
        self, prompts: Sequence[str | list[int]], settings: Sequence[Sampling]
    ) -> list[Completion]:
        """Submit all prompts, then wait for the completions in order."""
        requests: list[AsyncRequest] = []
        try:
            for prompt, own in zip(prompts, settings):
                requests.append(await self._submit(prompt, own, last_only=True, attended=True))
            return [await request.result() for request in requests]
        finally:
            for request in requests:
                request.handle.cancel()

    async def _submit(
        self,
        prompt: str | list[int] | Callable[[], list[int]],
        settings: Sampling,
        last_only: bool = False,
        attended: bool = False,
        arrived: Callable[[], object] | None = None,
    ) -> AsyncRequest:
        """Encode the prompt and submit the request, in a thread if that may take a while.

        If the task is cancelled meanwhile, nobody gets the handle, which cancels the request.
        """
        event = asyncio.Event()
        listener = self._listener(arrived or event.set, last_only)
        delivery = Delivery(attended=attended, background=True, listener=listener)

        def submit() -> RequestHandle:
            found = prompt() if callable(prompt) else prompt
            return self.llm._submit(found, settings.with_seed(), Completion(), delivery=delivery)

        if _is_quick(prompt, settings):
            return AsyncRequest(submit(), event)
        return AsyncRequest(await asyncio.to_thread(submit), event)

    def _listener(self, arrived: Callable[[], object], last_only: bool) -> Callable[[bool], None]:
        """Return the `Delivery.listener` that calls ``arrived`` in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return _Listener(self._mailbox, arrived, last_only)

    # -- lifetime
    async def close(self) -> None:
        """Close the model in a thread; see `LLM.close`. May be called more than once."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _is_quick(prompt: str | list[int] | Callable[[], list[int]], settings: Sampling) -> bool:
    """Whether a request is submitted in less time than a thread takes to start and to end."""
    if callable(prompt) or settings.has_grammar or settings.profile:
        return False
    return len(prompt) <= _QUICK


class _Listener:
    """A `Delivery.listener` that calls a function in an event loop.

    The first result and the last one of each sample are passed on at once, the others when the
    mailbox delivers next.

    Args:
        mailbox: calls functions in the event loop.
        arrived: called in the event loop when there are results.
        last_only: call it for the last result only.
    """

    def __init__(self, mailbox: _Mailbox, arrived: Callable[[], object], last_only: bool) -> None:
        self._mailbox, self._arrived, self._last_only = mailbox, arrived, last_only
        self._begun = self._posted = False

    def __call__(self, last: bool) -> None:
        """Note a result. Called by the thread that runs the step."""
        if last or not (self._begun or self._last_only):
            self._begun = True
            self._mailbox.post_now(self._arrived)
        elif not self._posted and not self._last_only:
            self._posted = True
            self._mailbox.post(self._deliver)

    def _deliver(self) -> None:
        self._posted = False  # before the results are read, so that no later one is missed
        self._arrived()


class _Mailbox:
    """Calls functions in an event loop for other threads.

    All calls of one engine step are one callback of the loop: each callback from another thread
    writes to the loop's socket.

    A delivery to many requests takes time in which the thread that runs the steps waits for the
    interpreter's lock. So the loop rests between deliveries: they take `_SHARE` of the time, unless
    that would delay results by more than `_MAX_REST_S`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._urgent: deque[Callable[[], object]] = deque()
        self._scheduled = self._scheduled_now = False
        self._next = 0.0  # earliest time of the next delivery

    def post(self, call: Callable[[], object]) -> None:
        """Call ``call`` with the next delivery. May be called from any thread."""
        self._calls.append(call)
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._schedule)

    def post_now(self, call: Callable[[], object]) -> None:
        """Call ``call`` soon. May be called from any thread."""
        self._urgent.append(call)
        if not self._scheduled_now:
            self._scheduled_now = True
            self._call_soon(self._run_urgent)

    def _call_soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            self.loop.call_soon_threadsafe(call)

    def _schedule(self) -> None:
        rest = self._next - time.perf_counter()
        if rest > 0:
            self.loop.call_later(rest, self._run_calls)
        else:
            self._run_calls()

    def _run_calls(self) -> None:
        self._scheduled = False  # before the calls are taken, so that no later one is missed
        began, cpu = time.perf_counter(), time.thread_time()
        _run_all(self._calls)
        spent = time.thread_time() - cpu
        self._next = began + min(spent / _SHARE, _MAX_REST_S)

    def _run_urgent(self) -> None:
        self._scheduled_now = False
        _run_all(self._urgent)


def _run_all(calls: deque[Callable[[], object]]) -> None:
    for _ in range(len(calls)):  # what comes meanwhile is another callback's
        calls.popleft()()
