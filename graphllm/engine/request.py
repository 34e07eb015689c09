"""What a caller asks for, and what it gets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arguments import (
    Number,
    Optional,
    Rule,
    Whole,
    check,
    flag,
    refused,
    texts,
    token_ids,
    unknown,
)
from ..errors import RequestError

_RULES: dict[str, Rule] = {  # of the fields of `Sampling`
    "max_tokens": Whole(),
    "temperature": Number(0),
    "top_k": Whole(0, 2**31 - 1),
    "top_p": Number(0, 1, above=True),
    "min_p": Number(0, 1),
    "seed": Optional(Whole(0, 2**63 - 1)),
    "ignore_eos": flag,
    "repeat_penalty": Number(0, above=True),
    "presence_penalty": Number(),
    "frequency_penalty": Number(),
    "min_tokens": Whole(0, 2**31 - 1),
    "stop": texts,
    "stop_ids": token_ids,
}
# What other programs call them: transformers, vLLM, llama.cpp. The command line has the same.
ALIASES = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "stop_token_ids": "stop_ids",
}


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
    def changes_logits(self) -> bool:
        """Whether logits are changed before anything is drawn from them."""
        neutral = (1.0, 0.0, 0.0)
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return self.ignore_eos or self.min_tokens > 0 or penalties != neutral

    @classmethod
    def from_arguments(cls, where: str, arguments: Mapping[str, Any]) -> Sampling:
        """The request that keyword arguments of the function ``where`` make; `ALIASES` are taken.

        ``sampling``: a `Sampling` that the others change. RequestError names an argument that is
        unknown, given twice or bad.
        """
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            own = ALIASES.get(name, name)
            if own not in _RULES and own != "sampling":
                raise unknown(name, _RULES, ALIASES, where)
            if own in found:
                twice = " and ".join(n for n in arguments if ALIASES.get(n, n) == own)
                raise RequestError(f"{twice} are the same argument: give one of them", own)
            found[own] = value
        base = found.pop("sampling", None) or cls()
        if not isinstance(base, cls):
            raise refused("sampling", base, "a graphllm.Sampling")
        return cls(**check(_RULES, vars(base) | found))

    def normalize(self) -> Sampling:
        """This request with plain values, and its seed drawn. RequestError names a bad value."""
        return Sampling(**check(_RULES, vars(self))).with_seed()

    def with_seed(self) -> Sampling:
        """This request with its seed drawn, if it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))


@dataclass
class Timings:
    """Seconds and rates of one request, the model's loading included for its first."""

    load_s: float = 0.0
    queue_s: float = 0.0  # waiting for other requests on the model; prefill and decode are without
    ttft_s: float = 0.0  # from the request to its first token, waiting included
    prefill_s: float = 0.0
    prefill_tokens: int = 0  # computed; what was in the cache already is not
    decode_s: float = 0.0
    decode_tokens: int = 0

    def as_dict(self) -> dict[str, float]:
        return {
            "load_s": round(self.load_s, 4),
            "queue_s": round(self.queue_s, 4),
            "ttft_s": round(self.ttft_s, 4),
            "prefill_tok_s": round(_rate(self.prefill_tokens, self.prefill_s), 2),
            "decode_tok_s": round(_rate(self.decode_tokens, self.decode_s), 2),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass
class Completion:
    """A finished generation.

    ``finish_reason``: stop (an end token or a stop text) or length (``max_tokens``, or the context
    is full, which is in the ``notes`` then). ``ids`` are all that were sampled, those of a stop
    text included; ``text`` ends before it. ``cached_tokens`` of the prompt were in the cache.
    ``notes``: what a user should know of the answer, a line each.
    """

    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    seed: int = 0
    cached_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt_ids),
            "cached_tokens": self.cached_tokens,
            "tokens": self.ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "notes": self.notes,
            "timings": self.timings.as_dict(),
        }
