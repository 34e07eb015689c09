"""Fair lock of one model: one request computes at a time, the others wait in order of arrival."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import RLock, get_ident

from ..errors import RequestError

# A stream that its caller does not continue for this long loses the model to a waiting request.
IDLE_TIMEOUT_S = 0.2


class Claim:
    """One request's claim to the model; see `RequestLock`.

    Attributes:
        what: the kind of request, for error messages.
        running: whether a step of the request is running, in the thread `thread`.
        paused_at: end of the last step, on the clock of `time.monotonic`.
        released: whether the request takes no more steps.
        waited_s: seconds spent waiting for other requests.
        wakeups: receives an item when the waiting thread must check again.
    """

    __slots__ = ("paused_at", "released", "running", "thread", "waited_s", "wakeups", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.running = self.released = False
        self.paused_at, self.waited_s, self.thread = 0.0, 0.0, 0
        self.wakeups: SimpleQueue[None] = SimpleQueue()


class RequestLock:
    """Lock that one request owns from its first step to its last.

    Requests of several threads wait for each other in order of arrival. Between two of its steps an
    owner loses the model to a waiting request in two cases: after it was idle for `IDLE_TIMEOUT_S`
    (an abandoned stream), or at once if the waiting request comes from the thread that ran the
    owner's last step, since that thread cannot continue the owner while it waits. The former owner
    can claim the model again; `Engine.generate` then computes its tokens again. A request from
    within a step of the same thread (from a callback) would wait for itself and is refused.

    `pause` and `release` acquire no mutex, because the garbage collector may call them at any point
    of any thread when it closes an abandoned stream.
    """

    def __init__(self) -> None:
        self._mutex = RLock()  # held briefly, never while a step runs
        self._owner: Claim | None = None
        self._waiting: deque[Claim] = deque()
        self.closed = False

    def acquire(self, claim: Claim) -> None:
        """Wait for the model and begin a step; return at once if a step of the claim is running.

        The caller must `release` the claim even if this method raises.

        Raises:
            RequestError: the call comes from within a step of the same thread, or the model is
                closed.
        """
        if claim.running:
            return
        me = get_ident()
        with self._mutex:
            self._check_allowed(me)
            owner = self._owner
            free = self._first_waiting() is None and self._seconds_until_free(me) <= 0
            if owner is claim or free:
                self._grant(claim, me)
                return
            if owner is not None and owner.thread == me:
                owner.paused_at = -math.inf  # its thread waits here and cannot continue it
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
        """End a step. The claim keeps the model until another request takes it."""
        claim.paused_at = time.monotonic()
        claim.running = False

    def release(self, claim: Claim) -> None:
        """Give up the model if the claim owns it. May be called more than once."""
        claim.released, claim.running = True, False
        self._wake_first()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Own the model for the duration of a ``with`` block. RequestError: see `acquire`."""
        claim = Claim(what)
        try:
            self.acquire(claim)
            yield
        finally:
            self.release(claim)

    def close(self) -> None:
        """Refuse all further requests, the waiting ones included."""
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
        """Return the seconds until the model can be taken from its owner, as of now."""
        owner = self._owner
        if owner is None or owner.released:
            return 0.0
        if owner.running:
            return IDLE_TIMEOUT_S  # check again after that
        if owner.thread == me:
            return 0.0
        return owner.paused_at + IDLE_TIMEOUT_S - time.monotonic()

    def _try_grant(self, claim: Claim, me: int) -> float:
        """Grant the model to a waiting claim if it is free; else return the seconds to wait."""
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
        """Return the first waiting claim, dropping those released by an interrupt meanwhile."""
        while self._waiting and self._waiting[0].released:
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _grant(self, claim: Claim, me: int) -> None:
        self._owner, claim.thread, claim.running = claim, me, True

    def _wake_first(self) -> None:
        """Let the first waiting claim check whether the model is free."""
        for claim in self._waiting.copy():
            if not claim.released:
                claim.wakeups.put(None)
                return
