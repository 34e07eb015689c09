"""Result of a request (`Completion`), its timings (`Timings`), and the events that make it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .step_result import TokenLogprobs

if TYPE_CHECKING:
    from .bill import Bill


@dataclass
class Timings:
    """Timings of one request, in seconds.

    Attributes:
        load_s: time that loading the model took.
        queue_s: waiting for other requests on the model; not part of prefill_s and decode_s.
        ttft_s: time to the first token, waiting included.
        prefill_s: time of the prefill.
        prefill_tokens: prompt tokens computed; tokens found in the cache do not count.
        decode_s: time after the first token.
        decode_tokens: tokens sampled after the first one.
        drafted_tokens: draft tokens that were computed (speculative decoding).
        accepted_tokens: draft tokens that were accepted.
    """

    load_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def as_dict(self) -> dict[str, float]:
        """Return the times in seconds, rates in tokens/s, and the numbers of draft tokens."""
        return {
            "load_s": round(self.load_s, 4),
            "queue_s": round(self.queue_s, 4),
            "ttft_s": round(self.ttft_s, 4),
            "prefill_tok_s": round(_rate(self.prefill_tokens, self.prefill_s), 2),
            "decode_tok_s": round(_rate(self.decode_tokens, self.decode_s), 2),
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass
class Completion:
    """Result of a generation request.

    Attributes:
        prompt_ids: token ids of the prompt; of an encoder-decoder, those of the source and then the
            first ones of the decoder, which are given.
        ids: sampled token ids, without EOS and stop tokens but with those of a stop string.
        text: generated text, up to the stop string.
        finish_reason: ``stop`` (EOS token, stop string or stop token id) or ``length``
            (``max_tokens`` reached, or the context is full: then ``notes`` says so); ``cancelled``
            if the caller ended the request.
        seed: seed of the sampling.
        cached_tokens: prompt tokens that were found in the KV cache.
        notes: remarks for the user, one line each.
        timings: see `Timings`.
        logprobs: `TokenLogprobs` of each of ``ids``, if ``Sampling.logprobs`` asks for them.
        prompt_logprobs: `TokenLogprobs` of each of ``prompt_ids`` after the first, if
            ``Sampling.prompt_logprobs`` asks for them.
        alternatives: the further samples of the prompt, if ``Sampling.n`` asks for them.
        score: of a beam search: sum of the log-probabilities, the end token's included and less the
            diversity penalties, divided by the number of tokens ** ``length_penalty``.
        bill: what the request cost, all of its samples together, if ``Sampling.profile`` asks for
            it.
    """

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    seed: int = 0
    cached_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    alternatives: list[Completion] = field(default_factory=list)
    score: float | None = None
    bill: Bill | None = None

    @property
    def choices(self) -> list[Completion]:
        """All samples of the prompt."""
        return [self, *self.alternatives]

    def new_sample(self) -> Completion:
        """Return an empty completion of the same prompt, seed and load time."""
        timings = Timings(load_s=self.timings.load_s)
        return Completion(self.prompt_ids, seed=self.seed, timings=timings)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm run --json`` prints, without the placement.

        It has ``logprobs``, ``prompt_logprobs``, ``alternatives``, ``score`` and ``bill`` only if
        there are any.
        """
        found: dict[str, Any] = {
            "prompt_tokens": len(self.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "tokens": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "notes": self.notes,
            "timings": self.timings.as_dict(),
        }
        for name in ("logprobs", "prompt_logprobs", "alternatives"):
            if entries := getattr(self, name):
                found[name] = [each.as_dict() for each in entries]
        if self.score is not None:
            found["score"] = self.score
        if self.bill is not None:
            found["bill"] = self.bill.as_dict()
        return found


# ------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class Prefilled:
    """Progress of a prefill: ``done`` of ``total`` tokens of the prompt that are not cached."""

    done: int
    total: int


@dataclass(frozen=True)
class Sampled:
    """A sampled token, or the end of the answer.

    Attributes:
        token: id of the token; None for the end.
        text: text that can be emitted now.
        at: time of the step's end, on the clock of `time.perf_counter`.
        logprobs: the token's, if they were asked for.
    """

    token: int | None
    text: str
    at: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Answer:
    """One of the answers that a beam search found.

    Attributes:
        ids: generated ids, without the one that ended the answer.
        text: their text.
        finish_reason: see `Completion`.
        score: see `Completion`.
        note: remark for the user.
    """

    ids: list[int]
    text: str
    finish_reason: str
    score: float
    note: str = ""


@dataclass(frozen=True)
class Found(Sampled):
    """The end of a beam search, and its answers, best first."""

    answers: tuple[Answer, ...] = ()
