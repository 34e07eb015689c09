"""A loaded model: file, tokenizer, chat template, engine and placement."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from .. import backends as registry
from ..arguments import check, check_token_ids, invalid_argument
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..engine.engine import Engine
from ..errors import ModelFileError, RequestError
from ..model.batch import Limits
from ..model.decoder import Decoder
from ..runtime.executor import Executor, Progress
from ..runtime.gpu_offload import AUTO, GpuOffload
from .load import (
    DEFAULT_CONTEXT,
    DEFAULT_SEQUENCES,
    RULES,
    backend_options,
    build_decoder,
    executor_arguments,
    graph_limits,
    most_drafts,
    sized_limits,
)

if TYPE_CHECKING:
    from ..chat import ChatTemplate
    from ..compiler.plan import Plan
    from ..tokenizer import Tokenizer
    from ..tokenizer.languages import Languages
    from .seq2seq import Seq2Seq

# Maximum number of tokenizer entries without an embedding row. Gemma 3 has one, for images.
MAX_EXTRA_TOKENS = 16


M = TypeVar("M", bound="LoadedModel")


class LoadedModel:
    """A model with its tokenizer, placed on backends and ready to run. Create it with `load`.

    `close`, or the end of a ``with`` block, frees its memory.
    """

    # Attributes that `close` deletes.
    _freed: ClassVar[set[str]] = {
        "file", "decoder", "executor", "engine", "tokenizer", "languages", "seq2seq", "_template"
    }  # fmt: skip

    def __init__(
        self,
        file: Checkpoint,
        decoder: Decoder,
        executor_options: Mapping[str, Any],
        limits: Limits,
        chat_template: str | Path | None = None,
        owns_file: bool = False,
        kv_memory: int | str = "auto",
    ) -> None:
        """Place the model; `Engine.prepare` binds it, and `check_texts` opens the tokenizer.

        Args:
            file: the model file.
            decoder: decoder over the weights of the file.
            executor_options: keyword arguments of `Executor`.
            limits: limits of the graph; the model's own may be lower.
            chat_template: see `load`.
            owns_file: whether `close` closes the file, too.
            kv_memory: see `load`.

        Raises:
            ModelFileError: the tokenizer is invalid or does not match the embedding.
        """
        self._name = f"{file.architecture} {file.path}"
        self.file, self.decoder = file, decoder
        self._template_choice, self._owns_file = chat_template, owns_file
        self._template: ChatTemplate | None = None
        self.executor = Executor(self.decoder.weights, **executor_options)
        self.limits = sized_limits(decoder, self.executor, limits, kv_memory)
        self.seq2seq = self._seq2seq()
        self.engine = Engine(self.decoder, self.executor, self.limits)
        self.draft: LoadedModel | None = None
        self.load_s = 0.0

    def _seq2seq(self) -> Seq2Seq | None:
        """Return what makes the sequences of an encoder-decoder; None for a decoder."""
        if not self.decoder.max_source(self.limits):
            return None
        from .seq2seq import Seq2Seq

        return Seq2Seq(self.file, self.decoder, self.limits)

    def check_texts(self) -> None:
        """Report a tokenizer or a chat template that is invalid now, not at the first request.

        ModelFileError: see `LoadedModel`.
        """
        if self.file.has_vocabulary:
            tokens, rows = self.tokenizer.vocab_size, self.decoder.cfg.vocab
            if tokens > rows + MAX_EXTRA_TOKENS:
                raise ModelFileError(
                    f"{self.file.path}: the tokenizer has {tokens} tokens, the embedding {rows} "
                    "rows"
                )
        if self._template_choice is not None:
            _ = self.template

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer. ModelFileError: the file has none, or an invalid one."""
        return self.file.tokenizer()

    @cached_property
    def languages(self) -> Languages:
        """Languages of the tokenizer of an encoder-decoder. ModelFileError: as for `tokenizer`."""
        from ..tokenizer.languages import Languages
        from ..tokenizer.tokenizer_config import TokenizerDirectory

        if not self.file.path.is_dir():
            return Languages(self.tokenizer)
        return Languages.of(self.tokenizer, TokenizerDirectory(self.file.path))

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, with a BOS token if the model uses one."""
        if not isinstance(prompt, str):
            raise invalid_argument("prompt", prompt, "a string")
        return self.tokenizer.encode(prompt, add_special=True)

    def check_ids(self, ids: Iterable[int], name: str | None = None) -> None:
        """Raise RequestError if an id is not in the vocabulary; ``name``: argument that has it."""
        check_token_ids(ids, self.decoder.cfg.vocab, name)

    @classmethod
    def load(
        cls: type[M],
        model: str | Path | Checkpoint,
        *,
        model_def: str | Path | None = None,
        type: str | None = None,
        device: str = "auto",
        gpu_layers: int | str = "auto",
        context: int = DEFAULT_CONTEXT,
        max_sequences: int = DEFAULT_SEQUENCES,
        kv_memory: int | str = "auto",
        kv_type: str | None = None,
        linear: str = "auto",
        prefill: str = "auto",
        deterministic: bool = False,
        low_mem: bool = False,
        speculate: int | str = "off",
        draft: str | Path | Checkpoint | None = None,
        threads: int = 0,
        place: Mapping[str, str] | None = None,
        strict: bool = False,
        no_fuse: str | Sequence[str] = (),
        no_kernels: str | Sequence[str] = (),
        chat_template: str | Path | None = None,
        progress: Progress | None = None,
    ) -> M:
        """Load a model and prepare it to run.

        Args:
            model: a GGUF file, a Hugging Face directory, ``demo``, ``org/name`` of the Hugging Face
                hub, or an open `Checkpoint` such as a `RandomCheckpoint`.
            model_def: Python file that defines the model, instead of a built-in family.
            type: weight format to quantise float matrices to while loading, such as ``q8_0``.
            device: ``auto`` (for each op the first backend that supports it) or the name of a
                backend; ops that it does not support run on the backends after it.
            gpu_layers: number of layers to offload to the GPU, the last ones first; ``auto`` (as
                many as fit) or ``all``.
            context: maximum number of tokens of prompt and answer, at most the model's own limit.
            max_sequences: maximum number of requests that are computed at once; others wait.
            kv_memory: bytes of the KV cache, which all requests share; ``auto``: enough for
                ``max_sequences`` of full length, or half of the memory that the weights leave free.
            kv_type: dtype of the KV cache: f32, f16, q8_0, q4_0 or fp8; f16 by default
                (f32 on the reference backend).
            linear: matrix products with quantised weights: ``integer`` (activations are quantised,
                too), ``float``, or ``auto``.
            prefill: ``fp8`` multiplies e4m3 in plans for more than 256 tokens, as those of prompts,
                on GPUs of compute capability 8.9 and newer: faster (measured on 9.0 alone) and less
                exact, see docs/quality.md. A copy of the matrices takes one byte per element.
            deterministic: give a request the same bits in any batch on CUDA, too, at the price that
                docs/reproducibility.md states; the CPU always does.
            low_mem: leave the experts of a mixture in the mapped file and pack them anew for each
                use, on the CPU only: slower, but they need no memory of their own, and the
                system can drop their pages.
            speculate: maximum number of draft tokens of a decode step, which are predicted from the
                sequences themselves; ``off``, or ``auto``: as many as the measured times of steps
                make worth while, often none. Answers stay the same; on CUDA, logits may differ in
                their last bits, as in other batches, without ``deterministic``.
            draft: a smaller model with the same vocabulary, which predicts the draft tokens
                instead; ``speculate`` is then ``auto`` unless it is a number.
            threads: number of CPU threads; 0 uses every performance core.
            place: backends by scope pattern: ``{"model.layers.3.*": "cpu"}``.
            strict: raise PlacementError if an op does not run on the first usable backend.
            no_fuse: names of fusion rules to disable, or ``all``.
            no_kernels: kernels to disable, such as ``cuda:softmax``.
            chat_template: a Jinja2 file or one of gemma, chatml, llama3, mistral, phi3, zephyr;
                the model's own template by default.
            progress: called with (description, amount done, total) while the model loads.

        Returns:
            The loaded model.

        Raises:
            RequestError: invalid argument.
            ModelFileError: invalid or unsupported model file.
            ConfigError: missing, unknown or invalid configuration key.
            PlacementError: the device cannot be used, or an op cannot be placed as requested.
            OutOfMemory: not enough memory for the weights, the KV cache or the buffers.
        """
        start = time.perf_counter()
        own = check(RULES, {name: value for name, value in locals().items() if name in RULES})
        if own["draft"] is not None and own["speculate"] == "off":
            own["speculate"] = "auto"
        options = backend_options(own)
        executor = executor_arguments(own, options, progress)
        drafting = None
        if own["draft"] is not None:
            from .draft import draft_arguments

            drafting = LoadedModel.load(own["draft"], **draft_arguments(own))
        file = open_checkpoint(model)
        decoder = build_decoder(file, model_def, type, executor["backends"], options)
        limits = graph_limits(own["context"], kv_type, device, own["max_sequences"])
        limits = replace(limits, drafts=most_drafts(own["speculate"]))
        owns = file is not model
        llm = cls(file, decoder, executor, limits, chat_template, owns, own["kv_memory"])
        llm.engine.offload_layers(own["gpu_layers"])
        llm.draft = drafting
        draft_plans = llm._speculate(own["speculate"] == "auto") if limits.drafts else []
        for plan in draft_plans:  # before others are bound, which would be undone
            llm.executor.reserve(plan)
        # Conversion of weights can be interrupted in the main thread only.
        llm.engine.prepare(ahead=own["type"] is None, meanwhile=llm.check_texts)
        for plan in draft_plans:
            llm.executor.bind(plan)
        llm.load_s = time.perf_counter() - start
        return llm

    def _speculate(self, auto: bool) -> list[Plan]:
        """Let the engine speculate; return the plans of one sequence with its draft tokens.

        ``auto``: choose their number in each step. RequestError: the model is an encoder-decoder.
        """
        from .draft import check_vocabularies, start_speculation

        for each, option in ((self, "speculate"), (self.draft, "draft")):
            if each is not None and each.seq2seq is not None:
                raise RequestError("an encoder-decoder does not speculate", option)
        engine, drafts = self.engine, self.limits.drafts
        drafter = None
        if self.draft is not None:
            from ..engine.draft_model import DraftModel

            check_vocabularies(self, self.draft)
            drafter = DraftModel(self.draft.engine, drafts)
        return start_speculation(engine, 0 if auto else drafts, drafter)

    # -- chat template
    @property
    def template(self) -> ChatTemplate:
        """The chat template: the argument of `load`, or the model's own.

        RequestError: there is none. ModelFileError: it is invalid.
        """
        if self._template is None:
            from ..chat import find_template, template_tokens

            own, tokens = self.file.chat_template, template_tokens(self.tokenizer)
            self._template = find_template(self._template_choice, own, str(self.file.path), tokens)
        return self._template

    @property
    def has_template(self) -> bool:
        """Whether the model file has a chat template."""
        return bool(self.file.chat_template)

    @property
    def template_file(self) -> Path | None:
        """The file of the chat template; None for the model's own, or a built-in one."""
        from ..chat.builtin_templates import TEMPLATES

        choice = self._template_choice
        return None if choice is None or str(choice) in TEMPLATES else Path(choice)

    # -- placement
    @property
    def device(self) -> str:
        """Name of the first usable backend."""
        return self.executor.backends[0].name

    def placement(self) -> dict[str, dict[str, int]]:
        """Return the number of steps of the decode plan by backend and op."""
        counts: dict[str, dict[str, int]] = {}
        for step in self.engine.decode_plan().steps:
            ops = counts.setdefault(step.backend.name, {})
            ops[step.node.op] = ops.get(step.node.op, 0) + 1
        return counts

    def misses(self) -> list[str]:
        """Return one line for each op that missed the first backend, with the reason, and one for
        each pair of memories that a decode step copies between."""
        plans = [("token", self.engine.decode_plan())]
        plans += [("source", plan) for plan in self.engine.source_plans()]
        lines = []
        for what, plan in plans:
            lines += [
                f"{op} ran on {backend} ({count} steps per {what}): {why}"
                for (op, backend, why), count in plan.misses().items()
            ]
            lines += [f"a {what} needs {copies}" for copies in plan.copies()]
        return lines

    @property
    def gpu_offload(self) -> GpuOffload | None:
        """Layers offloaded to a device with its own memory; None without such a device."""
        return self.engine.gpu_offload

    def notes(self) -> list[str]:
        """Return notes for the user on tokenizer, quantisation and placement, one line each."""
        skipped, requested = self.executor.skipped.items(), self.engine.requested_gpu_layers
        lines = list(self.tokenizer.notes) if self.file.has_vocabulary else []
        lines += [
            f"{name} is not used: {why}" for name, why in skipped if registry.find(name).expected()
        ]
        if self.executor.options.low_mem and not self.decoder.cfg.moe:
            lines.append("low_mem has no effect: the model has no experts")
        lines += getattr(self.decoder.weights.source, "notes", list)()  # of `QuantizedWeights`
        if self.gpu_offload:
            return [*lines, str(self.gpu_offload)]
        if requested != AUTO:
            why = f"{self.device} uses host memory"
            lines.append(f"gpu_layers = {requested} has no effect: {why}")
        return lines

    # -- lifetime
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return "engine" not in vars(self)

    def close(self) -> None:
        """Wait for the running request, then free weights, KV cache and buffers.

        Afterwards any use of the model, unfinished streams included, raises RequestError. May be
        called more than once.
        """
        if self.closed:
            return
        engine = self.engine
        with engine.lock.hold("llm.close"):
            engine.close()
            file = self.file
            # First what `closed` and cached properties look for: other threads may use the rest.
            del self.engine, self.file
            for name in self._freed & vars(self).keys():
                delattr(self, name)
            if self._owns_file:
                file.close()
        engine.worker.join()
        if self.draft is not None:
            self.draft.close()

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self.closed:
            return f"<{kind} {self._name}, closed>"
        return f"<{kind} {self._name}, context {self.limits.context}, on {self.device}>"

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"an {kind} cannot be pickled or copied; load the model in each process")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Report the attributes that `close` has deleted."""
            if name in self._freed and self.closed:
                raise RequestError("the model is closed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
