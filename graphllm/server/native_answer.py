"""Answers of llama.cpp's ``/completion``: their fields, settings and probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engine.completion import Completion
from ..engine.request import Sampling
from ..engine.step_result import TokenLogprobs
from ..tokenizer import Tokenizer
from .answers import Answer, Object, Piece, matched_stop, timings
from .json_data import LazyArray, json_logprob

_STOPS = {"length": "limit", "stop": "eos"}  # stop_type by finish_reason
# Settings by their names in llama.cpp, and the fields of `Sampling` that they are.
_SETTINGS = {name: name for name in (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "ignore_eos",
)} | {
    "repeat_last_n": "penalty_last_n", "n_predict": "max_tokens", "max_tokens": "max_tokens",
}  # fmt: skip
# Samplers that are not supported, switched off.
_OFF = {"mirostat": 0, "dynatemp_range": 0.0, "adaptive_target": -1.0, "adaptive_decay": 0.0}


def default_settings(defaults: Mapping[str, Any]) -> Object:
    """Return the settings of a request that sets none; ``defaults``: fields of `Sampling`."""
    given = {"max_tokens": -1, **defaults}
    length = given.pop("max_tokens")
    own = Sampling(**given)
    counts = dict.fromkeys(("n_predict", "max_tokens"), length)
    return {**_settings(own), **counts, "seed": -1 if own.seed is None else own.seed}


def _settings(sampling: Sampling) -> Object:
    """Return sampling settings by their names in llama.cpp."""
    return {shown: getattr(sampling, name) for shown, name in _SETTINGS.items()} | _OFF


class NativeAnswer(Answer):
    """As `Answer`, of llama.cpp's ``/completion``."""

    last = b""

    def __init__(
        self, model: str, tokenizer: Tokenizer, settings: Mapping[str, Any],
        values: Mapping[str, Any], context: int,
    ) -> None:  # fmt: skip
        """Begin an answer of ``model``.

        Args:
            model: name of the model in the API.
            tokenizer: its tokenizer.
            settings: fields of `Sampling`.
            values: fields of the request.
            context: tokens of a prompt and its answer at most.
        """
        super().__init__(model, tokenizer)
        self._sampling, self._values, self._context = Sampling(**settings), values, context
        self._prompts: Sequence[Completion] = ()
        self._sent: dict[int, int] = {}  # tokens of each prompt that events had

    # -- answers
    def whole(self, prompts: Sequence[Completion]) -> Any:
        answers = (self._end(index, done, done.text) for index, done in enumerate(prompts))
        return LazyArray(answers) if len(prompts) > 1 else next(answers)

    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        self._prompts = prompts
        yield from ()

    def pieces(self, new: Sequence[Piece]) -> Iterator[Object]:
        """Yield an event for each piece; with probabilities, one for each of its tokens."""
        for index, text, tokens in new:
            done, sent = self._prompts[index], self._sent.get(index, 0)
            self._sent[index] = len(done.ids)
            head = {"index": index, "stop": False, "tokens_evaluated": len(done.prompt_ids)}
            for token in tokens[:-1]:
                yield {**head, "content": "", "tokens": [token.id], **self._probabilities([token])}
            ids = [tokens[-1].id] if tokens else done.ids[sent:]
            yield {**head, "content": text, "tokens": ids, **self._probabilities(tokens[-1:])}

    def encoded(self, new: Sequence[Piece]) -> Iterator[bytes]:
        for event in self.pieces(new):
            yield from self.framed(event)

    def ended(self, index: int, finish: str) -> Iterator[Object]:
        """Yield an event with the tokens that have no text, such as those of a stop string."""
        done, sent = self._prompts[index], self._sent.get(index, 0)
        if rest := done.ids[sent:]:
            head = {"index": index, "stop": False, "tokens_evaluated": len(done.prompt_ids)}
            yield {**head, "content": "", "tokens": rest}

    def finish(self, prompts: Sequence[Completion]) -> Iterator[Object]:
        for index, done in enumerate(prompts):
            yield self._end(index, done, "")

    def _end(self, index: int, done: Completion, text: str) -> Object:
        """Return the last event of a prompt, or its whole answer with its text."""
        stop = matched_stop(self.tokenizer, done, self._sampling.stop)
        made = {
            "index": index,
            "content": text,
            "tokens": list(done.ids) if self._values.get("return_tokens") else [],
            "id_slot": -1,  # sequences have no slots
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(done.ids),
            "tokens_evaluated": len(done.prompt_ids),
            "tokens_cached": done.cached_tokens,
            "generation_settings": self._generation_settings(done),
            "prompt": self.tokenizer.decode(done.prompt_ids, skip_special=False),
            "truncated": self._is_truncated(done),
            "has_new_line": "\n" in done.text,
            "stop_type": "word" if stop is not None else _STOPS.get(done.finish_reason, "none"),
            "stopping_word": stop or "",
            "timings": timings(done),
            **self._probabilities(done.logprobs),
        }
        wanted = self._values.get("response_fields")
        return _selected(made, wanted) if wanted else made

    def _is_truncated(self, done: Completion) -> bool:
        """Whether the full context ended the answer."""
        cut = done.finish_reason == "length" and len(done.ids) < self._sampling.max_tokens
        return cut and len(done.prompt_ids) + len(done.ids) >= self._context

    # -- fields of answers
    def _generation_settings(self, done: Completion) -> Object:
        own, ends = self._sampling, sorted(self.tokenizer.eog_ids)
        biases = {**own.logit_bias, **dict.fromkeys(ends if own.ignore_eos else [], -math.inf)}
        shown = [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in biases.items()
        ]
        return {
            **_settings(own),
            "seed": done.seed,
            "stop": list(own.stop),
            "logit_bias": shown,
            "n_probs": own.logprobs or 0,
            "stream": self._values.get("stream", False),
        }

    def _probabilities(self, tokens: Sequence[TokenLogprobs]) -> Object:
        """Return the field with the log-probabilities of tokens, if there are any."""
        if not tokens:
            return {}
        listed = (
            self._token(each.id, each.logprob)
            | {"top_logprobs": [self._token(*other) for other in each.top]}
            for each in tokens
        )
        return {"completion_probabilities": LazyArray(listed)}

    def _token(self, token: int, logprob: float) -> Object:
        text, data = self._token_text(token)
        return {"id": token, "token": text, "logprob": json_logprob(logprob), "bytes": data}


def _selected(answer: Object, wanted: Sequence[str]) -> Object:
    """Return the fields of an answer by their paths, as ``generation_settings/seed``."""
    found: Object = {}
    for path in wanted:
        value: Any = answer
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
