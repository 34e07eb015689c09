"""Batcher: runs steps of all requests, and delivers what they sample."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .beam_group import Beam, BeamGroup, advance_searches
from .generation import Generation
from .runner import Runner
from .sampling_feeds import Row
from .scheduler import Scheduler
from .sequence import ActiveSequence, Chunk, StepRecorder, has_drafts, is_decode_step
from .step_result import StepResult

if TYPE_CHECKING:
    from .device_drafts import DeviceDrafts
    from .speculation import Speculation

Recorders = tuple[StepRecorder, StepRecorder]  # of steps with prefill, and of decode steps


class Batcher:
    """Continuous batching: requests join and leave between steps.

    `submit` and `cancel` may be called from any thread, at any time, and by the garbage collector;
    they take effect at the next step. One thread at a time calls the other methods.

    A decode step is launched before the results of the one before it are delivered, where it can be
    that of the same requests: a plain one before the ids are read, one with draft tokens after.
    Results of requests that have ended by then are dropped.

    Args:
        runner: runs the steps.
        scheduler: chooses the tokens of each step.

    Attributes:
        prefill_tokens: tokens of the prompt begun last that were computed, not found in the cache.
        steps: number of steps that were taken so far.
        speculation: chooses draft tokens; None computes none.
        device_drafts: computes the draft tokens of a single request; None: the host feeds them all.
        meter: records the steps that have no other recorder; None records none.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self._rows: dict[ActiveSequence, Generation | Beam] = {}
        self._groups: dict[Generation, BeamGroup] = {}  # of the requests with beams
        # Since the last step; a request with beams has a group.
        self._submitted: deque[tuple[Generation, BeamGroup | None]] = deque()
        self._cancelled: deque[Generation] = deque()  # since the last step
        self._non_finite: deque[Generation] = deque()  # no longer among _rows
        self._launched: deque[list[Chunk]] = deque()  # decode steps that were not taken
        self.prefill_tokens = self.steps = 0
        self._began = 0.0  # start of the step that is taken next, without pauses between calls
        self._paused = 0.0  # end of the last call of `step`
        self.speculation: Speculation | None = None
        self.device_drafts: DeviceDrafts | None = None
        self._device: DeviceDrafts | None = None  # the same, if it computes the present drafts
        self.meter: StepRecorder | None = None

    @property
    def generations(self) -> list[Generation]:
        """The requests that have not ended."""
        own = map(_request_of, self._rows.values())
        submitted = (generation for generation, _ in list(self._submitted))
        return list(dict.fromkeys((*own, *submitted, *self._non_finite)))

    @property
    def non_finite(self) -> Generation | None:
        """A request that has not ended, although its last logits are not finite; None: there is
        no such request."""
        while self._non_finite and self._non_finite[0].done:
            self._non_finite.popleft()
        return self._non_finite[0] if self._non_finite else None

    def submit(self, generation: Generation, group: BeamGroup | None = None) -> None:
        """Add a request; ``group``: its beams, if it has several."""
        self._submitted.append((generation, group))

    def cancel(self, generation: Generation) -> None:
        """End a request; its blocks are released before the next step. May be called repeatedly."""
        generation.cancel()  # first, so that it is not admitted after its removal
        self._cancelled.append(generation)

    def forget_all(self) -> None:
        """Forget all requests, whose cache is freed."""
        self._rows.clear()
        self._groups.clear()
        self._submitted.clear()
        self._non_finite.clear()

    def step(self, profile: Recorders | None = None) -> bool:
        """Compute the next tokens of the running requests; return False if there are none.

        If the step fails or is interrupted, the requests go on later with what they had before it.
        """
        self._update_requests()
        try:
            return self._step(*(profile or (self.meter, self.meter)))
        except BaseException:
            self._recover()
            raise
        finally:
            self._paused = time.perf_counter()

    def _step(self, prefill: StepRecorder | None, decode: StepRecorder | None) -> bool:
        if not self._launched:
            self._began = time.perf_counter()
            preempted = self.scheduler.preempted
            chunks = self.scheduler.schedule()
            if self.scheduler.preempted != preempted:
                self.runner.reset()  # a sequence may run on in other blocks
            if not chunks:
                return False
            if copies := self.scheduler.take_copies():
                self.runner.copy_blocks(copies)
            rows = self._start(chunks)
            decodes = is_decode_step(chunks)
            if not decodes or any(row.processors for row in rows):
                result = self.runner.run(chunks, rows, prefill)
                self.scheduler.complete(chunks)
                self._finish(chunks, result)
                return True
            self._launched.append(self._begin_decode(chunks, rows, decode))
        elif self._runs_on_device or has_drafts(self._launched[0]):
            self._began += time.perf_counter() - self._paused
        else:
            self._began = time.perf_counter()
        self._finish_decode(decode)
        return True

    def _begin_decode(
        self, chunks: list[Chunk], rows: list[Row], recorder: StepRecorder | None
    ) -> list[Chunk]:
        """Launch a decode step, and return its chunks, with draft tokens that the host feeds."""
        own = self.speculation
        self._device = self._device_for(rows) if own is not None and recorder is None else None
        if self._device is None and own is not None:
            chunks = own.extend(chunks, rows)
        if self._device is None or not self._device.begin(chunks[0], rows[0]):
            self.runner.decode(chunks, rows, recorder)
        return chunks

    def _device_for(self, rows: Sequence[Row]) -> DeviceDrafts | None:
        """Return ``device_drafts`` if it computes the draft tokens of these requests."""
        device = self.device_drafts
        return device if device is not None and device.serves(rows) else None

    @property
    def _runs_on_device(self) -> bool:
        """Whether the launched steps are those of `DeviceDrafts`."""
        return self._device is not None and self._device.waiting > 0

    def _start(self, chunks: Sequence[Chunk]) -> list[Row]:
        """Return the rows of ``chunks``, and note when the first step of each request begins."""
        rows = [self._rows[chunk.sequence] for chunk in chunks]
        for chunk, row in zip(chunks, rows):
            generation = _request_of(row)
            if not generation.started:
                generation.start(chunk.start)
                self.prefill_tokens = generation.prefill_tokens
        return [*rows]

    def reset(self) -> None:
        """Forget launched steps: the next step is fed by the host."""
        self.runner.reset()
        if self.device_drafts is not None:
            self.device_drafts.reset()
        self._launched.clear()

    def _recover(self) -> None:
        """Take all requests back to the results that were delivered, at any point of a step."""
        self.make_room()  # steps may have been launched and not taken
        for row in list(self._rows.values()):
            if isinstance(row, Generation):
                row.take_back()
                self.scheduler.resume(row.sequence)  # paused if its token was not delivered
                if row.done:
                    self._remove(row)
        for generation, group in list(self._groups.items()):
            self._restart(generation, group)

    def _restart(self, generation: Generation, group: BeamGroup) -> None:
        """Begin the current step of a search again, with new sequences."""
        self._remove(generation)
        if generation.done or generation in self._non_finite:
            return
        group.restart()
        if not group.beams:
            group.finish()
            return
        self._groups[generation] = group
        self._add(group)

    def _add(self, group: BeamGroup) -> None:
        for beam in group.beams:
            self._rows[beam.sequence] = beam
            self.scheduler.add(beam.sequence)

    def settle(self) -> None:
        """Wait for steps that were launched ahead, and apply cancellations."""
        try:
            while self._launched:
                self._finish_decode(None, ahead=False)
        except BaseException:
            self._recover()
            raise
        self._update_requests()

    def _update_requests(self) -> None:
        """Admit submitted requests to the scheduler, and remove cancelled ones."""
        while self._submitted:
            generation, group = self._submitted.popleft()
            if generation.done:
                continue  # cancelled
            if not generation.has_steps:
                generation.end_at_length()
            elif group is not None:
                self._groups[generation] = group
                self._add(group)
            else:
                self._rows[generation.sequence] = generation
                self.scheduler.add(generation.sequence)
        while self._cancelled:
            self._remove(self._cancelled.popleft())

    def _remove(self, generation: Generation) -> None:
        group = self._groups.pop(generation, None)
        for sequence in [generation.sequence] if group is None else group.sequences:
            if self._rows.pop(sequence, None) is not None or group is not None:
                self.scheduler.remove(sequence)

    def _finish_decode(self, recorder: StepRecorder | None, ahead: bool = True) -> None:
        """Take the oldest launched decode step, and deliver its results; see `Batcher`.

        Args:
            recorder: recorder of a step with draft tokens that is launched before the delivery.
            ahead: whether further steps may be launched.
        """
        if self._runs_on_device:
            self._finish_on_device(ahead and recorder is None)
            return
        drafts = has_drafts(self._launched[0])
        while ahead and not drafts and self.runner.can_run_ahead:
            following = self._following(self._launched[-1])
            if following is None:
                break
            self.runner.launch(following)
            self._launched.append(following)
        result, chunks = self.runner.take(), self._launched.popleft()
        if self.speculation is not None and drafts:
            began, self._began = self._began, time.perf_counter()
            self.speculation.note_step(chunks, self._began - began)
            sampled = result.ids.tolist()
            chunks, kept = self.speculation.accept(chunks, sampled)
            if ahead:  # first, since the device waits for it
                self._draft_ahead(chunks, [sampled[row] for row in kept], recorder)
            result = result.at(kept)
        self.scheduler.complete(chunks)
        self._finish(chunks, result)
        if self.speculation is not None and not drafts:
            own = self._device or self.speculation
            own.note_step(chunks, time.perf_counter() - self._began)

    def _finish_on_device(self, ahead: bool) -> None:
        """Take the oldest step of `DeviceDrafts`; ``ahead``: launch another one first."""
        device = self._device
        assert device is not None
        chunks, result = device.step(ahead and not (self._submitted or self._cancelled))
        if not device.waiting:
            self._launched.clear()
        began, self._began = self._began, time.perf_counter()
        device.note_drafts(self._began - began)
        self.scheduler.complete(chunks)
        self._finish(chunks, result)

    def _draft_ahead(
        self, chunks: Sequence[Chunk], sampled: list[int], recorder: StepRecorder | None
    ) -> None:
        """Launch the step after one with draft tokens, if it has some, too.

        The tokens ``sampled`` are appended to their sequences, but not delivered.
        """
        rows, first = dict[Generation, list[int]](), 0
        for chunk in chunks:
            row, count = self._rows.get(chunk.sequence), len(chunk.drafts) + 1
            ids, first = sampled[first : first + count], first + count
            if not isinstance(row, Generation) or row.may_end(ids):
                return
            rows[row] = ids
        own, device = self.speculation, self._device_for([*rows]) if recorder is None else None
        if own is None or device is not None or self._submitted or self._cancelled:
            return
        following = self.scheduler.following(chunks)
        if following is None:
            return
        for row, ids in rows.items():
            row.sequence.tokens.append(ids[-1])
            row.count, row.undelivered = row.count + len(ids), len(ids)
        following = own.extend(following, [*rows])
        if has_drafts(following):
            self.runner.decode(following, [*rows], recorder)
            self._launched.append(following)

    def _following(self, chunks: Sequence[Chunk]) -> list[Chunk] | None:
        """Return the decode step after ``chunks`` if it is known to be that of the same batch."""
        if self._submitted or self._cancelled:
            return None
        rows = list[Generation | Beam]()
        for chunk in chunks:
            row = self._rows.get(chunk.sequence)
            if row is None or row.ends_after(len(self._launched)):
                return None
            rows.append(row)
        own, device = self.speculation, self._device
        if device is not None and device.prepare(rows[0], len(self._launched)):
            return None
        if device is None and own is not None and any(own.choose(chunks, rows)):
            return None
        return self.scheduler.following(chunks)

    def _finish(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Deliver what the first ones of the completed ``chunks`` sampled.

        Row r of ``result`` belongs to the r-th token that the chunks sampled: one of each, and one
        for each accepted draft token.
        """
        self.steps += 1
        first, groups, faults = 0, dict[BeamGroup, None](), result.candidate_faults()
        for index, chunk in enumerate(chunks):
            sampled = range(first, first + len(chunk.drafts) + 1)
            first = sampled.stop
            row = self._rows.get(chunk.sequence)
            if row is None or _request_of(row).done:
                continue  # it ended after the step was launched
            if result.prompts and index in result.prompts:
                _request_of(row).add_prompt_logprobs(result.prompts[index])
            if chunk.stop <= chunk.sequence.prompt_tokens and row.count == 0:
                _request_of(row).prefilled(chunk.stop)
            if not chunk.samples:
                continue
            if not isinstance(row, Beam):
                self._deliver(row, result, sampled)
            elif sampled.start in faults:
                groups.pop(row.group, None)
                self._fail_search(row)
            else:
                row.receive(result, sampled.start)
                groups[row.group] = None
        if ready := [group for group in groups if group.ready]:
            self._advance(ready)

    def _deliver(self, generation: Generation, result: StepResult, sampled: range) -> None:
        """Deliver the tokens in the rows ``sampled``, of which all but the last were drafts."""
        asked = generation.sampling.logprobs
        for row in sampled:
            token, last = int(result.ids[row]), row == sampled[-1]
            error = result.errors.get(row) if result.errors else None
            error = error or generation.grammar_error(token)
            if error is not None:
                generation.fail(error)
            elif token < 0:
                self._non_finite.append(generation)
            else:
                if not last:
                    generation.accepted += 1
                elif not generation.undelivered:
                    generation.sequence.tokens.append(token)
                if not generation.push(token, None if asked is None else result.token(row, asked)):
                    continue
            self._remove(generation)
            return

    def _fail_search(self, beam: Beam) -> None:
        """End a search, the logits of one of whose beams are not finite."""
        generation = beam.group.generation
        generation.sequence = beam.sequence
        self._non_finite.append(generation)
        self._remove(generation)

    def _advance(self, groups: Sequence[BeamGroup]) -> None:
        """Let searches go on, the candidates of all of whose beams are known."""
        if copies := advance_searches(groups, self.scheduler, self._rows):
            self.runner.copy_blocks(copies)
        for group in groups:
            if not group.beams:
                group.finish()
                self._remove(group.generation)

    def make_room(self) -> None:
        """Let all running requests give up their blocks; they are computed again later."""
        self.scheduler.preempt_all()
        self.reset()


def _request_of(row: Generation | Beam) -> Generation:
    return row.group.generation if isinstance(row, Beam) else row
