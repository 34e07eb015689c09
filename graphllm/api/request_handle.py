"""Handle of a submitted request: its text piece by piece, its result, progress and cancellation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from ..engine.batcher import Recorders
from ..engine.completion import Completion, Prefilled, Sampled
from ..engine.engine import Engine, PrefillCallback
from ..engine.generation import CANCELLED, Generation

if TYPE_CHECKING:
    from ..profiler.bill import Account


class RequestProgress(NamedTuple):
    """How far a request is.

    Attributes:
        prefilled_tokens: tokens of the prompt that were computed, or found in the cache.
        prompt_tokens: tokens of the prompt.
        tokens: tokens sampled so far.
    """

    prefilled_tokens: int
    prompt_tokens: int
    tokens: int


class RequestHandle:
    """A request that was submitted. Its methods may be called from any thread.

    Iteration yields the text piece by piece, each time from the beginning; of several samples, that
    of the first one. A handle that is garbage-collected cancels its request.

    Attributes:
        completion: what was consumed so far; final after `result`.
        alternatives: handles of the further samples of the request.
    """

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        completion: Completion,
        seen: PrefillCallback | None = None,
        profile: Recorders | None = None,
        alternatives: Sequence[RequestHandle] = (),
        account: Account | None = None,
    ) -> None:
        """See `LLM.submit`.

        Args:
            engine: runs the request.
            generation: the request.
            completion: has the prompt and the seed; filled in as results are consumed.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of the prefill.
            profile: recorders of prefill and decode.
            alternatives: handles of the further samples of the request.
            account: bill of the request, if it asks for one.
        """
        self._account = account
        self.completion, self.alternatives = completion, alternatives
        self._engine, self._generation = engine, generation
        self._seen, self._profile = seen, profile
        self._mutex = Lock()  # held by the thread that consumes results

    # -- results
    def __iter__(self) -> Iterator[str]:
        """Yield the text piece by piece, and wait for each. For errors see `result`."""
        at, more = 0, True
        while True:
            text = self.completion.text  # another thread may consume results, too
            if len(text) > at:
                yield text[at:]
                at = len(text)
            elif more:
                more = self._advance()
            else:
                break
        if not self.alternatives:
            self._take_bill()

    def result(self) -> Completion:
        """Wait for the end of the request and return the completion.

        For a cancelled request it is what was computed, with the finish_reason ``cancelled``.

        Raises:
            RequestError: the model was closed, or the call comes from a callback within a step.
            NumericError: the logits are not finite.
            GraphllmError: a step failed.
        """
        while self._advance():
            pass
        if self.alternatives:  # a beam search records its own
            self.completion.alternatives = [each.result() for each in self.alternatives]
        self._take_bill()
        return self.completion

    def poll(self) -> tuple[str, bool]:
        """Consume the results that are there, without waiting.

        While another thread waits for the next result of the same handle, so does this call.

        Returns:
            The text that they add (of several samples, to the first one), and whether the request
            has ended.

        Raises:
            GraphllmError: see `result`.
        """
        with self._mutex:
            before, ended = len(self.completion.text), False
            if self._seen is None and self._generation.error is None:
                self._generation.record_all(self.completion)
            while self._generation.ready and not ended:
                ended = not self._consume()
            text = self.completion.text[before:]
        ended = all([ended, *(each.poll()[1] for each in self.alternatives)])
        if ended and self.alternatives:  # a beam search records its own
            self.completion.alternatives = [each.completion for each in self.alternatives]
        if ended:
            self._take_bill()
        return text, ended

    def _take_bill(self) -> None:
        """Add the bill, if there is one, to the completion of a request that has ended."""
        if self._account is not None:
            self.completion.bill = self._account.bill()

    def _advance(self) -> bool:
        """Wait for a result and consume it; return whether there was one."""
        self._engine.lock.check_callback()  # before this thread waits for the mutex
        with self._mutex:
            return self._consume()

    def _consume(self) -> bool:
        event = self._engine.next_result(self._generation, self._profile)
        if isinstance(event, Sampled):
            self._generation.record([event], self.completion)
        elif isinstance(event, Prefilled):
            if self._seen is not None:
                self._seen(event.done, event.total)
        elif self._generation.finish_reason == CANCELLED:
            self.completion.finish_reason = CANCELLED
        return event is not None

    # -- state
    @property
    def done(self) -> bool:
        """Whether the request has ended, so that `result` does not wait."""
        return self._generation.done and all(each.done for each in self.alternatives)

    @property
    def progress(self) -> RequestProgress:
        """Tokens of the prompt and of the (first) answer that were computed."""
        generation = self._generation
        sequence = generation.sequence
        return RequestProgress(
            generation.prefilled_tokens, sequence.prompt_tokens, generation.delivered
        )

    def cancel(self) -> None:
        """End the request; the memory that it holds is free before the next step.

        May be called repeatedly, and after the end.
        """
        if self._account is not None:
            self._account.cancel()
        for each in self.alternatives:
            each.cancel()
        self._engine.cancel(self._generation)

    def __del__(self) -> None:
        self.cancel()


def wait_any(handles: Sequence[RequestHandle]) -> None:
    """Wait until one of several requests with one `Delivery` has a result, or run a step."""
    engine = handles[0]._engine
    engine.wait([each._generation for each in handles])
