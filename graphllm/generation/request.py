"""What a caller asks for, and what it gets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RequestError

_MOST = 1e30  # what float32 holds, with room for products


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, in llama.cpp's order: the penalties, top-k, top-p, min-p, then
    the temperature; and when to end.

    ``temperature`` 0 takes the most likely token. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``seed`` None draws one; the drawn seed is in the result. ``ignore_eos`` forbids end tokens.

    The penalties look at the last 64 tokens, the prompt's included. A token among them has its
    logit divided by ``repeat_penalty`` (1: off; multiplied if negative), less ``presence_penalty``,
    less ``frequency_penalty`` for each time it is there (0: off).

    ``stop``: texts that end the answer and are not part of it; ``stop_ids``: tokens that do. Before
    ``min_tokens`` tokens no end token is drawn, and no stop text or id is heeded.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()

    @property
    def penalises(self) -> bool:
        """Whether logits are changed before anything is drawn from them."""
        neutral = (1.0, 0.0, 0.0)
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return self.ignore_eos or self.min_tokens > 0 or penalties != neutral

    def checked(self) -> Sampling:
        """This request with its seed drawn. RequestError names a value out of range."""
        if isinstance(self.stop, str):
            return replace(self, stop=(self.stop,)).checked()
        for name in ("max_tokens", "top_k", "min_tokens"):
            if not isinstance(getattr(self, name), int):
                raise RequestError(f"{name} = {getattr(self, name)!r} must be a whole number")
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), (int, float)):
                raise RequestError(f"{name} = {getattr(self, name)!r} must be a number")
        rules = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < _MOST, "at least 0"),
            ("top_k", 0 <= self.top_k < 2**31, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in 0..2^63-1"),
            ("repeat_penalty", 0 < self.repeat_penalty < _MOST, "above 0"),
            ("presence_penalty", abs(self.presence_penalty) < _MOST, "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < _MOST, "a finite number"),
            ("min_tokens", 0 <= self.min_tokens < 2**31, "in 0..2^31-1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "texts that are not empty"),
            ("stop_ids", all(i >= 0 for i in self.stop_ids), "token ids"),
        )
        for name, ok, wanted in rules:
            if not ok:
                raise RequestError(f"{name} = {getattr(self, name)!r} must be {wanted}")
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))


@dataclass
class Timings:
    """Seconds and rates of one request, the model's loading included for its first."""

    load_s: float = 0.0
    ttft_s: float = 0.0  # from the request to its first token
    prefill_s: float = 0.0
    prefill_tokens: int = 0  # computed; what was in the cache already is not
    decode_s: float = 0.0
    decode_tokens: int = 0

    def as_dict(self) -> dict[str, float]:
        return {
            "load_s": round(self.load_s, 4),
            "ttft_s": round(self.ttft_s, 4),
            "prefill_tok_s": round(_rate(self.prefill_tokens, self.prefill_s), 2),
            "decode_tok_s": round(_rate(self.decode_tokens, self.decode_s), 2),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass
class Completion:
    """A finished generation.

    ``finish_reason``: stop (an end token or a stop text), length, or context (full). ``ids`` are
    all that were drawn, those of a stop text included; ``text`` ends before it. ``cached_tokens``
    of the prompt were in the cache already.
    """

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    seed: int = 0
    cached_tokens: int = 0
    timings: Timings = field(default_factory=Timings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "tokens": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "timings": self.timings.as_dict(),
        }
