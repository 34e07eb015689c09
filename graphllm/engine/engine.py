"""Engine of one model: continuous batching of requests over a shared KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ..compiler.plan import Plan
from ..errors import ContextExceeded, GraphError, RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import record_scope_values
from ..model.decoder import Batch, Decoder, Limits
from ..runtime.executor import Executor
from ..runtime.gpu_offload import AUTO, GpuOffload, plan_gpu_offload
from ..tokenizer import Tokenizer
from .background_worker import BackgroundWorker
from .batcher import Batcher, Recorders
from .beam_group import BeamGroup
from .block_copies import copy_outputs
from .block_manager import BlockManager
from .completion import Prefilled, Sampled
from .generation import Delivery, Generation
from .prompt_logprobs import prompt_outputs
from .request import Sampling
from .runner import Runner
from .sampler import sampling_outputs
from .sampling_feeds import sampling_row
from .scheduler import Scheduler
from .sequence import ActiveSequence
from .step_lock import StepLock
from .weights_ahead import weights_ahead

if TYPE_CHECKING:
    from .evaluation import Evaluation
    from .packed_evaluation import PackedEvaluation

PrefillCallback = Callable[[int, int], None]  # (tokens prefilled so far, tokens to prefill)


class Engine:
    """A model, its executor, its KV cache, and the requests that run on it.

    Each call of `step` computes the next tokens of all running requests. The threads that wait for
    results run the steps, one at a time (`wait`), so that a single caller pays for no hand-over.
    Only requests in the background, for which no thread waits, run in a thread of the engine's own,
    which lives as long as they do. What a request gets does not depend on the other requests: a
    token's logits depend neither on the batch nor on the chunking of the tokens before it.

    Attributes:
        outputs: outputs of the graph by name; see `Decoder.build` and `sampling_outputs`.
        vocab: size of the vocabulary.
        scope_values: the values that its scopes return, by scope; see `record_scope_values`.
        manager: blocks of the KV cache.
        scheduler: chooses the tokens of each step.
        lock: held during each step, and by callers that need the model for themselves.
        requested_gpu_layers: the argument of `offload_layers`.
        gpu_offload: the outcome of `offload_layers`; None without a device with its own memory.
        batcher: runs the steps.
        worker: runs the steps of requests in the background.
    """

    def __init__(self, decoder: Decoder, executor: Executor, limits: Limits) -> None:
        self.executor, self.limits = executor, limits
        with record_scope_values() as values:
            batch = Batch(decoder.caches, limits)
            self.outputs = decoder.build(batch)
        pools = {name: node for name, node in self.outputs.items() if name.startswith("kv.")}
        self.outputs |= sampling_outputs(self.outputs["logits"], batch)
        width, vocab = self.outputs["hidden"].meta.inner[0], decoder.cfg.vocab
        self.outputs |= prompt_outputs(decoder.head, width, vocab, limits)
        self.outputs |= copy_outputs(pools, limits)
        used = set(toposort(self.outputs.values()))
        self.scope_values = {scope: node for scope, node in values.items() if node in used}
        executor.place_model(self.outputs)
        self.requested_gpu_layers: int | str = AUTO
        self.gpu_offload: GpuOffload | None = None
        self.vocab = decoder.cfg.vocab
        self._bidirectional_prefix = decoder.bidirectional_prefix
        sizes = {c.name: limits.pool_blocks(c.window) for c in decoder.caches}
        self.manager = BlockManager(
            decoder.caches, sizes, limits.block, limits.blocks, take_continued=limits.sequences == 1
        )
        border = math.gcd(limits.tokens, limits.block)
        self.scheduler = Scheduler(
            self.manager, limits.tokens, limits.sequences, limits.context, border
        )
        self._runner = Runner(executor, self.outputs, decoder.caches, limits, self.manager)
        self.batcher = Batcher(self._runner, self.scheduler)
        self.lock = StepLock()
        self.worker = BackgroundWorker()

    # -- plans
    def plan(self, outputs: Sequence[str], tokens: int) -> Plan:
        """Return the plan of steps of one sequence with at most ``tokens`` tokens."""
        return self._runner.plan(outputs, tokens)

    def decode_plan(self, sequences: int = 1) -> Plan:
        """Return the decode plan that runs this many sequences: compute a token of each, sample,
        advance the state."""
        most = self._runner.bucket(sequences)
        return self._runner.plan(["ids"], most, most, most)

    def prefill_plan(self, sequences: int = 1) -> Plan:
        """Return the plan of steps that end the prompts of this many sequences, and sample."""
        most = self._runner.bucket(sequences)
        return self._runner.plan(["ids"], self.limits.tokens, most, most)

    def generation_plans(self) -> list[Plan]:
        """Return the prefill plan and the decode plan of one sequence."""
        return [self.plan(["ids"], self.limits.tokens), self.decode_plan()]

    def source_plans(self) -> list[Plan]:
        """Return the plan that encodes one source, if the model is an encoder-decoder."""
        return [self._runner.encode_plan()] if self._runner.encodes else []

    def all_plans(self) -> list[Plan]:
        """Return the plans of one sequence, and those that need more memory than any other."""
        return [*self.generation_plans(), *self._runner.largest_plans()]

    def offload_layers(self, gpu_layers: int | str) -> None:
        """Choose the layers to offload to a device with its own memory. Call before `prepare`."""
        self.requested_gpu_layers = gpu_layers
        self.gpu_offload = plan_gpu_offload(self.executor, self.outputs, self.all_plans, gpu_layers)

    def prepare(self, ahead: bool = True, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Bind the plans of one sequence: pack their weights and compile their kernels.

        The memory of intermediates is reserved for as many sequences as the limits allow, with any
        settings.

        Args:
            ahead: whether to pack weights in another thread as soon as the first plan is compiled.
            meanwhile: called while weights are packed.
        """
        first = self.plan(["ids"], self.limits.tokens)
        with weights_ahead(self.executor, first) if ahead else nullcontext():
            for plan in self.all_plans():
                self.executor.reserve(plan)
            meanwhile()
            short = self.plan(["ids"], self.limits.plan_tokens(1))
            for plan in dict.fromkeys([*self.generation_plans(), short]):
                self.executor.bind(plan)

    def close(self) -> None:
        """Finish the requests that are `attended`, refuse all further ones, and free the memory.

        The caller holds the lock.
        """
        while any(each.delivery.attended and not each.done for each in self.batcher.generations):
            self.step()
        self.lock.close()
        with suppress(GraphError):  # raised if no plan was ever bound
            self.executor.get_state("ids")  # waits for a step that was launched ahead
        self.batcher.reset()
        for generation in self.batcher.generations:
            generation.fail(RequestError("the model is closed"))
        self.batcher.forget_all()
        # The bound method would keep the decoder and file alive; a thread in `submit` needs one.
        self._bidirectional_prefix = lambda tokens: 0
        self.executor.close()

    # -- requests
    def submit(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        eos_ids: Collection[int],
        end_ids: Collection[int] | None = None,
        tokenizer: Tokenizer | None = None,
        priority: int = 0,
        delivery: Delivery | None = None,
        sample_index: int = 0,
    ) -> Generation:
        """Add a request; it takes part in the steps from now on.

        Args:
            tokens: ids of the prompt.
            sampling: sampling settings, with a seed.
            eos_ids: ids that ``min_tokens`` and ``ignore_eos`` forbid.
            end_ids: ids that end the answer; ``eos_ids`` by default.
            tokenizer: None if only ids are wanted.
            priority: requests with a lower number are admitted first.
            delivery: how its results are awaited; by default a caller runs the steps.
            sample_index: index among the samples of a prompt, which differ by their noise. Full
                blocks of a common prompt are computed once.

        Raises:
            RequestError: the prompt is empty or does not fit the context, or the model is closed.
        """
        if self.lock.closed:
            raise RequestError("the model is closed")
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise ContextExceeded(len(tokens), self.limits.context)
        prefix = self._bidirectional_prefix(tokens)
        if sample_index:  # the first sample has those of the prompt
            sampling = replace(sampling, prompt_logprobs=None)
        all_logits = sampling.prompt_logprobs is not None
        if all_logits and prefix:
            raise RequestError(
                f"the first {prefix} tokens of the prompt attend to later ones, so they have no "
                "log-probabilities",
                "prompt_logprobs",
            )
        sequence = ActiveSequence(
            list(tokens), len(tokens), prefix=prefix, priority=priority, reuse=not all_logits
        )
        ends = eos_ids if end_ids is None else end_ids
        settings = sampling_row(self.limits, sampling, list(eos_ids), sample_index)
        generation = Generation(
            sequence, sampling, settings, ends, tokenizer, self.limits.context, delivery
        )
        group = None
        if sampling.beams > 1:
            group = BeamGroup(generation, ends, tokenizer, self.limits)
        self.batcher.submit(generation, group)
        if generation.delivery.background:
            self.worker.add(self, generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a request; its blocks are released before the next step. May be called repeatedly.

        It acquires no lock, because the garbage collector may call it in any thread.
        """
        self.batcher.cancel(generation)

    def next_result(
        self, generation: Generation, profile: Recorders | None = None, locked: bool = False
    ) -> Prefilled | Sampled | None:
        """Return the next result of a request, or None at its end; run steps until there is one.

        For a request that runs in the background, the caller only waits.

        Args:
            generation: the request. One thread at a time consumes its results.
            profile: recorders of prefill and decode, for the steps that this caller runs.
            locked: whether the caller holds the lock, or uses the engine from one thread.

        Raises:
            RequestError: the call comes from within a step of the same thread, or the model is
                closed.
            NumericError: the logits are not finite.
            GraphllmError: a step failed.
        """
        while True:
            ended = generation.done  # looked up before the events, of which none is added then
            if generation.error is not None:
                raise generation.error
            if generation.events:
                return generation.events.popleft()
            if ended:
                if generation.fault is not None:
                    raise generation.fault
                return None
            self.wait((generation,), profile, locked)

    def wait(
        self,
        generations: Sequence[Generation],
        profile: Recorders | None = None,
        locked: bool = False,
    ) -> None:
        """Run a step, or wait until another thread's step has a result for one of the requests.

        The requests have one `Delivery` in common. For the other arguments and the errors see
        `next_result`.
        """

        def ready() -> bool:
            return any(each.ready for each in generations)

        def step() -> None:
            if not self.step(profile) and not ready():
                raise GraphError("a request waits, but there is nothing to compute")

        delivery = generations[0].delivery
        if delivery.background:
            self.lock.check_callback()
            delivery.wakeups.get()
        elif locked:
            step()
        else:
            self.lock.run("a generation", step, ready, delivery.wakeups)

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        eos_ids: Sequence[int],
        seen: PrefillCallback | None = None,
        profile: Recorders | None = None,
    ) -> Generator[int, None, None]:
        """Yield sampled token ids after the prompt ``tokens`` until the context is full.

        For a caller that holds the lock, or uses the engine from one thread.

        Args:
            tokens: ids of the prompt.
            sampling: sampling settings, with a seed; ``max_tokens`` and stop conditions do not
                count.
            eos_ids: ids that ``min_tokens`` and ``ignore_eos`` forbid.
            seen: called after each chunk of the prefill.
            profile: recorders of prefill and of decode.

        Raises:
            RequestError: the prompt is empty or does not fit the context.
            NumericError: the logits are not finite.
        """
        generation = self.submit(tokens, sampling.unlimited(), eos_ids, ())
        try:
            while (event := self.next_result(generation, profile, locked=True)) is not None:
                if isinstance(event, Prefilled):
                    if seen is not None:
                        seen(event.done, event.total)
                elif event.token is not None:
                    yield event.token
        finally:
            self.cancel(generation)

    # -- steps
    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt begun last that were computed, not found in the cache."""
        return self.batcher.prefill_tokens

    def step(self, profile: Recorders | None = None) -> bool:
        """See `Batcher.step`. Find the causes of logits that are not finite.

        The caller holds the lock.
        """
        more = self.batcher.step(profile)
        while (generation := self.batcher.non_finite) is not None:
            from .finite_check import non_finite_error

            try:
                generation.fail_non_finite(non_finite_error(self, generation.sequence.tokens))
            except Exception as error:  # of the search, for the consumer of this request alone
                generation.fail(error)
        return more

    def settle(self) -> None:
        """See `Batcher.settle`. The caller holds the lock."""
        self.batcher.settle()

    # -- evaluation without sampling
    @contextmanager
    def evaluation(self, tokens: Sequence[int]) -> Iterator[Evaluation]:
        """Compute ``tokens`` step by step in blocks of their own, outside of any batch.

        Running requests give up their blocks if there are not enough, and are computed again later.
        The caller holds the lock.

        Raises:
            RequestError: ``tokens`` is empty or does not fit the context.
        """
        from .evaluation import Evaluation

        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"{len(tokens)} tokens do not fit a context of {self.limits.context}", "context"
            )
        self.settle()
        self.batcher.reset()
        prefix, room = self._bidirectional_prefix(tokens), self.batcher.make_room
        made = Evaluation(self._runner, tokens[:1], prefix, self.vocab, room)
        try:
            yield made
        finally:
            made.release()
            self.batcher.reset()

    def packed_evaluation(self) -> PackedEvaluation:
        """Compute many sequences, as `evaluation` does one. The caller holds the lock."""
        from .packed_evaluation import PackedEvaluation

        self.settle()
        self.batcher.reset()
        return PackedEvaluation(self._runner, self._bidirectional_prefix, self.batcher.make_room)

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt a request would find in the cache now."""
        blocks = self.manager.begin(list(tokens), self._bidirectional_prefix(tokens))
        self.manager.release(blocks)
        return blocks.cached

    def clear_cache(self) -> None:
        """Forget all cached prefixes, so that the next prompt is computed from its first token."""
        self.settle()
        self.batcher.make_room()
        self.manager.clear()
