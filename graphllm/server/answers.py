"""Objects of OpenAI's API that answers are made of: choices, log-probabilities, usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

from ..engine.completion import Completion
from ..engine.step_result import TokenLogprobs
from ..tokenizer import Tokenizer
from ..version import __version__
from .chat_text import ChatText
from .errors import ApiError
from .json_data import LazyArray, json_bytes, json_logprob, json_parts

Object = dict[str, Any]
Piece = tuple[int, str, Sequence[TokenLogprobs]]  # number of a choice, its new text and tokens
FINGERPRINT = f"build-{__version__}"
_TEXT = "\ue000"  # stands for the text of an event that is encoded for many texts


class Answer:
    """The objects of one answer, whole or as the events of a stream.

    Attributes:
        kind, chunk_kind: the ``object`` of a whole answer, and of a chunk.
        prefix: of the answer's id.
        last: what ends a stream without an error.
        bills: whether the last event of a stream gets the bill of the request.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    last = b"data: [DONE]\n\n"
    bills = False

    def __init__(
        self, model: str, tokenizer: Tokenizer, include_usage: bool = False, echo: bool = False
    ) -> None:
        """Begin an answer of ``model``.

        Args:
            model: name of the model in the API.
            tokenizer: its tokenizer.
            include_usage: whether the last chunk has the usage.
            echo: whether the text of the prompt precedes the answer.
        """
        self.include_usage, self._echoes = include_usage, echo
        self._head = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time())}
        self._model, self.tokenizer = model, tokenizer
        self._offsets: dict[int, int] = {}  # characters of the tokens of each choice so far
        self._around: dict[int, tuple[bytes, bytes]] = {}  # see `_text_event`
        self._token_texts: dict[int, tuple[str, list[int]]] = {}  # see `_token_text`

    # -- what every API has
    def whole(self, prompts: Sequence[Completion]) -> Object:
        """Return the whole answer to the prompts, which have ended, for `json_parts`."""
        choices = (
            self.choice(index, done, echo)
            for index, (done, echo) in enumerate(
                (done, self._echo(prompt)) for prompt in prompts for done in prompt.choices
            )
        )
        return self._object(self.kind, LazyArray(choices)) | self._totals(prompts)

    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        """Yield the first events of a stream; ``samples``: number of choices of each prompt."""
        for index in range(len(prompts) * samples):
            if (first := self.first(index, self._echo(prompts[index // samples]))) is not None:
                yield self._chunk([first])

    def pieces(self, new: Sequence[Piece]) -> Iterator[Object]:
        """Yield the events of what came at once."""
        if new:
            yield self._chunk([self.piece(*each) for each in new])

    def encoded(self, new: Sequence[Piece]) -> Iterator[bytes]:
        """Yield the events of what came at once as bytes, as `pieces` and `framed` have them."""
        if len(new) != 1 or new[0][2]:
            for event in self.pieces(new):
                yield from self.framed(event)
        else:
            index, text, _ = new[0]
            yield self._text_event(index, text, lambda text: self.piece(index, text, ()))

    def _text_event(self, index: int, text: str, piece: Callable[[str], Object]) -> bytes:
        """Return the event of a piece that differs from others of its choice only by its text.

        Everything around the text is encoded once for each choice.
        """
        around = self._around.get(index)
        if around is None:
            whole = self.frame(self._chunk([piece(_TEXT)]))
            before, _, after = whole.rpartition(json_bytes(_TEXT))
            around = self._around[index] = before, after
        return json_bytes(text).join(around)

    def ended(self, index: int, finish: str) -> Iterator[Object]:
        """Yield the events of the end of a choice."""
        yield self._chunk([self.piece(index, "", (), finish)])

    def finish(self, prompts: Sequence[Completion]) -> Iterator[Object]:
        """Yield the last events of a stream, whose prompts have ended."""
        if self.include_usage or self.bills:
            yield self._chunk([], self._totals(prompts))

    def error(self, error: ApiError) -> Object:
        """Return the event that ends a stream with an error."""
        return error.body

    def frame(self, event: Object) -> bytes:
        """Return a server-sent event without log-probabilities."""
        return b"data: %b\n\n" % json_bytes(event)

    def framed(self, event: Object) -> Iterator[bytes]:
        """Yield any server-sent event in parts, see `json_parts`."""
        yield b"data: "
        yield from json_parts(event)
        yield b"\n\n"

    # -- choices
    def _chunk(self, choices: Sequence[Object], totals: Object | None = None) -> Object:
        """Return a chunk of a stream; ``totals`` belong to the last one, which has no choices."""
        more = (totals or {"usage": None}) if self.include_usage else {}
        return self._object(self.chunk_kind, choices) | more

    @staticmethod
    def _totals(prompts: Sequence[Completion]) -> Object:
        """Return the usage of an answer, and, as llama.cpp's server has them, its timings."""
        own = {"timings": timings(prompts[0])} if len(prompts) == 1 else {}
        return {"usage": usage(prompts), **own}

    def _echo(self, prompt: Completion) -> str | None:
        """Return the text of a prompt if the answer echoes it."""
        return self.tokenizer.decode(prompt.prompt_ids) if self._echoes else None

    def _object(self, kind: str, choices: Sequence[Object] | LazyArray) -> Object:
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def choice(self, index: int, done: Completion, echo: str | None = None) -> Object:
        """Return a whole choice; ``echo``: the prompt's text, if it precedes the answer."""
        tokens = done.logprobs
        if echo is not None and (tokens or done.prompt_logprobs):
            first = TokenLogprobs(done.prompt_ids[0], 0.0)
            tokens = [first, *done.prompt_logprobs, *done.logprobs]
        return {
            "index": index,
            "text": (echo or "") + done.text,
            "logprobs": self.logprobs(tokens, known=echo is None) if tokens else None,
            "finish_reason": done.finish_reason,
        }

    def first(self, index: int, echo: str | None = None) -> Object | None:
        """Return the first piece of a choice, which precedes all text; None for none."""
        return None if echo is None else self.piece(index, echo, ())

    def piece(
        self, index: int, text: str, tokens: Sequence[TokenLogprobs], finish: str | None = None
    ) -> Object:
        """Return a piece of a choice.

        Args:
            index: number of the choice.
            text: new text.
            tokens: log-probabilities of the tokens that are new.
            finish: finish_reason; the piece is the last one.
        """
        listed = self.logprobs(tokens, self._offsets.get(index, 0)) if tokens else None
        if listed is not None:
            self._offsets[index] = listed["text_offset"][-1] + len(listed["tokens"][-1])
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": finish}

    def logprobs(self, tokens: Sequence[TokenLogprobs], at: int = 0, known: bool = True) -> Object:
        """Return log-probabilities of tokens in the form of the endpoint.

        Args:
            tokens: the tokens.
            at: offset of the first token in the text.
            known: whether the first token has a log-probability.
        """
        texts = [self._token_text(each.id)[0] for each in tokens]
        unknown = 0 if known else 1
        logprobs = [json_logprob(each.logprob) for each in tokens[unknown:]]
        tops = (self._top(each) for each in tokens[unknown:])
        return {
            "tokens": texts,
            "token_logprobs": [None] * unknown + logprobs,
            "top_logprobs": LazyArray(chain([None] * unknown, tops)),
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=at)),
        }

    def _top(self, each: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities of the most likely tokens and of the token itself, by text."""
        entries = (*reversed(each.top), (each.id, each.logprob))
        return {self._token_text(token)[0]: json_logprob(value) for token, value in entries}

    def _token_text(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token; they are made once for each token."""
        found = self._token_texts.get(token)
        if found is None:
            data = self.tokenizer.piece(token)
            found = self._token_texts[token] = data.decode("utf-8", "replace"), list(data)
        return found


class ChatAnswer(Answer):
    """As `Answer`, of ``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(
        self, model: str, tokenizer: Tokenizer, text: ChatText, include_usage: bool = False,
        shown: str | None = None,
    ) -> None:  # fmt: skip
        """As `Answer`; ``text`` splits the answers, ``shown`` is the prompt, to be shown."""
        super().__init__(model, tokenizer, include_usage)
        self._chat_text, self._shown = text, shown

    def whole(self, prompts: Sequence[Completion]) -> Object:
        found = super().whole(prompts)
        return found if self._shown is None else {**found, "__verbose": {"prompt": self._shown}}

    def choice(self, index: int, done: Completion, echo: str | None = None) -> Object:
        message, finish = self._chat_text.message(done.text, done.finish_reason)
        return {
            "index": index,
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": self.logprobs(done.logprobs) if done.logprobs else None,
            "finish_reason": finish,
        }

    def first(self, index: int, echo: str | None = None) -> Object | None:
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(
        self, index: int, text: str, tokens: Sequence[TokenLogprobs], finish: str | None = None
    ) -> Object:
        delta, finish = self._chat_text.delta(index, text, finish)
        return self._delta(index, delta, tokens, finish)

    def encoded(self, new: Sequence[Piece]) -> Iterator[bytes]:
        if len(new) != 1 or new[0][2]:
            yield from super().encoded(new)
            return
        index, text, _ = new[0]
        delta, _ = self._chat_text.delta(index, text, None)
        if delta.keys() != {"content"}:
            yield self.frame(self._chunk([self._delta(index, delta)]))
            return
        yield self._text_event(
            index, delta["content"], lambda text: self._delta(index, {"content": text})
        )

    def _delta(
        self, index: int, delta: Object, tokens: Sequence[TokenLogprobs] = (),
        finish: str | None = None,
    ) -> Object:  # fmt: skip
        listed = self.logprobs(tokens) if tokens else None
        return {"index": index, "delta": delta, "logprobs": listed, "finish_reason": finish}

    def logprobs(self, tokens: Sequence[TokenLogprobs], at: int = 0, known: bool = True) -> Object:
        content = (
            self._token(each.id, each.logprob)
            | {"top_logprobs": [self._token(*other) for other in each.top]}
            for each in tokens
        )
        return {"content": LazyArray(content), "refusal": None}

    def _token(self, token: int, logprob: float) -> Object:
        text, data = self._token_text(token)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": data}


def matched_stop(tokenizer: Tokenizer, done: Completion, stops: Sequence[str]) -> str | None:
    """Return the stop string that ended an answer, if one did."""
    if done.finish_reason != "stop" or not stops:
        return None
    # The tokens of the stop string belong to `ids`.
    rest = tokenizer.decode(done.ids, continuation=True)[len(done.text) :]
    return min((stop for stop in stops if rest.startswith(stop)), key=len, default=None)


def timings(done: Completion) -> Object:
    """Return the times of an answer in milliseconds, with llama.cpp's names."""
    known = done.timings
    prompt, decoded = known.prefill_tokens, known.decode_tokens
    return {
        "cache_n": done.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * known.prefill_s,
        "prompt_per_token_ms": 1e3 * known.prefill_s / prompt if prompt else 0.0,
        "prompt_per_second": prompt / known.prefill_s if known.prefill_s else 0.0,
        "predicted_n": len(done.ids),
        "predicted_ms": 1e3 * known.decode_s,
        "predicted_per_token_ms": 1e3 * known.decode_s / decoded if decoded else 0.0,
        "predicted_per_second": decoded / known.decode_s if known.decode_s else 0.0,
        "draft_n": known.drafted_tokens,
        "draft_n_accepted": known.accepted_tokens,
    }


def usage(prompts: Iterable[Completion]) -> Object:
    """Return the tokens of an answer, which has the samples ``choices`` of each of ``prompts``.

    A prompt counts once, however many samples it has; tokens that end an answer do not count.
    """
    own = list(prompts)
    prompt_tokens = sum(len(done.prompt_ids) for done in own)
    completion_tokens = sum(len(each.ids) for done in own for each in done.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in own)},
    }
