"""The lock of a model: one request at a time computes with it, the others wait in order."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import RLock, get_ident

from ..errors import RequestError

IDLE_S = 0.2  # a stream that nobody continues for so long gives the model up to a waiting request


class Claim:
    """One request's claim to the model: ``what`` it is, for errors; see `RequestLock`.

    ``running``: a step of it runs now, in ``thread``. ``since``: when its last step ended, on the
    clock of `time.monotonic`. ``over``: it takes no more steps. ``waited_s``: seconds that it
    waited for other requests.
    """

    __slots__ = ("bell", "over", "running", "since", "thread", "waited_s", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.running = self.over = False
        self.since, self.waited_s, self.thread = 0.0, 0.0, 0
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung when it is worth looking again


class RequestLock:
    """Gives a model to one request at a time.

    A request owns the model from its first step until it is over, so that the requests of several
    threads wait for each other, in the order in which they came. An owner between two steps loses
    the model to a waiting request in two cases: when it stays idle for `IDLE_S` (a stream left half
    way), or at once when the waiting request comes from the thread that ran its last step (which
    cannot continue it meanwhile). It can claim the model again: `Engine.generate` then computes its
    tokens anew. A request that comes from a thread in the middle of a step, so from a callback, is
    refused, since it would wait for itself.

    `pause` and `finish` take no lock, since the garbage collector may call them, at any point of
    any thread, when it closes an abandoned stream.
    """

    def __init__(self) -> None:
        self._mutex = RLock()  # held for moments, never while a step runs
        self._owner: Claim | None = None
        self._waiting: deque[Claim] = deque()
        self.closed = False

    def take(self, claim: Claim) -> None:
        """Own the model and begin a step, after the requests that came before; nothing if the
        claim's step runs already.

        RequestError from within a step of the same thread, and where the model is closed. Whatever
        this raises, the caller must `finish` the claim.
        """
        if claim.running:
            return
        me = get_ident()
        with self._mutex:
            self._refuse(me)
            owner = self._owner
            if owner is claim or (self._first() is None and self._free_in(me) <= 0):
                self._grant(claim, me)
                return
            if owner is not None and owner.thread == me:
                owner.since = -math.inf  # its thread waits here, and does not continue it
                self._ring()
            self._waiting.append(claim)
        start = time.monotonic()
        try:
            while (seconds := self._granted_in(claim, me)) > 0:
                with suppress(Empty):
                    claim.bell.get(timeout=seconds)
        finally:
            claim.waited_s += time.monotonic() - start

    def pause(self, claim: Claim) -> None:
        """End a step. The claim stays the owner while nobody else takes the model."""
        claim.since = time.monotonic()
        claim.running = False

    def finish(self, claim: Claim) -> None:
        """Give the model up, if the claim has it. May be called more than once."""
        claim.over, claim.running = True, False
        self._ring()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Own the model for a block that is one request. RequestError as `take`."""
        claim = Claim(what)
        try:
            self.take(claim)
            yield
        finally:
            self.finish(claim)

    def close(self) -> None:
        """Refuse all requests from now on, those that wait included."""
        self.closed = True
        for claim in self._waiting.copy():
            claim.bell.put(None)

    def _refuse(self, me: int) -> None:
        owner = self._owner
        if self.closed:
            raise RequestError("the model is closed")
        if owner is not None and owner.running and owner.thread == me:
            raise RequestError(
                f"{owner.what} of this model is running and has called back: a callback cannot "
                "begin another request on the same model"
            )

    def _free_in(self, me: int) -> float:
        """Seconds until the model can be taken from its owner, as things stand."""
        owner = self._owner
        if owner is None or owner.over:
            return 0.0
        if owner.running:
            return IDLE_S  # then it is time to look again
        if owner.thread == me:
            return 0.0
        return owner.since + IDLE_S - time.monotonic()

    def _granted_in(self, claim: Claim, me: int) -> float:
        """Grant the model to a waiting claim if it can have it now; else seconds to wait."""
        with self._mutex:
            self._refuse(me)
            if self._first() is not claim:
                return IDLE_S
            seconds = self._free_in(me)
            if seconds <= 0:
                self._waiting.popleft()
                self._grant(claim, me)
            return seconds

    def _first(self) -> Claim | None:
        """The first of those that wait and are not over (interrupted while they waited)."""
        while self._waiting and self._waiting[0].over:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _grant(self, claim: Claim, me: int) -> None:
        self._owner, claim.thread, claim.running = claim, me, True

    def _ring(self) -> None:
        """Have the first of those that wait look again."""
        for claim in self._waiting.copy():
            if not claim.over:
                claim.bell.put(None)
                return
