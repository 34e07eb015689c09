"""Stop conditions: stop strings, stop token ids, EOS ids, and the limits on the number of tokens.

`StopStringMatcher` matches stop strings in the streamed text. `stream_text` checks every other
condition after each sampled token.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from ..runtime.recorder import Recorder
from ..tokenizer import Tokenizer
from .engine import Engine, PrefillCallback
from .request import Completion, Sampling
from .request_lock import Claim


class StopStringMatcher:
    """Find the first stop string in text that arrives in pieces.

    A stop string may begin in one piece and end in a later one. The match is the stop string that
    ends first; among those that end at the same character, the longest.

    Attributes:
        matched: whether a stop string was found. No text follows after that.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Append ``text`` and return the text that can be emitted now.

        A suffix that may be the beginning of a stop string is held back.
        """
        if not self._stop_strings:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop_strings if (at := text.find(s)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]
        at = self._partial_match(text)
        self._held = text[at:]
        return text[:at]

    def _partial_match(self, text: str) -> int:
        """Return the start of the longest suffix of ``text`` that is a prefix of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stop_strings):
                return at
        return len(text)

    def finish(self) -> str:
        """Return the text that was held back. Call it when no more text follows."""
        held, self._held = self._held, ""
        return held


def stream_text(
    engine: Engine,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
    completion: Completion,
    eos_ids: Collection[int],
    seen: PrefillCallback | None = None,
    profile: tuple[Recorder, Recorder] | None = None,
    exclusive: bool = False,
) -> Iterator[str]:
    """Generate until a stop condition holds, and yield the text piece by piece.

    Args:
        engine: the engine to run; its lock is taken for each step.
        tokenizer: None for a model without one: no text is yielded, only ``completion.ids`` grows.
        sampling: the sampling settings and stop conditions of the request.
        completion: has the ``prompt_ids``; the other fields are filled in as tokens are sampled,
            and are final after the last piece.
        eos_ids: token ids that end an answer of this model.
        seen: called with (tokens prefilled, tokens to prefill) after each chunk of the prefill.
        profile: recorders of prefill and of decode.
        exclusive: hold the lock from the first step to the last, for a caller that consumes all
            pieces at once; otherwise another request may run while a piece is with the caller.
    """
    decoder = tokenizer.stream(continuation=True) if tokenizer else None
    matcher, timer = StopStringMatcher(sampling.stop), _Timer(completion)
    claim = Claim("a generation")
    context_full = f"the context of {engine.limits.context} tokens is full: the answer is cut off"
    ids = engine.generate(completion.prompt_ids, sampling, sorted(eos_ids), seen, profile)
    completion.finish_reason = "length"
    try:
        while len(completion.ids) < sampling.max_tokens:
            engine.lock.acquire(claim)
            token, prefill_tokens = next(ids, None), engine.prefill_tokens
            if not exclusive:
                engine.lock.pause(claim)
            if token is None:
                completion.notes.append(context_full)
                break
            timer.record_token(prefill_tokens, claim.waited_s)
            may_stop = len(completion.ids) >= sampling.min_tokens
            if token in eos_ids or (may_stop and token in sampling.stop_ids):
                completion.finish_reason = "stop"
                break
            completion.ids.append(token)
            text = decoder.push(token) if decoder else ""
            if len(completion.ids) >= sampling.min_tokens:
                text = matcher.push(text)
            if matcher.matched or len(completion.ids) == sampling.max_tokens:
                engine.lock.release(claim)  # the caller may be slow to consume the last piece
            completion.text += text
            if text:
                yield text
            if matcher.matched:
                completion.finish_reason = "stop"
                return
    finally:
        engine.lock.release(claim)
    rest = matcher.push(decoder.finish() if decoder else "")
    if matcher.matched:
        completion.finish_reason = "stop"
    rest += matcher.finish()
    completion.text += rest
    if rest:
        yield rest


class _Timer:
    """Record the timings of one completion."""

    def __init__(self, completion: Completion) -> None:
        self._completion, self._start = completion, time.perf_counter()

    def record_token(self, prefill_tokens: int, waited_s: float) -> None:
        """Update the timings after a sampled token; the first one ends the prefill.

        Args:
            prefill_tokens: number of prompt tokens computed, not found in the cache.
            waited_s: seconds that the request has waited for other requests on the model so far.
        """
        completion, timings = self._completion, self._completion.timings
        seconds = time.perf_counter() - self._start
        timings.queue_s = waited_s
        if not completion.ids:
            completion.cached_tokens = len(completion.prompt_ids) - prefill_tokens
            timings.prefill_tokens = prefill_tokens
            timings.ttft_s, timings.prefill_s = seconds, seconds - waited_s
        timings.decode_s = seconds - waited_s - timings.prefill_s
        timings.decode_tokens = len(completion.ids)
