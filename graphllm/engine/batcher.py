"""Batcher: runs steps of all requests, and delivers what they sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .generation import Generation
from .runner import Runner
from .scheduler import Scheduler
from .sequence import ActiveSequence, Chunk, StepRecorder
from .step_result import StepResult

Recorders = tuple[StepRecorder, StepRecorder]  # of steps with prefill, and of decode steps


class Batcher:
    """Continuous batching: requests join and leave between steps.

    `submit` and `cancel` may be called from any thread, at any time, and by the garbage collector;
    they take effect at the next step. One thread at a time calls the other methods.

    Args:
        runner: runs the steps.
        scheduler: chooses the tokens of each step.

    Attributes:
        prefill_tokens: tokens of the prompt begun last that were computed, not found in the cache.
        steps: number of steps that were taken so far.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self._generations: dict[ActiveSequence, Generation] = {}
        self._submitted: deque[Generation] = deque()  # since the last step
        self._cancelled: deque[Generation] = deque()  # since the last step
        self._non_finite: deque[Generation] = deque()  # no longer among _generations
        self._launched: deque[list[Chunk]] = deque()  # decode steps that were not taken
        self.prefill_tokens = self.steps = 0

    @property
    def generations(self) -> list[Generation]:
        """The requests that have not ended."""
        return [*self._generations.values(), *self._submitted, *self._non_finite]

    @property
    def non_finite(self) -> Generation | None:
        """A request that has not ended, although its last logits are not finite; None: there is
        no such request."""
        while self._non_finite and self._non_finite[0].done:
            self._non_finite.popleft()
        return self._non_finite[0] if self._non_finite else None

    def submit(self, generation: Generation) -> None:
        """Add a request."""
        self._submitted.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a request; its blocks are released before the next step. May be called repeatedly."""
        self._cancelled.append(generation)
        generation.cancel()

    def forget_all(self) -> None:
        """Forget all requests, whose cache is freed."""
        self._generations.clear()
        self._submitted.clear()
        self._non_finite.clear()

    def step(self, profile: Recorders | None = None) -> bool:
        """Compute the next tokens of the running requests; return False if there are none.

        If the step fails or is interrupted, the requests go on later with what they had before it.
        """
        self._update_requests()
        prefill, decode = profile or (None, None)
        try:
            if not self._launched:
                preempted = self.scheduler.preempted
                chunks = self.scheduler.schedule()
                if self.scheduler.preempted != preempted:
                    self.runner.reset()  # a sequence may run on in other blocks
                if not chunks:
                    return False
                rows = self._start(chunks)
                if not all(
                    c.samples and c.stop - c.start == 1 and not row.processors
                    for c, row in zip(chunks, rows)
                ):
                    self._finish(chunks, self.runner.run(chunks, rows, prefill))
                    return True
                self.runner.decode(chunks, rows, decode)
                self._launched.append(chunks)
            self._finish_decode()
            return True
        except BaseException:
            self._recover()
            raise

    def _start(self, chunks: Sequence[Chunk]) -> list[Generation]:
        """Return the requests of ``chunks``, and note when the first step of each begins."""
        rows = [self._generations[chunk.sequence] for chunk in chunks]
        for chunk, generation in zip(chunks, rows):
            if not generation.started:
                generation.start(chunk.start)
                self.prefill_tokens = generation.prefill_tokens
        return rows

    def reset(self) -> None:
        """Forget launched steps: the next step is fed by the host."""
        self.runner.reset()
        self._launched.clear()

    def _recover(self) -> None:
        """Take all requests back to the results that were delivered, at any point of a step."""
        self.make_room()  # steps may have been launched and not taken
        for generation in list(self._generations.values()):
            sequence = generation.sequence
            del sequence.tokens[sequence.prompt_tokens + generation.count :]
            self.scheduler.resume(sequence)  # it looks idle if its sampled token was not delivered
            if generation.done:
                self._remove(generation)

    def settle(self) -> None:
        """Wait for steps that were launched ahead, and apply cancellations."""
        while self._launched:
            self._finish_decode(ahead=False)
        self._update_requests()

    def _update_requests(self) -> None:
        """Admit submitted requests to the scheduler, and remove cancelled ones."""
        while self._submitted:
            generation = self._submitted.popleft()
            if generation.has_steps:
                self._generations[generation.sequence] = generation
                self.scheduler.add(generation.sequence)
            else:
                generation.end_empty()
        while self._cancelled:
            self._remove(self._cancelled.popleft())

    def _remove(self, generation: Generation) -> None:
        if self._generations.pop(generation.sequence, None) is not None:
            self.scheduler.remove(generation.sequence)

    def _finish_decode(self, ahead: bool = True) -> None:
        """Take the oldest launched decode step; if ``ahead``, launch further ones before."""
        while ahead and self.runner.can_run_ahead:
            following = self._following(self._launched[-1])
            if following is None:
                break
            self.runner.launch(following)
            self._launched.append(following)
        result = self.runner.take()
        self._finish(self._launched.popleft(), result)

    def _following(self, chunks: Sequence[Chunk]) -> list[Chunk] | None:
        """Return the decode step after ``chunks`` if it is known to be that of the same batch."""
        if self._submitted or self._cancelled:
            return None
        for chunk in chunks:
            generation = self._generations.get(chunk.sequence)
            if generation is None or generation.ends_after(len(self._launched)):
                return None
        return self.scheduler.following(chunks)

    def _finish(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Note that ``chunks`` were computed, and deliver what the first ones sampled."""
        self.steps += 1
        self.scheduler.complete(chunks)
        sampled = result.ids.tolist()
        for index, chunk in enumerate(chunks):
            generation = self._generations.get(chunk.sequence)
            if generation is None:
                continue  # it ended after the step was launched
            if result.prompts and index in result.prompts:
                generation.add_prompt_logprobs(result.prompts[index])
            if generation.count == 0 and chunk.stop <= chunk.sequence.prompt_tokens:
                generation.prefilled(chunk.stop)
            if not chunk.samples:
                continue
            if result.errors and index in result.errors:
                generation.fail(result.errors[index])
                self._remove(generation)
                continue
            if sampled[index] < 0:
                self._non_finite.append(generation)
                self._remove(generation)
                continue
            chunk.sequence.tokens.append(sampled[index])
            count = generation.sampling.logprobs
            logprobs = None if count is None else result.token(index, count)
            if generation.push(sampled[index], logprobs):
                self._remove(generation)

    def make_room(self) -> None:
        """Let all running requests give up their blocks; they are computed again later."""
        self.scheduler.preempt_all()
        self.reset()
