"""From the engine's ids to text: where an answer ends, and what of it may be shown already."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from ..profiler.rows import Recorder
from ..tokenizer import Tokenizer
from .engine import Engine, Seen
from .request import Completion, Sampling


class StopText:
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


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    sampling: Sampling,
    done: Completion,
    ends: Collection[int],
    seen: Seen | None = None,
    profile: tuple[Recorder, Recorder] | None = None,
) -> Iterator[str]:
    """Pieces of the text that follows ``done.prompt_ids``; ``done`` is whole after the last.

    ``ends``: the tokens that end an answer of this model.
    """
    pieces, texts = tokenizer.stream(continuation=True), StopText(sampling.stop)
    clock = _Clock(done)
    done.finish_reason = "context" if sampling.max_tokens else "length"
    ids = engine.generate(done.prompt_ids, sampling, sorted(ends), seen, profile)
    for token in ids if sampling.max_tokens else ():
        clock.token(engine.prefilled)
        enough = len(done.ids) >= sampling.min_tokens
        if token in ends or (enough and token in sampling.stop_ids):
            done.finish_reason = "stop"
            break
        done.ids.append(token)
        text = pieces.push(token)
        if len(done.ids) >= sampling.min_tokens:
            text = texts.push(text)
        done.text += text
        if text:
            yield text
        if texts.hit:
            done.finish_reason = "stop"
            return
        if len(done.ids) == sampling.max_tokens:
            done.finish_reason = "length"
            break
    rest = texts.push(pieces.finish())
    if texts.hit:
        done.finish_reason = "stop"
    rest += texts.finish()
    done.text += rest
    if rest:
        yield rest


class _Clock:
    """Keeps a completion's timings."""

    def __init__(self, done: Completion) -> None:
        self._done, self._start = done, time.perf_counter()

    def token(self, prefilled: int) -> None:
        """A token has come; the first ends the prefill, of so many tokens."""
        done, timings = self._done, self._done.timings
        seconds = time.perf_counter() - self._start
        if not done.ids:
            done.cached_tokens = len(done.prompt_ids) - prefilled
            timings.prefill_tokens = prefilled
            timings.ttft_s = timings.prefill_s = seconds
        timings.decode_s = seconds - timings.prefill_s
        timings.decode_tokens = len(done.ids)
