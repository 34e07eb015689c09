"""`LLM`, the public class: generation, chat, logits, tracing and profiling of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

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
    path,
    texts,
    token_ids,
)
from ..engine.completion import Completion
from ..engine.engine import PrefillCallback
from ..engine.request import Sampling
from ..errors import RequestError
from ..model.batch import source_length
from ..runtime.executor import Progress
from .prompts import Prompt, check_one_sample, parse_prompt, parse_prompts
from .text_generator import TextGenerator

if TYPE_CHECKING:
    import os

    from ..chat import Conversation, Message
    from ..engine.trace import Patch, Tracer
    from ..profiler.profile import Profile
    from ..quality.divergence_report import Divergence
    from ..quality.perplexity import Perplexity


class LLM(TextGenerator):
    """A model with its tokenizer, ready to run. Create it with `load`.

    Requests of several threads run as one batch, and each returns what it returns alone. A stream
    that is not consumed goes on while other requests run, up to its last token. A request from a
    callback within a step (a patch of `trace`, the progress of `profile`) raises RequestError.
    `close`, or the end of a ``with`` block, frees the memory; afterwards every method but `close`
    raises RequestError.
    """

    _freed: ClassVar[set[str]] = TextGenerator._freed | {"_tracer"}

    # -- text
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD.

        ``skip_special`` omits control tokens. RequestError: an id is not in the vocabulary.
        """
        known = parse_prompts(ids, "llm.decode") or []
        if not isinstance(known, list):
            raise invalid_argument("ids", ids, "token ids")
        own = check({"skip_special": flag}, {"skip_special": skip_special})
        self.check_ids(known)
        return self.tokenizer.decode(known, **own)

    # -- chat
    def chat(
        self, messages: Sequence[Message], seen: PrefillCallback | None = None, **sampling: Any
    ) -> Completion:
        """Answer a list of chat messages.

        Tokens that the rendered chat shares with the last request are not computed again.

        Args:
            messages: mappings with ``role`` and ``content``, a string or a list of text parts
                (``{"type": "text", "text": ...}``). Special tokens in them are encoded as text;
                see `encode_chat`.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of the prefill.
            **sampling: fields of `Sampling`, or ``sampling=``, a `Sampling` that they override.

        Raises:
            RequestError: invalid argument or message, or the model has no chat template.
        """
        settings = Sampling.from_arguments("llm.chat", sampling)
        return self._complete_all([self.encode_chat(messages)], [settings], seen)[0]

    def chat_stream(
        self, messages: Sequence[Message], seen: PrefillCallback | None = None, **sampling: Any
    ) -> Iterator[str]:
        """As `chat`, but yield the text piece by piece."""
        settings = Sampling.from_arguments("llm.chat_stream", sampling).with_seed()
        check_one_sample(settings, "llm.chat_stream")
        return self._stream_completion(self.encode_chat(messages), settings, Completion(), seen)

    def encode_chat(
        self, messages: Sequence[Message], parse_special: bool = False, **variables: Any
    ) -> list[int]:
        """Render messages with the chat template and return the token ids of the prompt.

        Args:
            messages: see `chat`.
            parse_special: encode special tokens written out in messages as control tokens, so that
                a message can end its turn and begin another. By default only text of the template
                itself becomes control tokens.
            **variables: variables of the template, such as ``tools``.

        Raises:
            RequestError: invalid message, or the template rejects the messages.
        """
        from ..chat import encode_chat, normalize_messages

        own = check({"parse_special": flag}, {"parse_special": parse_special})
        plain = normalize_messages(messages, "llm.chat")
        return encode_chat(self.tokenizer, self.template.render_prompt(plain, **variables), **own)

    def conversation(
        self, system: str | None = None, seen: PrefillCallback | None = None,
        parse_special: bool = False, **sampling: Any,
    ) -> Conversation:  # fmt: skip
        """Begin a multi-turn chat, in which each turn computes only its new tokens.

        Example: ``for text in conversation.ask("Hello"): print(text, end="")``

        Args:
            system: system message.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of a prefill.
            parse_special: see `encode_chat`.
            **sampling: fields of `Sampling`, or ``sampling=``, a `Sampling` that they override.

        Raises:
            RequestError: invalid argument, or the model has no chat template.
        """
        from ..chat import Conversation

        check({"parse_special": flag}, {"parse_special": parse_special})
        if not isinstance(system, (str, type(None))):
            raise invalid_argument("system", system, "a string")
        settings = Sampling.from_arguments("llm.conversation", sampling)
        check_one_sample(settings, "llm.conversation")

        def answer(ids: list[int], completion: Completion) -> Iterator[str]:
            return self._stream_completion(ids, settings.with_seed(), completion, seen)

        return Conversation(self.template, self.tokenizer, answer, system, parse_special)

    def _ids(self, prompt: Prompt, where: str) -> list[int]:
        """Return the checked token ids of one prompt. RequestError: invalid prompt."""
        found = parse_prompt(prompt, where)
        ids = self.encode(found) if isinstance(found, str) else found
        self.check_ids(ids)
        return ids

    # -- quality
    def perplexity(
        self,
        text: Prompt,
        context: int = 512,
        chunks: int | None = None,
        save_base: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> Perplexity:
        """Return the perplexity of a text, with the meaning of llama.cpp's perplexity tool.

        The text is cut into chunks of ``context`` tokens; the tokens after the first one of the
        second half of each chunk are predicted. Short chunks are computed several at a time, at
        most ``max_sequences`` of `load`. No other request runs meanwhile.

        Args:
            text: a text or token ids, at least two chunks.
            context: tokens of a chunk, at most the context that the model was loaded with.
            chunks: maximum number of chunks; all by default.
            save_base: file for the log-probabilities of all tokens, see `kl_divergence`. An
                existing file is replaced.
            progress: called with (chunks done, chunks, perplexity so far).

        Raises:
            RequestError: invalid argument, or the file cannot be written.
            NumericError: the logits are not finite.
        """
        from ..quality import perplexity as measured

        rules: dict[str, Rule] = {
            "context": Integer(measured.MIN_CONTEXT), "chunks": Optional(Integer(1)),
            "save_base": Optional(path), "progress": Optional(function),
        }  # fmt: skip
        own = check(rules, {"context": context, "chunks": chunks, "save_base": save_base,
                            "progress": progress})  # fmt: skip
        show = own["progress"] or measured.no_progress
        found = parse_prompt(text, "llm.perplexity")
        parts = measured.split_text(self, found, own["context"], own["chunks"])
        if own["save_base"] is None:
            return measured.perplexity(self, parts, show)
        from ..quality.kl_divergence import save_base as save

        return save(self, parts, own["save_base"], show)

    def kl_divergence(
        self,
        base: str | os.PathLike[str],
        text: Prompt | None = None,
        chunks: int | None = None,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> Divergence:
        """Compare the model with a base model, on the text that the base model was evaluated on.

        Args:
            base: file that `perplexity` wrote for the base model (``save_base``).
            text: the text or its token ids, to check that the file was written for it.
            chunks: maximum number of chunks; all by default.
            progress: called with (chunks done, chunks, perplexity so far).

        Raises:
            RequestError: invalid argument; the file has another vocabulary or text.
            ModelFileError: the file cannot be read, or is malformed.
            NumericError: the logits are not finite.
        """
        from ..quality.base_file import BaseFile
        from ..quality.kl_divergence import compare_with_base
        from ..quality.perplexity import no_progress, split_text

        rules: dict[str, Rule] = {
            "base": path, "chunks": Optional(Integer(1)), "progress": Optional(function)
        }  # fmt: skip
        own = check(rules, {"base": base, "chunks": chunks, "progress": progress})
        found = None if text is None else parse_prompt(text, "llm.kl_divergence")
        with BaseFile(own["base"]) as file:
            if found is not None:
                file.check_tokens(split_text(self, found, file.context))
            return compare_with_base(self, file, own["chunks"], own["progress"] or no_progress)

    def embed(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise RequestError: a decoder has no embeddings of texts; see `EmbeddingModel`."""
        self._needs_encoder("embed")

    def rerank(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise RequestError: a decoder has no scores of documents; see `SequenceClassifier`."""
        self._needs_encoder("rerank")

    def classify(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise RequestError: a decoder has no labels; see `SequenceClassifier`."""
        self._needs_encoder("classify")

    def _needs_encoder(self, name: str) -> NoReturn:
        raise RequestError(
            f"{name} needs an encoder, but {self.file.path} is a decoder ({self.file.architecture})"
        )

    # -- values and times
    def logits(
        self, prompt: Prompt, last: bool = False, target: Sequence[int] | None = None
    ) -> np.ndarray:
        """Return the logits float32 [T, vocab] of a prompt, and clear the KV cache.

        Args:
            prompt: a string or token ids; the source of an encoder-decoder.
            last: return [vocab], the logits of the last position.
            target: token ids of an encoder-decoder's target, whose logits are returned, from the
                decoder's start token on; by default only the forced first tokens.

        Raises:
            RequestError: invalid prompt, or a target for a decoder.
        """
        rules: dict[str, Rule] = {"last": flag, "target": Optional(token_ids)}
        own = check(rules, {"last": last, "target": target})
        ids = self._tokens(parse_prompt(prompt, "llm.logits"), own["target"])
        with self.engine.lock.hold("llm.logits"), self.engine.evaluation(ids) as evaluation:
            chunks = list(evaluation.logits(ids, last))
        return chunks[0][0] if last else np.concatenate(chunks)

    def _tokens(self, prompt: str | Sequence[int], target: Sequence[int] | None) -> list[int]:
        """Return the checked tokens of a sequence, and those of a target behind its source."""
        if target is not None and self.seq2seq is None:
            raise RequestError(
                "target is for encoder-decoders, but the model is a decoder", "target"
            )
        tokens, _ = self._sequence(prompt, Sampling(), Completion())
        if target is None:
            return tokens
        if not target:
            raise RequestError("the target is empty", "target")
        self.check_ids(target)
        return [*tokens[: source_length(tokens)], *target]

    def scopes(self) -> list[str]:
        """Return the scopes that `trace` accepts, in order of execution."""
        return list(self.engine.scope_values)

    def trace(
        self,
        prompt: Prompt,
        scopes: str | Iterable[str],
        patch: Mapping[str, Patch] | None = None,
        target: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray]:
        """Compute a prompt and return the values of modules; optionally replace values.

        Values are those of the model as loaded, quantised activations included. A fused step that
        hides a value is run as its parts. The KV cache is cleared.

        Args:
            prompt: a string or token ids. It is computed in steps of at most 512 tokens, fewer if
                the values of a step exceed 256 MB.
            scopes: names from `scopes`, or patterns such as ``*.mlp``; ``model.layers.3.*`` matches
                the layer and everything in it.
            patch: maps a scope or pattern to a function that takes a value (float32 [tokens, ...])
                and returns its replacement of the same shape and dtype. It is called once per step;
                later ops read the replacement.
            target: token ids of an encoder-decoder's target, see `logits`.

        Returns:
            Arrays [T, ...] by scope, for the tokens of the source in the encoder and for those of
            the target in the decoder; the last value of a scope that runs several times; the
            replacement of a patched value.

        Raises:
            RequestError: unknown scope (the nearest names are listed), or invalid replacement.
        """
        rules: dict[str, Rule] = {
            "scopes": texts, "patch": Optional(mapping), "target": Optional(token_ids)
        }  # fmt: skip
        own = check(rules, {"scopes": scopes, "patch": patch, "target": target})
        ids = self._tokens(parse_prompt(prompt, "llm.trace"), own.pop("target"))
        with self.engine.lock.hold("llm.trace"):
            return self._tracer.trace(ids, **own)

    @cached_property
    def _tracer(self) -> Tracer:
        from ..engine.trace import Tracer

        return Tracer(self.engine)

    def profile(
        self,
        prompt: Prompt | Sequence[Prompt],
        decode: int = 64,
        repeat: int = 3,
        show: Progress = lambda what, done, total: None,
        ramps: bool = False,
    ) -> Profile:
        """Profile the prefill of prompts and the decode steps after them, op by op.

        The prefill of an encoder-decoder includes the encoding of its source.

        Profiled passes are interleaved with passes without profiling. Several prompts run as one
        batch, and `Profile.requests` divides the time among them. No other request may run
        meanwhile.

        Args:
            prompt: a string or token ids, or a sequence of either, at most ``max_sequences``.
            decode: number of tokens to generate for each prompt.
            repeat: number of profiled passes.
            show: called with (description, passes done, total).
            ramps: on CUDA, also record in how much of each launch memory is not busy; needs the
                ceilings of ``graphllm doctor --measure``.

        Raises:
            RequestError: invalid argument.
        """
        from ..profiler import capture

        rules: dict[str, Rule] = {"decode": Integer(), "repeat": Integer(1), "show": function}
        given = {"decode": decode, "repeat": repeat, "show": show, "ramps": ramps}
        own = check({**rules, "ramps": flag}, given)
        found = parse_prompts(prompt, "llm.profile")
        if not found:
            raise RequestError("the prompt is empty")
        several = found if isinstance(found, tuple) else (found,)
        prompts = [self._tokens(parse_prompt(each, "llm.profile"), None) for each in several]
        with self.engine.lock.hold("llm.profile"):
            return capture.profile(self, prompts, **own)
