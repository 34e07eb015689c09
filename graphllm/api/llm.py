"""A loaded model: text in, text or logits out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np

from ..arguments import (
    Integer,
    Optional,
    Rule,
    check,
    flag,
    function,
    invalid_argument,
    mapping,
    quote,
    texts,
)
from ..engine.engine import PrefillCallback
from ..engine.request import Completion, Sampling
from ..engine.stop_conditions import stream_text
from ..engine.trace import Patch, Tracer
from ..errors import RequestError
from ..loading.loaded_model import LoadedModel
from ..runtime.executor import Progress
from ..runtime.recorder import Recorder
from .prompts import Prompt, parse_prompt, parse_prompts

if TYPE_CHECKING:
    from ..chat import Conversation, Message
    from ..profiler.profile import Profile


class LLM(LoadedModel):
    """A model with its tokenizer, ready to run; made by `load`.

    Requests of several threads wait for each other, and each gets the answer that it gets alone. A
    stream owns the model while it is read. One that nobody continues gives it up to a request that
    waits, and computes its tokens again if it goes on. A request from a callback of a running one
    is a RequestError. `close`, or the end of a ``with`` block, frees the memory; after that all but
    `close` is a RequestError.
    """

    _freed: ClassVar[set[str]] = LoadedModel._freed | {"_tracer"}

    # -- text
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD. RequestError for an id out of range.

        ``skip_special`` leaves out control tokens.
        """
        known = parse_prompts(ids, "llm.decode") or []
        if not isinstance(known, list):
            raise invalid_argument("ids", ids, "token ids")
        own = check({"skip_special": flag}, {"skip_special": skip_special})
        self.check_ids(known)
        return self.tokenizer.decode(known, **own)

    def stream(
        self, prompt: Prompt, seen: PrefillCallback | None = None, **sampling: Any
    ) -> Iterator[str]:
        """The continuation of ``prompt``, a text or token ids, piece by piece; keywords as in
        `Sampling`. RequestError where one is bad, or the model has no tokenizer."""
        wanted = Sampling.from_arguments("llm.stream", sampling)
        _ = self.tokenizer  # without one there is nothing to yield
        one = parse_prompt(prompt, "llm.stream")
        return self._stream_completion(one, wanted.with_seed(), Completion(), seen)

    @overload
    def generate(
        self, prompt: Prompt, seen: PrefillCallback | None = None, **sampling: Any
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], seen: PrefillCallback | None = None, **sampling: Any
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        seen: PrefillCallback | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """The continuation of ``prompt``, a text or token ids; keywords as in `Sampling`.

        Of several prompts: a list of their continuations, made one after another. Without a
        tokenizer prompts are ids, and completions have no text. RequestError names a bad argument.
        """
        wanted = Sampling.from_arguments("llm.generate", sampling)
        found = parse_prompts(prompt, "llm.generate")
        if not isinstance(found, tuple):
            return self._complete(found, wanted, seen)
        return [self._complete(one, wanted, seen) for one in found]

    def _complete(
        self, prompt: str | list[int], wanted: Sampling, seen: PrefillCallback | None
    ) -> Completion:
        completion = Completion()
        for _ in self._stream_completion(
            prompt, wanted.with_seed(), completion, seen, exclusive=True
        ):
            pass
        return completion

    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        completion: Completion,
        seen: PrefillCallback | None = None,
        profile: tuple[Recorder, Recorder] | None = None,
        eos_ids: Collection[int] | None = None,
        exclusive: bool = False,
    ) -> Iterator[str]:
        """Yield pieces of text; ``completion`` is filled in meanwhile.

        ``prompt``: a text, or token ids. ``eos_ids``: the ids that end the answer, the model's end
        tokens by default. ``exclusive``: no other request runs until this one is over, however
        slowly pieces are taken.
        """
        return self._stream_completion(
            prompt, sampling.normalize(), completion, seen, profile, eos_ids, exclusive
        )

    def _stream_completion(
        self, prompt: str | Sequence[int], sampling: Sampling, completion: Completion,
        seen: PrefillCallback | None, profile: tuple[Recorder, Recorder] | None = None,
        eos_ids: Collection[int] | None = None, exclusive: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """`complete`, of a request that is checked and has its seed."""
        check({"seen": Optional(function)}, {"seen": seen})
        completion.seed = sampling.seed or 0
        completion.prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_ids([*completion.prompt_ids, *sampling.stop_ids])
        completion.timings.load_s = self.load_s
        tokenizer = self.tokenizer if self.file.has_vocabulary else None
        if sampling.stop and tokenizer is None:
            raise RequestError(f"stop = {quote(sampling.stop)} needs a tokenizer; stop_ids do not")
        eos_ids = self._eos_ids() if eos_ids is None else eos_ids
        yield from stream_text(
            self.engine, tokenizer, sampling, completion, eos_ids, seen, profile, exclusive
        )

    def _eos_ids(self) -> Collection[int]:
        """The ids that end an answer of this model, as far as its file tells."""
        if self.file.has_vocabulary:
            return self.tokenizer.eog_ids
        stated = getattr(self.file, "eos_token_ids", None)
        return stated(self.decoder.cfg.vocab) if stated is not None else ()

    # -- chat
    def chat(
        self, messages: Sequence[Message], seen: PrefillCallback | None = None, **sampling: Any
    ) -> Completion:
        """The answer to ``messages``; keywords as in `Sampling`.

        messages: mappings with ``role`` and ``content``, a text or a list of text parts
        (``{"type": "text", "text": ...}``); special tokens in them are text (see `encode_chat`).
        What they have in common with the last request is not computed again.
        """
        wanted = Sampling.from_arguments("llm.chat", sampling)
        return self._complete(self.encode_chat(messages), wanted, seen)

    def chat_stream(
        self, messages: Sequence[Message], seen: PrefillCallback | None = None, **sampling: Any
    ) -> Iterator[str]:
        """As `chat`, piece by piece."""
        wanted = Sampling.from_arguments("llm.chat_stream", sampling)
        return self._stream_completion(
            self.encode_chat(messages), wanted.with_seed(), Completion(), seen
        )

    def encode_chat(
        self, messages: Sequence[Message], parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """The prompt that asks for the next answer, as ids; ``variables`` (``tools``) are the
        template's. Only what the template itself writes becomes control tokens. ``parse_special``:
        their texts in messages do, too, so that a message can end its turn and open another."""
        from ..chat import encode_chat, normalize_messages

        own = check({"parse_special": flag}, {"parse_special": parse_special})
        plain = normalize_messages(messages, "llm.chat")
        return encode_chat(self.tokenizer, self.template.render_prompt(plain, **variables), **own)

    def conversation(
        self, system: str | None = None, seen: PrefillCallback | None = None,
        parse_special: bool = False, **sampling: Any,
    ) -> Conversation:  # fmt: skip
        """A chat in turns, each of which computes its new tokens only; keywords as in `Sampling`.

        for piece in conversation.ask("Hello"): print(piece, end="")  # parse_special: encode_chat
        """
        from ..chat import Conversation

        check({"parse_special": flag}, {"parse_special": parse_special})
        if not isinstance(system, (str, type(None))):
            raise invalid_argument("system", system, "a text")
        wanted = Sampling.from_arguments("llm.conversation", sampling)

        def answered(ids: list[int], completion: Completion) -> Iterator[str]:
            return self._stream_completion(ids, wanted.with_seed(), completion, seen)

        return Conversation(self.template, self.tokenizer, answered, system, parse_special)

    def _ids(self, prompt: Prompt, where: str) -> list[int]:
        """The ids of one prompt, a text or ids. RequestError."""
        found = parse_prompt(prompt, where)
        ids = self.encode(found) if isinstance(found, str) else found
        self.check_ids(ids)
        return ids

    # -- numbers
    def logits(self, prompt: Prompt, last: bool = False) -> np.ndarray:
        """float32 [T, vocab] for a text or ids; with ``last`` [vocab], of the last position only.

        The cache is forgotten. RequestError for a bad id.
        """
        check({"last": flag}, {"last": last})
        ids = self._ids(prompt, "llm.logits")
        with self.engine.lock.hold("llm.logits"):
            pieces = list(self.engine.logits(ids, last))
        return pieces[0][0] if last else np.concatenate(pieces)

    def scopes(self) -> list[str]:
        """The scopes whose values `trace` can give, in the order in which a run makes them."""
        return list(self.engine.scope_values)

    def trace(
        self,
        prompt: Prompt,
        scopes: str | Iterable[str],
        patch: Mapping[str, Patch] | None = None,
    ) -> dict[str, np.ndarray]:
        """What modules return while ``prompt``, a text or ids, is read: arrays [T, ...] by scope.

        ``scopes``: names out of `scopes`, or patterns: ``*.mlp``; ``model.layers.3.*`` is the layer
        and all in it. A scope that runs several times has its last value. Values are those of this
        model as it is loaded, quantised activations included; a fused step that hides one is run in
        parts. ``patch``: scope or pattern -> function of a value (float32, [tokens, ...]) that
        returns what takes its place, of the same shape and dtype; all that follows reads that, and
        it is what is returned. A prompt is read in steps of at most 512 tokens (fewer where the
        values of a step are more than 256 MB), and a function is called once in each. The cache is
        forgotten. RequestError for an unknown scope, with the nearest names, or a bad replacement.
        """
        rules: dict[str, Rule] = {"scopes": texts, "patch": Optional(mapping)}
        own = check(rules, {"scopes": scopes, "patch": patch})
        ids = self._ids(prompt, "llm.trace")
        with self.engine.lock.hold("llm.trace"):
            return self._tracer.trace(ids, **own)

    @cached_property
    def _tracer(self) -> Tracer:
        return Tracer(self.engine)

    def profile(
        self,
        prompt: Prompt,
        decode: int = 64,
        repeat: int = 3,
        show: Progress = lambda what, done, total: None,
    ) -> Profile:
        """What reading ``prompt`` (a text or token ids) and ``decode`` tokens after it cost, step
        by step: ``repeat`` timed passes, in turns with passes that are not timed. No other request
        runs meanwhile. RequestError."""
        from ..profiler import capture

        rules: dict[str, Rule] = {"decode": Integer(), "repeat": Integer(1), "show": function}
        own = check(rules, {"decode": decode, "repeat": repeat, "show": show})
        ids = self._ids(prompt, "llm.profile")
        with self.engine.lock.hold("llm.profile"):
            return capture.profile(self, ids, **own)
