"""Sampling settings and stop conditions of a request (`Sampling`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arguments import (
    Integer,
    Optional,
    Real,
    Rule,
    check,
    flag,
    functions,
    invalid_argument,
    text,
    texts,
    token_biases,
    token_ids,
    unknown_argument,
)
from ..errors import RequestError
from ..model.batch import Limits
from .beam_arguments import BEAM_RULES, check_beams
from .logits_processors import LogitsProcessor

MAX_SAMPLES = 1024  # of one prompt
GRAMMARS = ("json_schema", "regex", "grammar")  # fields, of which one at most is given


def _json_schema(name: str, value: Any) -> str:
    """A JSON schema: a mapping, or its JSON text."""
    from .grammar import json_schema_text  # needs the extra ``structured``

    return json_schema_text(name, value)


_RULES: dict[str, Rule] = {  # of the fields of `Sampling`
    "max_tokens": Integer(),
    "temperature": Real(0),
    "top_k": Integer(0, 2**31 - 1),
    "top_p": Real(0, 1, above=True),
    "min_p": Real(0, 1),
    "typical_p": Real(0, 1, above=True),
    "top_n_sigma": Real(0),
    "xtc_probability": Real(0, 1),
    "xtc_threshold": Real(0, 1),
    "seed": Optional(Integer(0, 2**63 - 1)),
    "ignore_eos": flag,
    "repeat_penalty": Real(0.01, 100),  # logits stay finite
    "presence_penalty": Real(),
    "frequency_penalty": Real(),
    "penalty_last_n": Integer(-1, 2**31 - 1),
    "dry_multiplier": Real(0),
    "dry_base": Real(1),
    "dry_allowed_length": Integer(0, 2**31 - 1),
    "dry_penalty_last_n": Integer(-1, 2**31 - 1),
    "dry_breaker_ids": token_ids,
    "logit_bias": token_biases,
    "banned_ids": token_ids,
    "allowed_ids": token_ids,
    "min_tokens": Integer(0, 2**31 - 1),
    "stop": texts,
    "stop_ids": token_ids,
    "n": Integer(1, MAX_SAMPLES),
    "processors": functions,
    "forced_ids": token_ids,
    "json_schema": Optional(_json_schema),
    "regex": Optional(text),
    "grammar": Optional(text),
    "forced_eos_id": Optional(Integer(0, 2**31 - 1)),
    "source_lang": Optional(text),
    "target_lang": Optional(text),
    "prompt_logprobs": Optional(Integer(0, Limits.top_logprobs)),
    "logprobs": Optional(Integer(0, Limits.top_logprobs)),
    "profile": flag,
    **BEAM_RULES,
}
_ID_FIELDS = (  # of the fields of `Sampling`
    "stop_ids", "logit_bias", "banned_ids", "allowed_ids", "dry_breaker_ids", "forced_ids",
)  # fmt: skip
# Names in transformers, vLLM and llama.cpp; the command line accepts them, too.
ALIASES = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
    "typical": "typical_p",
    "allowed_token_ids": "allowed_ids",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "logits_processors": "processors",
    "stop_token_ids": "stop_ids",
    "num_return_sequences": "n",
    "num_beams": "beams",
    "num_beam_groups": "beam_groups",
    "forced_eos_token_id": "forced_eos_id",
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings and stop conditions of a request.

    Samplers are applied in llama.cpp's order: biases, penalties, DRY, top-n-sigma, top-k,
    typical-p, top-p, min-p, XTC, temperature.

    The penalties apply to the tokens among the last ``penalty_last_n``, the prompt included: the
    token's logit is divided by ``repeat_penalty`` (multiplied if it is negative), then reduced by
    ``presence_penalty`` and by ``frequency_penalty`` times the token's count. The engine keeps the
    last 1,024 tokens for the penalties and for DRY.

    Args:
        max_tokens: maximum number of tokens to generate.
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: sample among the k most likely tokens; 0 disables it.
        top_p: nucleus sampling: the smallest set of tokens whose probability reaches ``top_p``; 1
            disables it.
        min_p: minimum probability of a token, relative to the most likely one; 0 disables it.
        typical_p: typical sampling: the smallest set of tokens whose information content is closest
            to the entropy and whose probability reaches ``typical_p``; 1 disables it.
        top_n_sigma: sample among the tokens whose logits are within this many standard deviations
            of the largest; 0 disables it.
        xtc_probability: probability that XTC excludes, at a position, all but the least likely of
            the tokens that reach ``xtc_threshold``; 0 disables it.
        xtc_threshold: probability of a token from which on XTC considers it; above 0.5 disables it.
        seed: seed of the random numbers; None chooses one, which `Completion.seed` reports.
        ignore_eos: never sample an EOS token.
        repeat_penalty: 1 disables it.
        presence_penalty: 0 disables it.
        frequency_penalty: 0 disables it.
        penalty_last_n: number of last tokens that the three penalties consider; 0 disables them,
            -1 stands for all tokens that the engine keeps.
        dry_multiplier: strength of the DRY penalty on tokens that continue a repetition of the last
            tokens; 0 disables it.
        dry_base: base of the penalty, whose exponent is the length of the repetition above
            ``dry_allowed_length``.
        dry_allowed_length: length of the longest repetition without a penalty, plus one.
        dry_penalty_last_n: number of last tokens in which DRY looks for repetitions; -1 stands for
            all tokens that the engine keeps.
        dry_breaker_ids: token ids that end a repetition.
        logit_bias: values to add to logits, by token id; -inf bans a token.
        banned_ids: token ids that are never sampled.
        allowed_ids: the only token ids that are sampled; all if empty.
        min_tokens: number of tokens before which no EOS token is sampled, and stop strings and
            stop token ids are ignored.
        stop: stop strings: the first one ends the text and is not part of it.
        stop_ids: stop token ids: the first one ends the answer and is not part of it.
        n: number of samples of the prompt, with independent random numbers; the first one is that
            of ``n`` = 1. The others are `Completion.alternatives`. With ``temperature`` = 0 all are
            the same.
        logprobs: return the log-probability of each sampled token and of this many of the most
            likely ones, at most 20, in `Completion.logprobs`; None returns none. They are those of
            the model, before biases, penalties, filters and temperature.
        prompt_logprobs: the same for each token of the prompt after the first, in
            `Completion.prompt_logprobs`. The whole prompt is computed, also if it is cached. With
            ``max_tokens`` = 0 the prompt is only evaluated.
        processors: logits processors, functions that take (ids of the prompt and those sampled so
            far, logits float32 [vocab]) and return the logits to sample from. They are called in
            order, after biases and penalties and before the filters and the temperature. A function
            that fails ends the request with a RequestError.
        forced_ids: token ids that the answer begins with, whatever their logits.
        json_schema: JSON schema that the answer matches, a mapping or its JSON text. The answer
            ends when nothing can follow, or at ``max_tokens``. Needs the extra ``structured``.
        regex: as json_schema, a regular expression (Rust's syntax) that the whole answer matches.
        grammar: as json_schema, a grammar in llguidance's variant of Lark.
        forced_eos_id: EOS id that is the last one of ``max_tokens`` tokens, so that an answer has
            at most one fewer. None: that of an encoder-decoder's file; a decoder has none.
        source_lang: language code of the source, for encoder-decoders with such codes.
        target_lang: language code of the answer, for encoder-decoders with such codes.
        profile: record the steps that compute the request, and return what it cost in
            `Completion.bill`: its time by op and cause.
        beams: number of beams of a beam search, which replaces sampling; 1: none. The best ``n``
            sequences that it finds are the answers. Samplers, penalties, logits processors, stop
            strings and log-probabilities cannot be combined with it.
        length_penalty: exponent of the length in `Completion.score`; above 0 it favours long
            sequences.
        early_stopping: when the search ends that has found as many sequences as beams: True: at
            once; False: if the best beam, were it to end now, would be no better than the worst of
            them; "never": if no beam can become better.
        beam_groups: number of groups of diverse beam search (Vijayakumar et al. 2016); they divide
            ``beams`` evenly.
        diversity_penalty: what a token loses for each beam of an earlier group that has the same
            token at the same position.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    ignore_eos: bool = False
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breaker_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: Sequence[int] = ()
    allowed_ids: Sequence[int] = ()
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    forced_ids: Sequence[int] = ()
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    forced_eos_id: int | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    profile: bool = False
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    beam_groups: int = 1
    diversity_penalty: float = 0.0

    @property
    def stages(self) -> int:
        """Number of stages between logits and `ops.sample`; see `sampler.STAGES`."""
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        early_stop = self.ignore_eos or self.min_tokens > 0
        if self.filters_logits:
            return 4
        if self.dry_multiplier > 0 or penalties != (1.0, 0.0, 0.0):
            return 3
        if self.logit_bias or self.banned_ids or self.allowed_ids or early_stop:
            return 2
        return int(self.has_grammar)

    @property
    def has_grammar(self) -> bool:
        """Whether the answer is restricted to a grammar."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    @property
    def filters_logits(self) -> bool:
        """Whether filters other than top-k, top-p and min-p restrict the ids."""
        return self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0

    @property
    def ids_by_field(self) -> dict[str, list[int]]:
        """Token ids that the settings mention, by the name of their field."""
        found = {name: [*ids] for name in _ID_FIELDS if len(ids := getattr(self, name))}
        if self.forced_eos_id is not None:
            found["forced_eos_id"] = [self.forced_eos_id]
        return found

    @property
    def token_ids(self) -> list[int]:
        """All token ids that the settings mention."""
        return [i for each in self.ids_by_field.values() for i in each]

    @classmethod
    def from_arguments(cls, where: str, arguments: Mapping[str, Any]) -> Sampling:
        """Return the settings given as keyword arguments of a public function.

        Args:
            where: name of the function, for error messages.
            arguments: fields of `Sampling` or their `ALIASES`; ``sampling`` may be a `Sampling`, or
                a mapping of such arguments, that the other arguments override.

        Raises:
            RequestError: an argument is unknown, given twice or invalid.
        """
        found: dict[str, Any] = {}
        for name, value in arguments.items():
            own = ALIASES.get(name, name)
            if own not in _RULES and own != "sampling":
                raise unknown_argument(name, _RULES, ALIASES, where)
            if own in found:
                twice = " and ".join(n for n in arguments if ALIASES.get(n, n) == own)
                raise RequestError(f"{twice} are the same argument: give one of them", own)
            found[own] = value
        base, new = found.pop("sampling", None), found
        if isinstance(base, Mapping):
            base = cls.from_arguments(where, base) if base else None
        elif isinstance(base, cls):
            new = vars(base) | found  # nothing has checked it
        elif base is not None:
            raise invalid_argument("sampling", base, "a graphllm.Sampling or a mapping")
        own = {} if base is None else vars(base)
        made = cls(**{**own, **check(_RULES, new)})
        check_beams(vars(made), _DEFAULTS, found)
        return made

    def normalize(self) -> Sampling:
        """Return a validated copy with built-in types and a seed. RequestError: invalid value."""
        made = Sampling(**check(_RULES, vars(self)))
        check_beams(vars(made), _DEFAULTS)
        return made.with_seed()

    def unlimited(self) -> Sampling:
        """Return a copy without stop strings and ids, and without a limit on the tokens."""
        return replace(self, max_tokens=2**31 - 1, stop=(), stop_ids=())

    def with_seed(self) -> Sampling:
        """Return a copy with a random seed, or the settings themselves if they have one."""
        if self.seed is not None:
            return self
        return Sampling(**{**vars(self), "seed": int.from_bytes(os.urandom(4), "big")})


_DEFAULTS = vars(Sampling())
