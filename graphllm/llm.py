"""A loaded model: text in, text or logits out."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import backends as registry
from . import fusion
from .backends import Options
from .batch import Limits
from .decoder import Decoder
from .dtype import CACHED
from .errors import ModelFileError, PlacementError, RequestError
from .executor import Executor, Progress
from .fit import AUTO, Fit, checked
from .generation.answer import answer
from .generation.engine import Engine, Seen
from .generation.request import Completion, Sampling
from .generation.trace import Patch, Tracer
from .profiler.rows import Recorder
from .weights.files import ModelFile, open_model

if TYPE_CHECKING:
    from .chat import ChatTemplate, Conversation
    from .profiler.profile import Profile
    from .tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
# Tokens that a tokenizer may have beyond the embedding's rows: Gemma 3's has one, for pictures.
MORE_TOKENS = 16


def decoder_for(
    file: ModelFile, model_def: str | Path | None = None, kind: str | None = None,
    backends: Sequence[str] | None = None, options: Options | None = None,
) -> Decoder:  # fmt: skip
    """The family's decoder over the file's weights, quantised to ``kind`` by one of the backends.

    ModelFileError for an unknown family, ConfigError for a key that it does not know.
    """
    from . import models

    family = file.family() if model_def is None else models.own(model_def)
    keys = file.keys(family)
    config = family.config(keys)
    keys.finish()
    weights = file.weights(family, config)
    if kind is not None:
        from .weights.requantise import Quantised

        router = f".{config.names.router}.weight"  # small, and what it decides is delicate
        weights = Quantised(weights, kind, lambda name: name.endswith(router), backends, options)
    return family.model(config, weights)


class LLM:
    """A model with its tokenizer, ready to run. Made by `load`; one request at a time."""

    def __init__(
        self,
        file: ModelFile,
        decoder: Decoder,
        executor_options: Mapping[str, Any],
        limits: Limits,
        chat_template: str | Path | None = None,
    ) -> None:
        self.file, self.decoder = file, decoder
        self._template_choice = chat_template
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
        return self.tokenizer.encode(prompt, add_special=True)

    def stream(self, prompt: str, seen: Seen | None = None, **sampling: Any) -> Iterator[str]:
        """The continuation of ``prompt``, piece by piece; keywords as in `Sampling`."""
        yield from self.complete(prompt, Sampling(**sampling), Completion(), seen)

    @overload
    def generate(self, prompt: str, seen: Seen | None = None, **sampling: Any) -> Completion: ...
    @overload
    def generate(
        self, prompt: Sequence[str], seen: Seen | None = None, **sampling: Any
    ) -> list[Completion]: ...
    def generate(
        self, prompt: str | Sequence[str], seen: Seen | None = None, **sampling: Any
    ) -> Completion | list[Completion]:
        """The continuation of ``prompt``; keywords as in `Sampling`. RequestError if one is bad.

        Of several prompts: a list of their continuations, made one after another.
        """
        if not isinstance(prompt, str):
            return [self.generate(each, seen, **sampling) for each in prompt]
        done = Completion()
        for _ in self.complete(prompt, Sampling(**sampling), done, seen):
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
    ) -> Iterator[str]:
        """Pieces of text; ``done`` is filled in on the way and is whole when the last is out.

        ``prompt``: a text, or token ids. ``ends``: the ids that end the answer, the model's end
        tokens by default.
        """
        sampling = sampling.checked()
        done.seed = sampling.seed or 0
        done.prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_ids([*done.prompt_ids, *sampling.stop_ids])
        done.timings.load_s = self.load_s
        ends = self.tokenizer.eog_ids if ends is None else ends
        yield from answer(self.engine, self.tokenizer, sampling, done, ends, seen, profile)

    def check_ids(self, ids: Iterable[int]) -> None:
        """RequestError names an id that the model does not have."""
        vocab = self.decoder.cfg.vocab
        for token in ids:
            if not 0 <= token < vocab:
                raise RequestError(f"token id {token} is not in 0..{vocab - 1}")

    # -- chat
    @property
    def template(self) -> ChatTemplate:
        """The chat template: the one asked for at load, or the model's own. RequestError if none.

        ModelFileError when it is no valid template.
        """
        if self._template is None:
            from .chat import find_template, template_tokens

            own, tokens = self.file.chat_template, template_tokens(self.tokenizer)
            self._template = find_template(self._template_choice, own, str(self.file.path), tokens)
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether the file brings a chat template."""
        return bool(self.file.chat_template)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], seen: Seen | None = None, **sampling: Any
    ) -> Completion:
        """The answer to ``messages``; keywords as in `Sampling`.

        messages: mappings with ``role`` and ``content``; special tokens in them are text (see
        `encode_chat`). What they have in common with the last request is not computed again.
        """
        done = Completion()
        for _ in self.complete(self.encode_chat(messages), Sampling(**sampling), done, seen):
            pass
        return done

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], seen: Seen | None = None, **sampling: Any
    ) -> Iterator[str]:
        """As `chat`, piece by piece."""
        ids = self.encode_chat(messages)
        yield from self.complete(ids, Sampling(**sampling), Completion(), seen)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """The prompt that asks for the next answer, as ids; ``variables`` (``tools``) are the
        template's. Only what the template itself writes becomes control tokens. ``parse_special``:
        their texts in messages do, too, so that a message can end its turn and open another."""
        from .chat import encode_chat

        prompt = self.template.prompt(messages, **variables)
        return encode_chat(self.tokenizer, prompt, parse_special)

    def conversation(
        self, system: str | None = None, seen: Seen | None = None, parse_special: bool = False,
        **sampling: Any,
    ) -> Conversation:  # fmt: skip
        """A chat in turns, each of which computes its new tokens only; keywords as in `Sampling`.

        for piece in conversation.ask("Hello"): print(piece, end="")  # parse_special: encode_chat
        """
        from .chat import Conversation

        wanted = Sampling(**sampling).checked()
        if "seed" not in sampling:
            wanted = replace(wanted, seed=None)  # each answer draws its own

        def answered(ids: list[int], done: Completion) -> Iterator[str]:
            return self.complete(ids, wanted, done, seen)

        return Conversation(self.template, self.tokenizer, answered, system, parse_special)

    # -- numbers
    def logits(self, ids: Sequence[int], last: bool = False) -> np.ndarray:
        """float32 [T, vocab] for the ids; with ``last`` [vocab], of the last position only."""
        self.check_ids(ids)
        pieces = list(self.engine.logits(list(ids), last))
        return pieces[0][0] if last else np.concatenate(pieces)

    def scopes(self) -> list[str]:
        """The scopes whose values `trace` can give, in the order in which a run makes them."""
        return list(self.engine.values)

    def trace(
        self,
        prompt: str | Sequence[int],
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
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_ids(ids)
        return self._tracer.trace(ids, scopes, patch)

    @cached_property
    def _tracer(self) -> Tracer:
        return Tracer(self.engine)

    def profile(
        self,
        prompt: str | Sequence[int],
        decode: int = 64,
        repeat: int = 3,
        show: Progress = lambda what, done, total: None,
    ) -> Profile:
        """What reading ``prompt`` (a text or token ids) and ``decode`` tokens after it cost, step
        by step: ``repeat`` timed passes, in turns with passes that are not timed. RequestError."""
        from .profiler import measure

        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return measure.profile(self, ids, decode, repeat, show)

    @property
    def device(self) -> str:
        """The first usable backend."""
        return self.executor.backends[0].name

    def placement(self) -> dict[str, dict[str, int]]:
        """Steps of one token, by backend and op."""
        counts: dict[str, dict[str, int]] = {}
        for step in self.engine.decode_plan().steps:
            ops = counts.setdefault(step.backend.name, {})
            ops[step.node.op] = ops.get(step.node.op, 0) + 1
        return counts

    def misses(self) -> list[str]:
        """A line for each kind of op that missed the first backend, with the reason; then one for
        what is copied between memories."""
        plan = self.engine.decode_plan()
        lines = [
            f"{op} ran on {backend} ({count} steps a token): {why}"
            for (op, backend, why), count in plan.misses().items()
        ]
        return lines + [f"a token needs {copies}" for copies in plan.copies()]

    @property
    def fit(self) -> Fit | None:
        """How many layers went to a device with a memory of its own; None without one."""
        return self.engine.fitted

    def notes(self) -> list[str]:
        """What a user should know of where the model went, a line each."""
        skipped, asked = self.executor.skipped.items(), self.engine.asked
        lines = [
            f"{name} is not used: {why}" for name, why in skipped if registry.find(name).wanted()
        ]
        lines += getattr(self.decoder.weights.source, "notes", list)()  # of quantised ones
        lines += self.tokenizer.notes if self.file.has_vocabulary else ()
        if self.fit:
            return [*lines, str(self.fit)]
        if asked != AUTO:
            why = f"{self.device} works in the host's memory"
            lines.append(f"gpu_layers = {asked} has no effect: {why}")
        return lines


def options_from(
    context: int,
    kv_type: str | None,
    linear: str,
    threads: int,
    no_fuse: Sequence[str],
    no_kernels: Sequence[str],
) -> Options:
    """What `load` was asked for, as `Options`. RequestError names a bad value."""
    if linear not in ("auto", "integer", "float"):
        raise RequestError(f"linear = {linear!r} must be auto, integer or float")
    if kv_type not in (None, *CACHED):
        known = f"{', '.join(CACHED[:-1])} or {CACHED[-1]}"
        raise RequestError(f"kv_type = {kv_type!r} must be {known}")
    if not isinstance(context, int) or not isinstance(threads, int):
        raise RequestError(f"context = {context!r} and threads = {threads!r} must be whole numbers")
    if context < 1:
        raise RequestError(f"context = {context} must be at least 1")
    if threads < 0:
        raise RequestError(f"threads = {threads} must be at least 0")
    fusion.check_names(no_fuse)
    registry.check_switches(no_kernels)
    return Options(linear, threads, tuple(no_fuse), tuple(no_kernels))


def limits_from(context: int, kv_type: str | None, device: str) -> Limits:
    """What a graph is built for, of one sequence."""
    return Limits(context=context, kv_dtype=kv_type or ("f32" if device == "reference" else "f16"))


def load(
    model: str | Path | ModelFile,
    *,
    model_def: str | Path | None = None,
    type: str | None = None,
    device: str = "auto",
    gpu_layers: int | str = "auto",
    context: int = DEFAULT_CONTEXT,
    kv_type: str | None = None,
    linear: str = "auto",
    threads: int = 0,
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    no_fuse: Sequence[str] = (),
    no_kernels: Sequence[str] = (),
    chat_template: str | Path | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a model: a GGUF file, a Hugging Face directory, ``demo``, or an open file
    (`weights.random.RandomFile`, say).

    ``model_def``: a model file of your own instead of one of `graphllm.models`. ``type``: the
    format, as ``q8_0``, that matrices of floats are quantised to on the way. ``device``:
    ``auto`` (the first backend that can run each op) or one backend's name, with those behind it
    that come later in the order. ``gpu_layers``: how many layers, the last and the output first, go
    to a device with a memory of its own: ``auto`` (what fits), ``all``, or a number. ``context``:
    tokens of prompt and answer, at most the model's own. ``linear``: ``auto``, ``integer`` or
    ``float`` (activations are not quantised). ``place`` pins sites by scope pattern:
    ``{"model.layers.3.*": "cpu"}``. ``no_fuse``: fusion rules to leave out, or ``all``;
    ``no_kernels``: kernels, as ``cuda:softmax``. ``chat_template``: instead of the model's own, a
    file's or one of gemma, chatml, llama3, mistral, phi3, zephyr. ModelFileError, ConfigError,
    PlacementError and OutOfMemory say in a line what is wrong.
    """
    start = time.perf_counter()
    options = options_from(context, kv_type, linear, threads, no_fuse, no_kernels)
    usable, reason = (True, "") if device == "auto" else registry.find(device).available()
    if not usable:
        raise PlacementError(f"device = {device!r} (--device) cannot be used: {reason}")
    wanted = checked(gpu_layers)
    file = open_model(model) if isinstance(model, (str, Path)) else model
    limits = limits_from(context, kv_type, device)
    order = None if device == "auto" else registry.behind(device)
    executor = {
        "backends": order,
        "options": options,
        "pins": place,
        "strict": strict,
        "progress": progress,
    }
    decoder = decoder_for(file, model_def, type, order, options)
    llm = LLM(file, decoder, executor, limits, chat_template)
    if chat_template is not None:
        _ = llm.template  # a bad one is told now
    llm.engine.fit(wanted)
    llm.engine.prepare()
    llm.load_s = time.perf_counter() - start
    return llm
