"""Engine of one model: continuous batching of requests over a shared KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from ..compiler.plan import Plan
from ..errors import GraphError, RequestError
from ..graph.rewrite import toposort
from ..graph.scopes import record_scope_values
from ..model.decoder import Batch, Decoder, Limits
from ..runtime.executor import Executor
from ..runtime.gpu_offload import AUTO, GpuOffload, plan_gpu_offload
from ..tokenizer import Tokenizer
from .batcher import Batcher, Recorders
from .block_manager import BlockManager
from .evaluation import Evaluation
from .finite_check import non_finite_error
from .generation import Generation, Prefilled, Sampled
from .request import Completion, Sampling
from .runner import Runner
from .sampler import sampling_outputs
from .sampling_feeds import sampling_row
from .scheduler import Scheduler
from .sequence import ActiveSequence
from .step_lock import StepLock

PrefillCallback = Callable[[int, int], None]  # (tokens prefilled so far, tokens to prefill)


class Engine:
    """A model, its executor, its KV cache, and the requests that run on it.

    Each call of `step` computes the next tokens of all running requests. The engine has no thread
    of its own: the threads that wait for results run the steps, one at a time (`wait`), so that a
    single caller pays for no hand-over. What a request gets does not depend on the other requests:
    a token's logits depend neither on the batch nor on the chunking of the tokens before it.

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
    """

    def __init__(self, decoder: Decoder, executor: Executor, limits: Limits) -> None:
        self.executor, self.limits = executor, limits
        with record_scope_values() as values:
            batch = Batch(decoder.caches, limits)
            self.outputs = decoder.build(batch)
        self.outputs |= sampling_outputs(self.outputs["logits"], batch)
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

    # -- plans
    def plan(self, outputs: Sequence[str], tokens: int) -> Plan:
        """Return the plan of steps of one sequence with at most ``tokens`` tokens."""
        return self._runner.plan(outputs, tokens)

    def decode_plan(self) -> Plan:
        """Return the decode plan of one sequence: compute a token, sample, advance the state."""
        return self.plan(["ids"], 1)

    def generation_plans(self) -> list[Plan]:
        """Return the prefill plan and the decode plan of one sequence."""
        return [self.plan(["ids"], self.limits.tokens), self.decode_plan()]

    def all_plans(self) -> list[Plan]:
        """Return the plans of one sequence, and those of as many as the limits allow."""
        plans, most = self.generation_plans(), self.limits.sequences
        if most > 1:
            plans.append(self._runner.plan(["sampled"], self.limits.tokens, most, most))
            plans.append(self._runner.plan(["ids"], most, most, most))
        return plans

    def offload_layers(self, gpu_layers: int | str) -> None:
        """Choose the layers to offload to a device with its own memory. Call before `prepare`."""
        self.requested_gpu_layers = gpu_layers
        self.gpu_offload = plan_gpu_offload(self.executor, self.outputs, self.all_plans, gpu_layers)

    def prepare(self) -> None:
        """Bind the plans of one sequence: pack their weights and compile their kernels.

        The memory of intermediates is reserved for as many sequences as the limits allow.
        """
        for plan in self.all_plans():
            self.executor.reserve(plan)
        for plan in self.generation_plans():
            self.executor.bind(plan)

    def close(self) -> None:
        """Finish the requests that are `attended`, refuse all further ones, and free the memory.

        The caller holds the lock.
        """
        while any(each.attended and not each.done for each in self.batcher.generations):
            self.step()
        self.lock.close()
        with suppress(GraphError):  # raised if no plan was ever bound
            self.executor.get_state("ids")  # waits for a step that was launched ahead
        self.batcher.reset()
        for generation in self.batcher.generations:
            generation.fail(RequestError("the model is closed"))
        self.batcher.forget_all()
        del self._bidirectional_prefix  # a bound method: it would keep the decoder and file alive
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
        attended: bool = False,
    ) -> Generation:
        """Add a request; it takes part in the steps from now on.

        Args:
            tokens: ids of the prompt.
            sampling: sampling settings, with a seed.
            eos_ids: ids that ``min_tokens`` and ``ignore_eos`` forbid.
            end_ids: ids that end the answer; ``eos_ids`` by default.
            tokenizer: None if only ids are wanted.
            priority: requests with a lower number are admitted first.
            attended: whether a caller waits for the whole answer, so that `close` waits, too.

        Raises:
            RequestError: the prompt is empty or does not fit the context, or the model is closed.
        """
        if self.lock.closed:
            raise RequestError("the model is closed")
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, the context holds {self.limits.context}",
                "context",
            )
        prefix = self._bidirectional_prefix(tokens)
        sequence = ActiveSequence(list(tokens), len(tokens), prefix=prefix, priority=priority)
        ends = eos_ids if end_ids is None else end_ids
        settings = sampling_row(self.limits, sampling, list(eos_ids))
        generation = Generation(sequence, sampling, settings, ends, tokenizer, self.limits.context)
        generation.attended = attended
        self.batcher.submit(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a request; its blocks are released before the next step. May be called repeatedly.

        It acquires no lock, because the garbage collector may call it in any thread.
        """
        self.batcher.cancel(generation)

    def wait(self, generation: Generation, profile: Recorders | None = None) -> None:
        """Run a step, or wait until another thread's step has a result for ``generation``.

        Raises:
            RequestError: the call comes from within a step of the same thread, or the model is
                closed.
            GraphllmError: the step failed.
        """
        if self.lock.acquire("a generation", lambda: generation.ready, generation.wakeups):
            try:
                if not self.step(profile) and not generation.ready:
                    raise GraphError("a request waits, but there is nothing to compute")
            finally:
                self.lock.release()

    def results(
        self, generation: Generation, profile: Recorders | None = None
    ) -> Iterator[Prefilled | Sampled]:
        """Yield the results of a request as they arrive.

        Args:
            generation: the request.
            profile: recorders of prefill and decode, for the steps that this caller runs.

        Raises:
            NumericError: the logits are not finite.
            GraphllmError: the request failed.
        """
        while generation.events or not generation.done:
            if generation.error is not None:
                raise generation.error
            if generation.events:
                yield generation.events.popleft()
            else:
                self.wait(generation, profile)
        if generation.fault is not None:
            with self.lock.hold("a check of all values"):
                raise non_finite_error(self, generation.fault)
        if generation.error is not None:
            raise generation.error

    def stream(
        self,
        generation: Generation,
        completion: Completion,
        seen: PrefillCallback | None = None,
        profile: Recorders | None = None,
    ) -> Generator[str, None, None]:
        """Yield the text of a request piece by piece; the request ends with the generator.

        Args:
            generation: the request.
            completion: filled in as results are consumed; final after the last piece.
            seen: called with (tokens prefilled, tokens to prefill) after each chunk of the prefill.
            profile: see `results`.

        Raises:
            GraphllmError: see `results`.
        """
        try:
            for event in self.results(generation, profile):
                if isinstance(event, Sampled):
                    generation.record(event, completion)
                    if event.text:
                        yield event.text
                elif seen is not None:
                    seen(event.done, event.total)
        finally:
            self.cancel(generation)

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
            while not generation.done or generation.events:
                while generation.events:
                    event = generation.events.popleft()
                    if isinstance(event, Prefilled):
                        if seen is not None:
                            seen(event.done, event.total)
                    elif event.token is not None:
                        yield event.token
                if not generation.done and not self.step(profile):
                    raise GraphError("a request waits, but there is nothing to compute")
            if generation.fault is not None:
                raise non_finite_error(self, generation.fault)
        finally:
            self.cancel(generation)

    # -- steps
    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prompt begun last that were computed, not found in the cache."""
        return self.batcher.prefill_tokens

    def step(self, profile: Recorders | None = None) -> bool:
        """See `Batcher.step`. The caller holds the lock."""
        return self.batcher.step(profile)

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
        if not tokens:
            raise RequestError("the prompt is empty")
        if len(tokens) > self.limits.context:
            raise RequestError(
                f"{len(tokens)} tokens do not fit a context of {self.limits.context}", "context"
            )
        self.settle()
        self.batcher.reset()
        made = Evaluation(
            self._runner,
            tokens[:1],
            self._bidirectional_prefix(tokens),
            self.vocab,
            self.batcher.make_room,
        )
        try:
            yield made
        finally:
            made.release()
            self.batcher.reset()

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

    @property
    def logits_outputs(self) -> list[str]:
        """Names of the outputs of a step without sampling: the logits and the KV pools."""
        return self._runner.logits_outputs
