"""`TextGenerator`: requests of a loaded model, one or many at once."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, overload

from ..arguments import Optional, check, flag, function, quote
from ..engine.batcher import Recorders
from ..engine.completion import Completion
from ..engine.engine import PrefillCallback
from ..engine.generation import Delivery
from ..engine.request import Sampling
from ..errors import RequestError
from ..loading.loaded_model import LoadedModel
from ..model.batch import source_tokens
from ..progress import request_progress
from .prompts import Prompt, check_one_sample, parse_prompt, parse_prompts, parse_settings
from .request_handle import RequestHandle, wait_any

if TYPE_CHECKING:
    from ..profiler.bill import Meter


class TextGenerator(LoadedModel):
    """A model that runs requests as one batch, and returns for each what it returns alone."""

    _freed: ClassVar[set[str]] = LoadedModel._freed | {"_meter"}

    @overload
    def stream(
        self, prompt: Prompt, seen: PrefillCallback | None = None, **sampling: Any
    ) -> Iterator[str]: ...
    @overload
    def stream(
        self, prompt: Sequence[Prompt], seen: PrefillCallback | None = None, **sampling: Any
    ) -> Iterator[tuple[int, str]]: ...
    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        seen: PrefillCallback | None = None,
        **sampling: Any,
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """Generate from one prompt or from several, and yield the text piece by piece.

        Args:
            prompt: a string, token ids, or a sequence of either.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of a prefill.
            **sampling: see `generate`.

        Returns:
            Pieces of text; for several prompts tuples (index of the prompt, piece of text), in the
            order in which they are computed.

        Raises:
            RequestError: invalid argument.
            ModelFileError: the model has no tokenizer.
        """
        _ = self.tokenizer  # raises if there is none: no text could be yielded
        found = parse_prompts(prompt, "llm.stream")
        several = isinstance(found, tuple)
        each = parse_settings(sampling, len(found) if several else None, "llm.stream")
        for settings in each:
            check_one_sample(settings, "llm.stream")
        if isinstance(found, tuple):
            return self._stream_all(found, each, seen)
        return self._stream_completion(found, each[0].with_seed(), Completion(), seen)

    def _stream_all(
        self,
        prompts: Sequence[str | list[int]],
        settings: Sequence[Sampling],
        seen: PrefillCallback | None,
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of the prompt, piece of text)."""
        delivery, handles = Delivery(), list[RequestHandle]()
        try:
            for prompt, own in zip(prompts, settings):
                handles.append(
                    self._submit(prompt, own.with_seed(), Completion(), seen, delivery=delivery)
                )
            live = dict(enumerate(handles))
            while live:
                wait_any(list(live.values()))
                for index, handle in list(live.items()):
                    text, ended = handle.poll()
                    if ended:
                        del live[index]
                    if text:
                        yield index, text
        finally:
            for handle in handles:
                handle.cancel()

    @overload
    def generate(
        self,
        prompt: Prompt,
        seen: PrefillCallback | None = None,
        *,
        progress: bool | None = None,
        **sampling: Any,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        seen: PrefillCallback | None = None,
        *,
        progress: bool | None = None,
        **sampling: Any,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        seen: PrefillCallback | None = None,
        *,
        progress: bool | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Generate from one prompt or from several.

        Args:
            prompt: a string, token ids, or a sequence of either. Without a tokenizer, token ids.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of a prefill.
            progress: whether to show the progress on standard error: a bar at a terminal, otherwise
                a line every 10 seconds. By default for several prompts at a terminal.
            **sampling: fields of `Sampling`, or ``sampling=``, a `Sampling` (or a mapping of its
                fields) that they override. For several prompts it may be a sequence with one for
                each.

        Returns:
            The completion; for several prompts a list of completions, computed as one batch.

        Raises:
            RequestError: invalid argument.
        """
        check({"progress": Optional(flag)}, {"progress": progress})
        found = parse_prompts(prompt, "llm.generate")
        if isinstance(found, tuple):
            each = parse_settings(sampling, len(found), "llm.generate")
            return self._complete_all(found, each, seen, progress)
        settings = parse_settings(sampling, None, "llm.generate")
        return self._complete_all([found], settings, seen, progress or False)[0]

    def _complete_all(
        self,
        prompts: Sequence[str | list[int]],
        settings: Sequence[Sampling],
        seen: PrefillCallback | None = None,
        progress: bool | None = False,
    ) -> list[Completion]:
        """Submit all prompts, then wait for the completions in order."""
        handles: list[RequestHandle] = []
        samples: list[RequestHandle] = []

        def computed() -> tuple[int, int]:
            return sum(h.done for h in handles), sum(h.progress.tokens for h in samples)

        try:
            for prompt, own in zip(prompts, settings):
                delivery = Delivery(attended=True)
                handles.append(
                    self._submit(prompt, own.with_seed(), Completion(), seen, delivery=delivery)
                )
            samples += [each for handle in handles for each in (handle, *handle.alternatives)]
            with request_progress(len(handles), computed, progress) as update:
                for sample in samples:
                    for _ in sample:
                        update()
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def submit(self, prompt: Prompt, **sampling: Any) -> RequestHandle:
        """Begin a request that runs in the background, and return its handle.

        Example: ``handle = llm.submit("Hello"); print(handle.result().text)``

        The request joins the batch of the other requests. A thread runs the steps as long as there
        are requests in the background; it ends with them.

        Args:
            prompt: a string, or token ids. Without a tokenizer, token ids.
            **sampling: see `generate`.

        Raises:
            RequestError: invalid argument, or the prompt does not fit the context.
        """
        found = parse_prompt(prompt, "llm.submit")
        settings = parse_settings(sampling, None, "llm.submit")[0].with_seed()
        delivery = Delivery(background=True)
        return self._submit(found, settings, Completion(), delivery=delivery)

    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        completion: Completion,
        seen: PrefillCallback | None = None,
        profile: Recorders | None = None,
        eos_ids: Collection[int] | None = None,
    ) -> Iterator[str]:
        """Yield pieces of text and fill in ``completion``, which is final after the last piece.

        Args:
            prompt: a string or token ids.
            sampling: sampling settings and stop conditions.
            completion: an empty completion.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of the prefill.
            profile: recorders of prefill and of decode.
            eos_ids: ids that end the answer; the model's own by default.

        Raises:
            RequestError: invalid argument.
        """
        settings = sampling.normalize()
        check_one_sample(settings, "llm.complete")
        return self._stream_completion(prompt, settings, completion, seen, profile, eos_ids)

    def _stream_completion(
        self, prompt: str | Sequence[int], sampling: Sampling, completion: Completion,
        seen: PrefillCallback | None, profile: Recorders | None = None,
        eos_ids: Collection[int] | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """As `complete`, for validated settings with a seed."""
        handle = self._submit(prompt, sampling, completion, seen, profile, eos_ids)
        try:
            yield from handle
        finally:
            handle.cancel()

    def _submit(
        self, prompt: str | Sequence[int], sampling: Sampling, completion: Completion,
        seen: PrefillCallback | None = None, profile: Recorders | None = None,
        eos_ids: Collection[int] | None = None, delivery: Delivery | None = None,
    ) -> RequestHandle:  # fmt: skip
        """Check a request and add it to the batch; ``completion`` gets its prompt and seed."""
        began = time.perf_counter_ns()
        if seen is not None:
            function("seen", seen)
        completion.seed = sampling.seed or 0
        ids, sampling = self._sequence(prompt, sampling, completion)
        completion.timings.load_s = self.load_s
        tokenizer = self.tokenizer if self.file.has_vocabulary else None
        if sampling.stop and tokenizer is None:
            raise RequestError(f"stop = {quote(sampling.stop)} needs a tokenizer; stop_ids do not")
        ends = sorted(self._eos_ids() if eos_ids is None else eos_ids)
        own, count = delivery or Delivery(), sampling.n if sampling.beams == 1 else 1
        account = self._meter.open(count, began) if sampling.profile else None
        if account is not None:
            own = account.watch(own)
        try:
            first, *others = (
                self.engine.submit(
                    ids, sampling, ends, tokenizer=tokenizer, sample_index=index,
                    delivery=replace(own, wakeups=SimpleQueue()) if index else own,
                )
                for index in range(count)
            )  # fmt: skip
        except BaseException:
            if account is not None:
                account.cancel()
            raise
        alternatives = [
            RequestHandle(self.engine, each, completion.new_sample(), profile=profile)
            for each in others
        ]
        return RequestHandle(self.engine, first, completion, seen, profile, alternatives, account)

    @cached_property
    def _meter(self) -> Meter:
        from ..profiler.bill import Meter

        # One for all threads that come here at once: `cached_property` of Python 3.12 has no lock.
        return vars(self).setdefault("_meter", Meter(self.engine.batcher))

    def encode_prompt(self, text: str, sampling: Sampling) -> str | list[int]:
        """Return what `generate` takes for a text: its ids, or a source as it is.

        RequestError: a source is too long, or a language is unknown; see `seq2seq.Seq2Seq`.
        """
        if self.seq2seq is None:
            _check_no_languages(sampling)
            return self.encode(text)
        self.seq2seq.request(text, sampling, lambda: self.languages)
        return text

    def _sequence(
        self, prompt: str | Sequence[int], sampling: Sampling, completion: Completion
    ) -> tuple[list[int], Sampling]:
        """Return the tokens and the settings of a request; ``completion`` gets its prompt."""
        if self.seq2seq is None:
            _check_no_languages(sampling)
            ids = completion.prompt_ids = (
                self.encode(prompt) if isinstance(prompt, str) else [*prompt]
            )
            self._check_all_ids(ids, sampling)
            return ids, sampling
        source, target, settings = self.seq2seq.request(prompt, sampling, lambda: self.languages)
        completion.prompt_ids = [*source, *target]
        self._check_all_ids(completion.prompt_ids, settings)
        return [*source_tokens(source), *target], settings

    def _check_all_ids(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise RequestError, with the name of the field, if an id is not in the vocabulary."""
        self.check_ids(prompt)
        for name, ids in sampling.ids_by_field.items():
            self.check_ids(ids, name)

    def _eos_ids(self) -> Collection[int]:
        """Return the EOS ids of the model, as far as its file states them."""
        if self.file.has_vocabulary:
            return self.tokenizer.eog_ids
        stated = getattr(self.file, "eos_token_ids", None)
        return stated(self.decoder.cfg.vocab) if stated is not None else ()


def _check_no_languages(sampling: Sampling) -> None:
    """Raise RequestError if the settings name a language."""
    for name in ("source_lang", "target_lang"):
        if (given := getattr(sampling, name)) is not None:
            text = f"{name} = {quote(given)} has no use: the model is a decoder without languages"
            raise RequestError(text, name)
