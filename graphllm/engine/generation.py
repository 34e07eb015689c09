"""One request as the engine runs it: its sequence, stop conditions, and results so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from ..errors import NumericError, RequestError
from ..tokenizer import Tokenizer
from .block_manager import SequenceBlocks
from .completion import Answer, Completion, Found, Prefilled, Sampled
from .logits_processors import ForcedIds, LogitsProcessor
from .request import Sampling
from .sampler import PROCESSED
from .sequence import ActiveSequence
from .step_result import TokenLogprobs
from .stop_conditions import StopStringMatcher

if TYPE_CHECKING:
    from .grammar import GrammarState
    from .prompt_lookup import PromptLookup

CANCELLED = "cancelled"  # a finish_reason, see `Completion`


@dataclass
class Delivery:
    """How a consumer waits for the results of a request.

    Attributes:
        attended: whether a caller waits for the whole answer, so that `Engine.close` waits, too.
        background: whether the engine runs the steps in a thread of its own.
        wakeups: gets an item for each result; a thread that waits for any of several requests gives
            one queue to all of them.
        listener: called after each result but `Prefilled`, by the thread that runs the step, with
            whether it was the last one. It must not raise.
        account: see `ActiveSequence`.
    """

    attended: bool = False
    background: bool = False
    wakeups: SimpleQueue[None] = field(default_factory=SimpleQueue)
    listener: Callable[[bool], None] = lambda last: None
    account: object = None


class Generation:
    """A request between `Engine.submit` and its last result.

    The thread that runs a step calls `prefilled` and `push`; the thread that consumes the results
    takes them from ``events``.

    Attributes:
        sequence: its tokens and cache blocks.
        sampling: settings, with a seed.
        settings: feeds of the settings, see `sampling_row`.
        stages: number of stages before `ops.sample` that the request needs; see `Sampling.stages`.
        processors: logits processors, which the host applies.
        grammar: restricts the tokens that may follow; None if all may.
        asks_logprobs, asks_candidates: what steps return, see `StepResult`.
        prompt_logprobs: those of the prompt's tokens after the first that were computed, if
            `Sampling.prompt_logprobs` asks for them.
        events: results that were not consumed.
        done: no more results will be added.
        delivery: how the consumer waits.
        count: number of sampled tokens.
        undelivered: number of those that have no result yet; see `Batcher`.
        prefilled_tokens: tokens of the prompt that are in the cache, or were before a preemption.
        speculates: whether draft tokens may be computed, if the engine speculates.
        lookup: predictions of the next tokens; None before the first.
        drafted, accepted: numbers of draft tokens that were computed, and of those accepted.
        fault: the error that follows the results: logits that are not finite.
        error: the exception that ended the request, whatever results are not consumed.
        finish_reason: see `Completion`.
        note: remark for the user.
    """

    def __init__(
        self,
        sequence: ActiveSequence,
        sampling: Sampling,
        settings: Mapping[str, np.ndarray],
        end_ids: Collection[int],
        tokenizer: Tokenizer | None,
        context: int,
        delivery: Delivery | None = None,
    ) -> None:
        """Begin with no result.

        Args:
            sequence: the prompt.
            sampling: settings, with a seed.
            settings: feeds of the settings, see `sampling_row`.
            end_ids: ids that end the answer.
            tokenizer: None if only ids are wanted.
            context: most tokens that the cache holds.
            delivery: how the consumer waits; by default it runs the steps.
        """
        self.sequence, self.sampling, self.settings = sequence, sampling, settings
        forced = ForcedIds(sampling.forced_ids, sequence.prompt_tokens - sequence.source)
        self._use_processors((*sampling.processors, *([forced] if forced.ids else [])))
        self.asks_logprobs, self.asks_candidates = sampling.logprobs is not None, False
        self.grammar: GrammarState | None = None
        if sampling.has_grammar:
            from .grammar import start_grammar  # needs the extra ``structured``

            self.grammar = start_grammar(vars(sampling), tokenizer)
        self._end_ids, self._stop_ids = end_ids, frozenset(sampling.stop_ids)
        self._context = context
        self._tokenizer = tokenizer
        self._begin_text()
        self.events: deque[Prefilled | Sampled] = deque()
        self.delivery = Delivery() if delivery is None else delivery
        sequence.account = self.delivery.account
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.done, self.count, self.undelivered = False, 0, 0
        self._live = Lock()  # acquired by the thread that ends the request
        self._ended_by_token = False  # by an EOS token or a stop token id
        self.fault: NumericError | None = None
        self.error: Exception | None = None
        self.finish_reason, self.note = "length", ""
        self.submitted = time.perf_counter()
        self.started = 0.0  # start of the first step that computes it
        self.first = 0.0  # end of the step that gave the first candidates of a beam search
        self.prefill_tokens = self.prefilled_tokens = 0
        self.speculates = True
        self.lookup: PromptLookup | None = None
        self.drafted = self.accepted = 0

    @property
    def blocks(self) -> SequenceBlocks:
        """The cache blocks of a running request."""
        assert self.sequence.blocks is not None
        return self.sequence.blocks

    @property
    def ready(self) -> bool:
        """Whether the consumer has something to do."""
        return self.done or bool(self.events)

    @property
    def delivered(self) -> int:
        """Number of sampled tokens that have a result."""
        return self.count - self.undelivered

    @property
    def has_steps(self) -> bool:
        """Whether there is something to compute."""
        return self.sampling.max_tokens > 0 or self.sampling.prompt_logprobs is not None

    # -- called by the thread that runs steps
    def prompt_positions(self, start: int, stop: int) -> range:
        """Return the positions of a chunk whose hidden states give `prompt_logprobs` to come."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(
            max(start, len(self.prompt_logprobs)), min(stop, self.sequence.prompt_tokens - 1)
        )

    def add_prompt_logprobs(self, found: list[TokenLogprobs]) -> None:
        """Add log-probabilities of the next tokens of the prompt."""
        self.prompt_logprobs += found
        # After a preemption the rest of the prompt may come from the cache.
        self.sequence.reuse = len(self.prompt_logprobs) == self.sequence.prompt_tokens - 1

    def start(self, cached: int) -> None:
        """Note the start of the first step, which computes the prompt from token ``cached`` on."""
        if not self.started:
            self.started = time.perf_counter()
            self.prefill_tokens = len(self.sequence.tokens) - cached

    def prefilled(self, stop: int) -> None:
        """Report that the first ``stop`` tokens of the prompt are in the cache."""
        self.prefilled_tokens, total = stop, self.prefill_tokens
        self.events.append(Prefilled(total - (self.sequence.prompt_tokens - stop), total))
        self.delivery.wakeups.put(None)

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Add a sampled token, with its log-probabilities; return whether the answer ends."""
        at, sampling, count = time.perf_counter(), self.sampling, self.delivered
        if not sampling.max_tokens:
            return self._finish("length", at)
        may_stop = count >= sampling.min_tokens
        if token in self._end_ids or (may_stop and token in self._stop_ids):
            self._ended_by_token = True
            return self._finish("stop", at)
        count += 1
        if sampling.forced_eos_id is not None and count >= sampling.max_tokens:
            return self._finish("length", at)
        event = Sampled(token, self._read(token, count), at, logprobs)
        if self.undelivered:
            self.undelivered -= 1
        else:
            # With the event, see `take_back`: no call, and so no interrupt, comes between them.
            self.count += 1
        self.events.append(event)
        self._notify(last=False)
        if count == len(sampling.forced_ids):
            self._use_processors(sampling.processors)
        if self._matcher.matched:
            return self._finish("stop", at)
        if self.grammar is not None and self.grammar.follow(self.sequence):
            if self.grammar.error is not None:
                self.fail(self.grammar.error)
                return True
            return self._finish("stop", at)
        if count >= sampling.max_tokens:
            return self._finish("length", at)
        if self.sequence.prompt_tokens + count > self._context:
            self.note = f"the context of {self._context} tokens is full: the answer is cut off"
            return self._finish("length", at)
        return False

    def _begin_text(self) -> None:
        """Begin to decode the answer, and to look for stop strings in it."""
        follows = not self.sequence.source  # the answer continues the prompt's text
        self._text = self._tokenizer.stream(continuation=follows) if self._tokenizer else None
        self._matcher = StopStringMatcher(self.sampling.stop)

    def _read(self, token: int, count: int) -> str:
        """Return the text that can be emitted after the sampled token number ``count``."""
        text = self._text.push(token) if self._text else ""
        return self._matcher.push(text) if count >= self.sampling.min_tokens else text

    def _use_processors(self, processors: Sequence[LogitsProcessor]) -> None:
        self.processors = processors
        self.stages = max(self.sampling.stages, PROCESSED if processors else 0)

    def end_at_length(self) -> None:
        """End a request that has as many tokens as it asks for, or the last one's stop string."""
        self._finish("length", time.perf_counter())

    def end_search(self, answers: Sequence[Answer], at: float) -> None:
        """End a beam search with its answers, best first. May be called again with the same."""
        self.finish_reason, self.note = answers[0].finish_reason, answers[0].note
        self.events.append(Found(None, "", at, answers=tuple(answers)))
        self._end()

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.error = error
        self._end()

    def ends_after(self, steps: int) -> bool:
        """Whether no step may be launched before the results of ``steps`` launched ones are known.

        The answer is known to end by then, or its grammar needs the last token.
        """
        if self.grammar is not None:
            return True
        return self.done or self.count + steps >= self.sampling.max_tokens

    def may_end(self, ids: Sequence[int]) -> bool:
        """Whether the answer ends with these next tokens, or a grammar needs them first.

        It may also end at a stop string, of which only `push` knows.
        """
        if self.ends_after(len(ids)) or min(ids) < 0:
            return True
        if self.sequence.prompt_tokens + self.count + len(ids) > self._context:
            return True
        return any(token in self._end_ids or token in self._stop_ids for token in ids)

    def take_back(self) -> None:
        """Forget the tokens that have no result, after a step that did not end."""
        self.count, self.undelivered = self.delivered, 0
        tokens, first = self.sequence.tokens, self.sequence.prompt_tokens
        del tokens[first + self.count :]
        if self.done:
            return
        self._begin_text()  # it may have read a token that has no result
        for count, token in enumerate(tokens[first:], 1):
            self._read(token, count)
        if self._matcher.matched or self.count >= self.sampling.max_tokens > 0:
            self.end_at_length()

    def grammar_error(self, token: int) -> RequestError | None:
        """Return the error of a grammar that failed or left no token; None if there is none.

        ``token``: the sampled id; -1 if no token can be sampled from the logits.
        """
        if self.grammar is None:
            return None
        if self.grammar.error is None and token < 0 and self.sampling.stages > 1:
            return RequestError(
                "no token is left: the grammar allows none that logit_bias, banned_ids, "
                "allowed_ids, min_tokens and ignore_eos leave"
            )
        return self.grammar.error

    def fail_non_finite(self, error: NumericError) -> None:
        """End the request, whose last logits are not finite."""
        self.fault = error
        self._end()

    def _finish(self, reason: str, at: float) -> bool:
        rest = "" if self._matcher.matched else self._rest()
        self.finish_reason = "stop" if self._matcher.matched else reason
        self.events.append(Sampled(None, rest, at))
        self._end()
        return True

    def _rest(self) -> str:
        """Return the text that was held back until the end."""
        rest = self._matcher.push(self._text.finish() if self._text else "")
        return rest if self._matcher.matched else rest + self._matcher.finish()

    def _end(self) -> None:
        self.done = True
        if self._live.acquire(blocking=False):  # once, although another thread may cancel it now
            self._notify(last=True)

    def _notify(self, last: bool) -> None:
        self.delivery.wakeups.put(None)
        self.delivery.listener(last)

    # -- called by any thread
    def cancel(self) -> None:
        """End the request without further results, unless it has ended."""
        if not self.done:
            self.finish_reason = CANCELLED
            self._end()

    # -- called by the thread that consumes results
    def record(self, events: Sequence[Sampled], completion: Completion) -> None:
        """Add results, at least one, to ``completion``: their tokens, text and timings."""
        last = events[-1]
        if isinstance(last, Found):
            self._record_search(last, completion)
            return
        timings, completion.prompt_logprobs = completion.timings, self.prompt_logprobs
        if not completion.ids and not timings.ttft_s and self.started:
            timings.queue_s = self.started - self.submitted
            timings.ttft_s = events[0].at - self.submitted
            timings.prefill_s = timings.ttft_s - timings.queue_s
            timings.prefill_tokens = self.prefill_tokens
            completion.cached_tokens = len(completion.prompt_ids) - self.prefill_tokens
        ids = [each.token for each in events if each.token is not None]
        completion.ids += ids
        if ids or self._ended_by_token:
            decoded = last if self._ended_by_token else events[len(ids) - 1]
            timings.decode_s = decoded.at - self.submitted - timings.ttft_s
            timings.decode_tokens = len(completion.ids) - (decoded.token is not None)
        timings.drafted_tokens, timings.accepted_tokens = self.drafted, self.accepted
        if self.asks_logprobs:
            found = [each.logprobs for each in events if each.logprobs is not None]
            completion.logprobs += found
        completion.text += "".join([each.text for each in events])
        if last.token is None:
            completion.finish_reason = self.finish_reason
            completion.notes += [self.note] if self.note else []

    def record_all(self, completion: Completion) -> None:
        """Add all results that are there to ``completion``."""
        events = [self.events.popleft() for _ in range(len(self.events))]
        if sampled := [each for each in events if isinstance(each, Sampled)]:
            self.record(sampled, completion)

    def _record_search(self, event: Found, completion: Completion) -> None:
        """Fill in ``completion`` and its alternatives. A second call changes nothing."""
        timings, count = completion.timings, max(len(answer.ids) for answer in event.answers)
        timings.queue_s = self.started - self.submitted
        timings.prefill_tokens, timings.decode_tokens = self.prefill_tokens, max(count - 1, 0)
        timings.ttft_s = self.first - self.submitted
        timings.prefill_s = timings.ttft_s - timings.queue_s
        timings.decode_s = event.at - self.first
        completion.cached_tokens = len(completion.prompt_ids) - self.prefill_tokens
        found = [completion, *(replace(completion, alternatives=[]) for _ in event.answers[1:])]
        for each, answer in zip(found, event.answers):
            each.ids, each.text, each.score = list(answer.ids), answer.text, answer.score
            each.finish_reason = answer.finish_reason
            each.notes = [answer.note] if answer.note else []
        completion.alternatives = found[1:]
