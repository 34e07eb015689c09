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

# A stream that is not continued for so long gives the model up to a waiting request.
IDLE_TIMEOUT_S = 0.2


class Claim:
    """One request's claim to the model: ``what`` it is, for errors; see `RequestLock`.

    ``running``: a step of it runs now, in ``thread``. ``paused_at``: when its last step ended, by
    `time.monotonic`. ``released``: it takes no more steps. ``waited_s``: seconds that it
    waited for other requests.
    """

    __slots__ = ("paused_at", "released", "running", "thread", "waited_s", "wakeups", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.running = self.released = False
        self.paused_at, self.waited_s, self.thread = 0.0, 0.0, 0
        self.wakeups: SimpleQueue[None] = SimpleQueue()  # rung when it is worth looking again


class RequestLock:
    """Gives a model to one request at a time.

    A request owns the model from its first step until it is over, so that the requests of several
    threads wait for each other, in the order in which they came. An owner between two steps loses
    the model to a waiting request in two cases: when it stays idle for `IDLE_TIMEOUT_S` (an
    abandoned stream), or at once when the waiting request comes from the thread that ran its last
    step (which cannot continue it meanwhile). It can claim the model again: `Engine.generate` then computes its
    tokens anew. A request that comes from a thread in the middle of a step, so from a callback, is
    refused, since it would wait for itself.

    `pause` and `release` take no lock, since the garbage collector may call them, at any point of
    any thread, when it closes an abandoned stream.
    """

    def __init__(self) -> None:
        self._mutex = RLock()  # held for moments, never while a step runs
        self._owner: Claim | None = None
        self._waiting: deque[Claim] = deque()
        self.closed = False

    def acquire(self, claim: Claim) -> None:
        """Own the model and begin a step, after the requests that came before; nothing if the
        claim's step runs already.

        RequestError from within a step of the same thread, and where the model is closed. Whatever
        this raises, the caller must `release` the claim.
        """
        if claim.running:
            return
        me = get_ident()
        with self._mutex:
            self._check_allowed(me)
            owner = self._owner
            if owner is claim or (
                self._first_waiting() is None and self._seconds_until_free(me) <= 0
            ):
                self._grant(claim, me)
                return
            if owner is not None and owner.thread == me:
                owner.paused_at = -math.inf  # its thread waits here, and does not continue it
                self._wake_first()
            self._waiting.append(claim)
        start = time.monotonic()
        try:
            while (seconds := self._try_grant(claim, me)) > 0:
                with suppress(Empty):
                    claim.wakeups.get(timeout=seconds)
        finally:
            claim.waited_s += time.monotonic() - start

    def pause(self, claim: Claim) -> None:
        """End a step. The claim stays the owner while nobody else takes the model."""
        claim.paused_at = time.monotonic()
        claim.running = False

    def release(self, claim: Claim) -> None:
        """Give the model up, if the claim has it. May be called more than once."""
        claim.released, claim.running = True, False
        self._wake_first()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Own the model for a block that is one request. RequestError as `acquire`."""
        claim = Claim(what)
        try:
            self.acquire(claim)
            yield
        finally:
            self.release(claim)

    def close(self) -> None:
        """Refuse all requests from now on, those that wait included."""
        self.closed = True
        for claim in self._waiting.copy():
            claim.wakeups.put(None)

    def _check_allowed(self, me: int) -> None:
        owner = self._owner
        if self.closed:
            raise RequestError("the model is closed")
        if owner is not None and owner.running and owner.thread == me:
            raise RequestError(
                f"{owner.what} of this model is running and has called back: a callback cannot "
                "begin another request on the same model"
            )

    def _seconds_until_free(self, me: int) -> float:
        """Seconds until the model can be taken from its owner, as things stand."""
        owner = self._owner
        if owner is None or owner.released:
            return 0.0
        if owner.running:
            return IDLE_TIMEOUT_S  # then it is time to look again
        if owner.thread == me:
            return 0.0
        return owner.paused_at + IDLE_TIMEOUT_S - time.monotonic()

    def _try_grant(self, claim: Claim, me: int) -> float:
        """Grant the model to a waiting claim if it can have it now; else seconds to wait."""
        with self._mutex:
            self._check_allowed(me)
            if self._first_waiting() is not claim:
                return IDLE_TIMEOUT_S
            seconds = self._seconds_until_free(me)
            if seconds <= 0:
                self._waiting.popleft()
                self._grant(claim, me)
            return seconds

    def _first_waiting(self) -> Claim | None:
        """The first of those that wait and are not over (interrupted while they waited)."""
        while self._waiting and self._waiting[0].released:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _grant(self, claim: Claim, me: int) -> None:
        self._owner, claim.thread, claim.running = claim, me, True

    def _wake_first(self) -> None:
        """Have the first of those that wait look again."""
        for claim in self._waiting.copy():
            if not claim.released:
                claim.wakeups.put(None)
                return
