"""What a caller asks for, and what it gets."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, in llama.cpp's order: top-k, top-p, min-p, then temperature.

    ``temperature`` 0 takes the most likely token. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``seed`` None draws one; the drawn seed is in the result.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def checked(self) -> Sampling:
        """This request with its seed drawn. RequestError names a value out of range."""
        rules = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in 0..2^63-1"),
        )
        for name, ok, wanted in rules:
            if not ok:
                raise RequestError(f"{name} = {getattr(self, name)} must be {wanted}")
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
    """A finished generation. ``finish_reason``: stop (an end token), length, or context (full)."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    seed: int = 0
    timings: Timings = field(default_factory=Timings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt_ids),
            "tokens": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "timings": self.timings.as_dict(),
        }
