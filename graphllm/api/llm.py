"""A loaded model: text in, text or logits out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from ..arguments import (
    Optional,
    Rule,
    Whole,
    by_text,
    check,
    flag,
    function,
    refused,
    shown,
    texts,
    whole_number,
)
from ..checkpoints.model_file import ModelFile
from ..engine.engine import Engine, Seen
from ..engine.request import Completion, Sampling
from ..engine.stop_conditions import answer
from ..engine.trace import Patch, Tracer
from ..errors import ModelFileError, RequestError
from ..model.decoder import Decoder
from ..model.inputs import Limits
from ..profiler.record import Recorder
from ..runtime.executor import Executor, Progress
from .placement_report import Placed
from .prompts import Prompt, one_or_more, one_prompt

if TYPE_CHECKING:
    from ..chat import ChatTemplate, Conversation, Message
    from ..profiler.profile import Profile
    from ..tokenizer import Tokenizer

# Tokens that a tokenizer may have beyond the embedding's rows: Gemma 3's has one, for pictures.
MORE_TOKENS = 16
# What an LLM lets go of when it is closed.
_HELD = {"file", "decoder", "executor", "engine", "tokenizer", "_template", "_tracer"}


class LLM(Placed):
    """A model with its tokenizer, ready to run; made by `load`.

    Requests of several threads wait for each other, and each gets the answer that it gets alone. A
    stream owns the model while it is read. One that nobody continues gives it up to a request that
    waits, and computes its tokens again if it goes on. A request from a callback of a running one
    is a RequestError. `close`, or the end of a ``with`` block, frees the memory; after that all but
    `close` is a RequestError.
    """

    def __init__(
        self,
        file: ModelFile,
        decoder: Decoder,
        executor_options: Mapping[str, Any],
        limits: Limits,
        chat_template: str | Path | None = None,
        owns_file: bool = False,
    ) -> None:
        """``executor_options``: of the `Executor`. ``owns_file``: `close` closes the file, too."""
        self._name = f"{file.architecture} {file.path}"
        self.file, self.decoder = file, decoder
        self._template_choice, self._owns_file = chat_template, owns_file
        self._template: ChatTemplate | None = None
        self.limits = self.decoder.limits(limits)
        if file.has_vocabulary:  # a bad one is told now
            tokens, rows = self.tokenizer.vocab_size, decoder.cfg.vocab
            if tokens > rows + MORE_TOKENS:
                raise ModelFileError(
                    f"{file.path}: the tokenizer has {tokens} tokens, the embedding {rows} rows"
                )
        self.executor = Executor(self.decoder.weights, **executor_options)
        self.engine = Engine(self.decoder, self.executor, self.limits)
        self.load_s = 0.0

    # -- text
    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. ModelFileError where it has none, or a bad one."""
        return self.file.tokenizer()

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids, with the begin-of-text token if the model wants one."""
        if not isinstance(prompt, str):
            raise refused("prompt", prompt, "a text")
        return self.tokenizer.encode(prompt, add_special=True)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD. RequestError for an id out of range.

        ``skip_special`` leaves out control tokens.
        """
        known = one_or_more(ids, "llm.decode") or []
        if not isinstance(known, list):
            raise refused("ids", ids, "token ids")
        own = check({"skip_special": flag}, {"skip_special": skip_special})
        self.check_ids(known)
        return self.tokenizer.decode(known, **own)

    def stream(self, prompt: Prompt, seen: Seen | None = None, **sampling: Any) -> Iterator[str]:
        """The continuation of ``prompt``, a text or token ids, piece by piece; keywords as in
        `Sampling`. RequestError where one is bad, or the model has no tokenizer."""
        wanted = Sampling.of("llm.stream", sampling)
        _ = self.tokenizer  # without one there is nothing to yield
        one = one_prompt(prompt, "llm.stream")
        return self._answered(one, wanted.seeded(), Completion(), seen)

    @overload
    def generate(self, prompt: Prompt, seen: Seen | None = None, **sampling: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], seen: Seen | None = None, **sampling: Any
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], seen: Seen | None = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """The continuation of ``prompt``, a text or token ids; keywords as in `Sampling`.

        Of several prompts: a list of their continuations, made one after another. Without a
        tokenizer prompts are ids, and completions have no text. RequestError names a bad argument.
        """
        wanted = Sampling.of("llm.generate", sampling)
        found = one_or_more(prompt, "llm.generate")
        if not isinstance(found, tuple):
            return self._whole(found, wanted, seen)
        return [self._whole(one, wanted, seen) for one in found]

    def _whole(self, prompt: str | list[int], wanted: Sampling, seen: Seen | None) -> Completion:
        done = Completion()
        for _ in self._answered(prompt, wanted.seeded(), done, seen, whole=True):
            pass
        return done

    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        done: Completion,
        seen: Seen | None = None,
        profile: tuple[Recorder, Recorder] | None = None,
        ends: Collection[int] | None = None,
        whole: bool = False,
    ) -> Iterator[str]:
        """Pieces of text; ``done`` is filled in on the way and is whole when the last is out.

        ``prompt``: a text, or token ids. ``ends``: the ids that end the answer, the model's end
        tokens by default. ``whole``: no other request runs before this one is over, however slowly
        pieces are taken.
        """
        return self._answered(prompt, sampling.checked(), done, seen, profile, ends, whole)

    def _answered(
        self, prompt: str | Sequence[int], sampling: Sampling, done: Completion, seen: Seen | None,
        profile: tuple[Recorder, Recorder] | None = None, ends: Collection[int] | None = None,
        whole: bool = False,
    ) -> Iterator[str]:  # fmt: skip
        """`complete`, of a request that is checked and has its seed."""
        check({"seen": Optional(function)}, {"seen": seen})
        done.seed = sampling.seed or 0
        done.prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_ids([*done.prompt_ids, *sampling.stop_ids])
        done.timings.load_s = self.load_s
        tokenizer = self.tokenizer if self.file.has_vocabulary else None
        if sampling.stop and tokenizer is None:
            raise RequestError(f"stop = {shown(sampling.stop)} needs a tokenizer; stop_ids do not")
        ends = self._ends() if ends is None else ends
        yield from answer(self.engine, tokenizer, sampling, done, ends, seen, profile, whole)

    def _ends(self) -> Collection[int]:
        """The ids that end an answer of this model, as far as its file tells."""
        if self.file.has_vocabulary:
            return self.tokenizer.eog_ids
        stated = getattr(self.file, "end_ids", None)
        return stated(self.decoder.cfg.vocab) if stated is not None else ()

    def check_ids(self, ids: Iterable[int]) -> None:
        """RequestError names an id that the model does not have."""
        vocab = self.decoder.cfg.vocab
        for token in ids:
            if whole_number(token) is None or not 0 <= token < vocab:
                raise RequestError(f"token id {shown(token)} is not in 0..{vocab - 1}")

    def _ids(self, prompt: Prompt, where: str) -> list[int]:
        """The ids of one prompt, a text or ids. RequestError."""
        found = one_prompt(prompt, where)
        ids = self.encode(found) if isinstance(found, str) else found
        self.check_ids(ids)
        return ids

    # -- chat
    @property
    def template(self) -> ChatTemplate:
        """The chat template: the one asked for at load, or the model's own. RequestError if none.

        ModelFileError when it is no valid template.
        """
        if self._template is None:
            from ..chat import find_template, template_tokens

            own, tokens = self.file.chat_template, template_tokens(self.tokenizer)
            self._template = find_template(self._template_choice, own, str(self.file.path), tokens)
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether the file brings a chat template."""
        return bool(self.file.chat_template)

    def chat(
        self, messages: Sequence[Message], seen: Seen | None = None, **sampling: Any
    ) -> Completion:
        """The answer to ``messages``; keywords as in `Sampling`.

        messages: mappings with ``role`` and ``content``, a text or a list of text parts
        (``{"type": "text", "text": ...}``); special tokens in them are text (see `encode_chat`).
        What they have in common with the last request is not computed again.
        """
        wanted = Sampling.of("llm.chat", sampling)
        return self._whole(self.encode_chat(messages), wanted, seen)

    def chat_stream(
        self, messages: Sequence[Message], seen: Seen | None = None, **sampling: Any
    ) -> Iterator[str]:
        """As `chat`, piece by piece."""
        wanted = Sampling.of("llm.chat_stream", sampling)
        return self._answered(self.encode_chat(messages), wanted.seeded(), Completion(), seen)

    def encode_chat(
        self, messages: Sequence[Message], parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """The prompt that asks for the next answer, as ids; ``variables`` (``tools``) are the
        template's. Only what the template itself writes becomes control tokens. ``parse_special``:
        their texts in messages do, too, so that a message can end its turn and open another."""
        from ..chat import encode_chat, normalize_messages

        own = check({"parse_special": flag}, {"parse_special": parse_special})
        plain = normalize_messages(messages, "llm.chat")
        return encode_chat(self.tokenizer, self.template.prompt(plain, **variables), **own)

    def conversation(
        self, system: str | None = None, seen: Seen | None = None, parse_special: bool = False,
        **sampling: Any,
    ) -> Conversation:  # fmt: skip
        """A chat in turns, each of which computes its new tokens only; keywords as in `Sampling`.

        for piece in conversation.ask("Hello"): print(piece, end="")  # parse_special: encode_chat
        """
        from ..chat import Conversation

        check({"parse_special": flag}, {"parse_special": parse_special})
        if not isinstance(system, (str, type(None))):
            raise refused("system", system, "a text")
        wanted = Sampling.of("llm.conversation", sampling)

        def answered(ids: list[int], done: Completion) -> Iterator[str]:
            return self._answered(ids, wanted.seeded(), done, seen)

        return Conversation(self.template, self.tokenizer, answered, system, parse_special)

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
        return list(self.engine.values)

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
        rules: dict[str, Rule] = {"scopes": texts, "patch": Optional(by_text)}
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
        from ..profiler import measure

        rules: dict[str, Rule] = {"decode": Whole(), "repeat": Whole(1), "show": function}
        own = check(rules, {"decode": decode, "repeat": repeat, "show": show})
        ids = self._ids(prompt, "llm.profile")
        with self.engine.lock.hold("llm.profile"):
            return measure.profile(self, ids, **own)

    def notes(self) -> list[str]:
        """What a user should know of the tokenizer and of where the model went, a line each."""
        own = self.tokenizer.notes if self.file.has_vocabulary else ()
        return [*own, *super().notes()]

    # -- its end
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return "engine" not in vars(self)

    def close(self) -> None:
        """Free weights, cache and buffers now, after the request that runs. May be called again.

        Streams that are left half way end in a RequestError when they are continued.
        """
        if self.closed:
            return
        with self.engine.lock.hold("llm.close"):
            self.engine.close()
            file = self.file
            for name in _HELD & vars(self).keys():
                delattr(self, name)
            if self._owns_file:
                file.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<LLM {self._name}, closed>"
        return f"<LLM {self._name}, context {self.limits.context}, on {self.device}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied; load the model in each process")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """What `close` has let go of is missing."""
            if name in _HELD and self.closed:
                raise RequestError("the model is closed")
            raise AttributeError(f"'LLM' object has no attribute {name!r}")
