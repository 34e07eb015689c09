"""Bills of requests while an engine serves them: the recorder of their steps (`Meter`).

Steps are recorded only while a request that asks for a bill has not ended. The time of a step is
divided by the rules of `request_costs`. What the time of a request is charged to, in order:

- the check and the tokenization of its prompt: ``prompt``;
- from its submission to its first step: ``queue``;
- each step that computes it: its own share of the ops, gaps and host time; the shares of the other
  requests of the step are ``other requests``;
- the prediction of draft tokens before a step: ``drafts``, by the number of rows with drafts;
- between two of its steps: host time, divided as the step after it; or ``queue`` if the engine ran
  other steps meanwhile; or ``preemption`` if it had to give up its blocks;
- from its last step to its end: host time, divided as that step. The charging of the last steps is
  part of it.

The parts of each interval add up to the interval, so the rows add up to the wall time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from threading import Event, RLock, get_ident
from typing import TYPE_CHECKING, NamedTuple

from ..engine.bill import Bill
from .accounting import run_time
from .record import Recorder, Run
from .request_costs import add_ops
from .step_shares import StepShares

if TYPE_CHECKING:
    import numpy as np

    from ..compiler.plan import Plan
    from ..engine.batcher import Batcher
    from ..engine.generation import Delivery
    from ..engine.sequence import ActiveSequence, Chunk
    from ..runtime.recorder import BoundSegments

_PENDING_RUNS = 16  # recorded before they are charged, which waits for the device


class Account:
    """A request with a bill, from its submission to its end.

    Args:
        meter: records the steps.
        samples: number of generations of the request.
        began: when the check of the request began, by `time.perf_counter_ns`.
    """

    def __init__(self, meter: Meter, samples: int, began: int) -> None:
        self._meter, self._left = meter, samples
        self._at = time.perf_counter_ns()  # up to which the time is charged
        self._bill, self._closed = Bill(prompt_ns=self._at - began), Event()
        self._last, self._share = -1, 0.0  # number of the last own run, and share of its chunks
        self._preemptions = 0
        self._computed: dict[ActiveSequence, int] = {}  # where its tokens end
        self._lost: dict[ActiveSequence, int] = {}  # the same, before the last preemption

    def watch(self, delivery: Delivery) -> Delivery:
        """Return a delivery for the generations of the request, the last of which closes it."""

        def listener(last: bool) -> None:
            if last:
                self._left -= 1
                if not self._left:
                    self._meter.close(self)
            delivery.listener(last)

        return replace(delivery, account=self, listener=listener)

    def cancel(self) -> None:
        """End the bill with what was charged so far."""
        self._left = 0
        self._meter.forget(self)

    def bill(self) -> Bill:
        """Return the bill of a request that has ended."""
        self._closed.wait()
        return self._bill

    def charge(
        self, runs: Sequence[Run], number: int, indices: Sequence[int], names: Sequence[str],
        parts: np.ndarray, preemptions: int, predicting: Sequence[int],
    ) -> None:  # fmt: skip
        """Charge consecutive runs of the same sequences, the request's among them.

        Args:
            runs: the runs.
            number: number of the first run in the order of the meter.
            indices: indices of the chunks of the request.
            names: names of the ops.
            parts: shares of the chunks in all runs, see `StepShares.divide`.
            preemptions: how often a sequence of the request had been preempted before the runs.
            predicting: nanoseconds before each run in which its draft tokens were predicted.
        """
        bill, own = self._bill, parts[:, list(indices)].sum(1)
        share = self._share = len(indices) / len(runs[0].chunks)
        draft_share = _draft_share(runs[0].chunks, indices)
        add_ops(bill.ops, names, own)
        bill.others_ns -= float(own[0].sum())
        for run, drafting in zip(runs, predicting):
            (host, gaps, busy), self._at = run_time(run, self._at)
            drafting = min(drafting, host)
            bill.draft_ns += drafting * draft_share
            bill.others_ns += drafting * (1 - draft_share)
            between = host - drafting  # to be divided
            if preemptions > self._preemptions:
                bill.preemption_ns, between = bill.preemption_ns + between, 0
                self._lost = dict(self._computed)
            elif self._last < 0 or self._last + 1 != number:
                bill.queue_ns, between = bill.queue_ns + between, 0
            self._last, self._preemptions, number = number, preemptions, number + 1
            bill.host_ns += between * share
            bill.gaps_ns += gaps * share
            bill.others_ns += (between + gaps) * (1 - share) + busy
            for chunk in (run.chunks[index] for index in indices):
                own_sequence, start, stop = chunk[:3]
                sequence = own_sequence.origin or own_sequence
                bill.tokens += stop - start
                bill.recomputed_tokens += max(0, min(stop, self._lost.get(sequence, 0)) - start)
                if own_sequence.tokens[start:stop] == sequence.tokens[start:stop]:  # else rejected
                    self._computed[sequence] = max(stop, self._computed.get(sequence, 0))
        bill.steps += len(runs)

    def finish(self, end: int) -> None:
        """Charge the time up to ``end``, and hand out the bill."""
        rest = max(0, end - self._at)
        if self._last < 0:
            self._bill.queue_ns += rest
        else:
            self._bill.host_ns += rest * self._share
            self._bill.others_ns += rest * (1 - self._share)
        self._closed.set()


class _Mark(NamedTuple):
    """What a run is charged by.

    Attributes:
        paying: indices of the chunks of each request with a bill, and its preemptions.
        predicting: nanoseconds in which the draft tokens of the run were predicted.
    """

    paying: Mapping[Account, tuple[list[int], int]]
    predicting: int


class Meter:
    """Records the steps of an engine while requests with a bill run, and charges them.

    It is the engine's `Batcher.meter` while there are such requests. `open`, `forget` and
    `Account.bill` may be called from any thread; the thread that runs a step calls the rest.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._open: set[Account] = set()
        self._mutex = RLock()  # of `_open`; the garbage collector may call `forget` in any thread
        self._recorder, self._marks = Recorder(), list[_Mark]()  # of runs to be charged
        self._next = _Mark({}, 0)  # of the next run
        self._shares: dict[Plan, StepShares] = {}
        self._charged = 0  # runs
        self._thread = 0  # that began the last step

    def open(self, samples: int, began: int) -> Account:
        """Begin the bill of a request; submit its generations next, see `Account.watch`.

        For the arguments see `Account`.
        """
        account = Account(self, samples, began)
        with self._mutex:
            self._open.add(account)
            self._batcher.meter = self
        return account

    def forget(self, account: Account) -> None:
        """End a bill; stop to record if it was the only one."""
        with self._mutex:
            if account not in self._open:
                return
            self._open.remove(account)
            if not self._open:
                self._batcher.meter = None
        account.finish(time.perf_counter_ns())

    def close(self, account: Account) -> None:
        """Charge the steps so far, and end a bill.

        A request that another thread ends, because of an error or a cancellation, is not charged
        for the last steps, since the next one may be running.
        """
        try:
            if self._thread == get_ident():
                self._charge()
        finally:  # `Account.bill` waits for the end
            with self._mutex:
                self._open.discard(account)
                if not self._open:
                    self._batcher.meter = None
            account.finish(time.perf_counter_ns())

    # -- steps
    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Note the chunks that the next run computes, and who pays for them."""
        marks: dict[Account, tuple[list[int], int]] = {}
        for index, chunk in enumerate(chunks):
            account, times = chunk.sequence.account, chunk.sequence.preemptions
            if isinstance(account, Account):
                indices, most = marks.get(account, ([], 0))
                marks[account] = [*indices, index], max(most, times)
        self._thread = get_ident()
        speculation = self._batcher.speculation
        predicting = 0 if speculation is None else round(speculation.predicting_s * 1e9)
        self._next = _Mark(marks, predicting)
        self._recorder.begin_step(chunks)

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` of ``plan`` with timestamps; ``env``: values of the Vars."""
        self._recorder.run(plan, segments, env)
        self._marks.append(self._next)
        self._next = _Mark({}, 0)
        if len(self._marks) >= _PENDING_RUNS:
            self._charge()

    def _charge(self) -> None:
        """Charge the recorded runs."""
        recorder, marks = self._recorder, self._marks
        self._recorder, self._marks = Recorder(), []
        for _, group in groupby(zip(recorder.runs, marks), _alike):
            own = list(group)
            self._charge_runs([run for run, _ in own], [mark for _, mark in own])
            self._charged += len(own)

    def _charge_runs(self, runs: Sequence[Run], marks: Sequence[_Mark]) -> None:
        """Charge consecutive runs of the same sequences."""
        paying = {a: own for a, own in marks[0].paying.items() if a in self._open}
        if not paying:
            return
        plan = runs[0].plan
        if plan not in self._shares:
            self._shares[plan] = StepShares(plan)
        shares = self._shares[plan]
        parts, predicting = shares.divide(runs), [mark.predicting for mark in marks]
        for account, (indices, preemptions) in paying.items():
            account.charge(
                runs, self._charged, indices, shares.names, parts, preemptions, predicting
            )


def _draft_share(chunks: Sequence[Chunk], indices: Sequence[int]) -> float:
    """Return the share of the chunks ``indices`` among those of sequences with draft tokens."""
    drafted = {index for index, chunk in enumerate(chunks) if chunk.sequence.origin is not None}
    return len(drafted.intersection(indices)) / len(drafted) if drafted else 0.0


def _alike(recorded: tuple[Run, _Mark]) -> tuple[object, ...]:
    """Return a key that runs have in common whose chunks differ by their positions only."""
    run, mark = recorded
    chunks = [
        (chunk.sequence.origin or chunk.sequence, chunk.stop - chunk.start, chunk.samples)
        for chunk in run.chunks
    ]
    return run.plan, chunks, [preemptions for _, preemptions in mark.paying.values()]
