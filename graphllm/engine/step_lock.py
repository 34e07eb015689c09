"""Lock of one model: one thread at a time runs a step, or holds the model for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock, get_ident

from ..errors import RequestError

Wakeups = SimpleQueue[None]  # of a waiting thread: an item makes it check again


class StepLock:
    """A fair lock whose waiting threads may be served by the thread that holds it.

    Requests of several threads share one batch. The thread that holds the lock runs a step, which
    computes tokens for all of them; a waiting thread leaves as soon as its own tokens are there,
    and otherwise takes the lock in order of arrival. A request from within a step of the same
    thread (from a callback) would wait for itself and is refused.
    """

    def __init__(self) -> None:
        self._mutex = Lock()  # held briefly, never while a step runs
        self._holder, self._what = 0, ""  # thread that holds the lock, 0 if none; what it does
        self._waiting: deque[Wakeups] = deque()
        self.closed = False

    def acquire(self, what: str, served: Callable[[], bool], wakeups: Wakeups) -> bool:
        """Wait for the lock; return True once it is held, or False once ``served()`` is true.

        Args:
            what: the caller's activity, for error messages.
            served: whether the caller has what it waits for.
            wakeups: gets an item when ``served()`` may have changed.

        Raises:
            RequestError: the call comes from within a step of the same thread, or the model is
                closed.
        """
        waiting = False
        while not wakeups.empty():  # of results that are there already
            wakeups.get()
        try:
            while True:
                with self._mutex:
                    if served():
                        return False
                    if self.closed:
                        raise RequestError("the model is closed")
                    self.check_callback()
                    first = self._waiting[0] is wakeups if waiting else not self._waiting
                    if not self._holder and first:
                        self._holder, self._what = get_ident(), what
                        return True
                    if not waiting:
                        waiting = True  # first: an interrupt may follow the other statement
                        self._waiting.append(wakeups)
                wakeups.get()
        finally:
            if waiting:
                with self._mutex:
                    if wakeups in self._waiting:
                        self._waiting.remove(wakeups)
                    self._wake_first()

    def release(self, thread: int | None = None) -> None:
        """Give up the lock; the next waiting thread takes it.

        It has no effect unless ``thread`` holds the lock, by default the calling one.
        """
        with self._mutex:
            if self._holder == (get_ident() if thread is None else thread):
                self._holder = 0
            self._wake_first()

    def run(
        self, what: str, call: Callable[[], object], served: Callable[[], bool], wakeups: Wakeups
    ) -> None:
        """Call ``call`` with the lock, unless ``served()`` is true before. See `acquire`.

        An interrupt leaves the lock free, wherever it comes. Python looks for signals at the
        beginning of each function, that of `release` included.
        """
        self.check_callback()  # if the lock is held from here on, it is held by this call
        try:
            if self.acquire(what, served, wakeups):
                call()
        finally:
            try:
                self.release()
            except BaseException:
                self.release()
                raise

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Hold the model for the duration of a ``with`` block. RequestError: see `acquire`."""
        thread = get_ident()  # which may not be the one that ends an abandoned block
        self.check_callback()
        try:
            self.acquire(what, lambda: False, SimpleQueue())
            yield
        finally:
            try:  # as in `run`
                self.release(thread)
            except BaseException:
                self.release(thread)
                raise

    def close(self) -> None:
        """Refuse all further requests, the waiting ones included."""
        self.closed = True
        for wakeups in list(self._waiting):
            wakeups.put(None)

    def check_callback(self) -> None:
        """Raise RequestError if the call comes from within a step of the same thread."""
        if self._holder == get_ident():
            raise RequestError(
                f"{self._what} of this model is running and has called back: a callback cannot "
                "begin another request on the same model"
            )

    def _wake_first(self) -> None:
        if self._waiting and not self._holder:
            self._waiting[0].put(None)
