"""From the engine's ids to text: where an answer ends, and what of it may be shown already."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from ..runtime.recorder import Recorder
from ..tokenizer import Tokenizer
from .engine import Engine, PrefillCallback
from .request import Completion, Sampling
from .request_lock import Claim


class StopStringMatcher:
    """Lets text through until one of the stop texts is complete, in whatever pieces it comes.

    The stop text that is complete first ends the text; among those that end there, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._longest = tuple(stops), max(map(len, stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """What can be shown now: all but an end that may become a stop text."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)[1]]
        at = self._may_begin(text)
        self._held = text[at:]
        return text[:at]

    def _may_begin(self, text: str) -> int:
        """Where the longest end of ``text`` begins that is the beginning of a stop text."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def finish(self) -> str:
        """What was held back, when no more text comes."""
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
    """Yield pieces of the text that follows ``completion.prompt_ids``, and fill in ``completion``.

    ``eos_ids``: the tokens that end an answer of this model. Without a tokenizer there is no text,
    only ``completion.ids``. The engine is owned for each step, see `RequestLock`; with ``exclusive``
    from the first step to the last, for a caller that takes all pieces at once.
    """
    pieces = tokenizer.stream(continuation=True) if tokenizer else None
    texts, clock, claim = (
        StopStringMatcher(sampling.stop),
        _Timer(completion),
        Claim("a generation"),
    )
    full = f"the context of {engine.limits.context} tokens is full: the answer is cut off"
    ids = engine.generate(completion.prompt_ids, sampling, sorted(eos_ids), seen, profile)
    completion.finish_reason = "length"
    try:
        while len(completion.ids) < sampling.max_tokens:
            engine.lock.acquire(claim)
            token, prefilled = next(ids, None), engine.prefill_tokens
            if not exclusive:
                engine.lock.pause(claim)
            if token is None:
                completion.notes.append(full)
                break
            clock.token(prefilled, claim.waited_s)
            enough = len(completion.ids) >= sampling.min_tokens
            if token in eos_ids or (enough and token in sampling.stop_ids):
                completion.finish_reason = "stop"
                break
            completion.ids.append(token)
            text = pieces.push(token) if pieces else ""
            if len(completion.ids) >= sampling.min_tokens:
                text = texts.push(text)
            if texts.hit or len(completion.ids) == sampling.max_tokens:
                engine.lock.release(claim)  # before the caller takes his time over the last piece
            completion.text += text
            if text:
                yield text
            if texts.hit:
                completion.finish_reason = "stop"
                return
    finally:
        engine.lock.release(claim)
    rest = texts.push(pieces.finish() if pieces else "")
    if texts.hit:
        completion.finish_reason = "stop"
    rest += texts.finish()
    completion.text += rest
    if rest:
        yield rest


class _Timer:
    """Keeps a completion's timings."""

    def __init__(self, completion: Completion) -> None:
        self._completion, self._start = completion, time.perf_counter()

    def token(self, prefilled: int, waited: float) -> None:
        """A token has come; the first ends the prefill, of so many tokens. ``waited``: seconds so
        far, for other requests on the model."""
        completion, timings = self._completion, self._completion.timings
        seconds = time.perf_counter() - self._start
        timings.queue_s = waited
        if not completion.ids:
            completion.cached_tokens = len(completion.prompt_ids) - prefilled
            timings.prefill_tokens = prefilled
            timings.ttft_s, timings.prefill_s = seconds, seconds - waited
        timings.decode_s = seconds - waited - timings.prefill_s
        timings.decode_tokens = len(completion.ids)
