"""Thread that runs the steps of requests for which no thread waits."""

from __future__ import annotations

from threading import Lock, Thread, current_thread
from typing import Protocol

from .generation import Generation
from .step_lock import StepLock


class Engine(Protocol):
    """What the worker needs of `graphllm.engine.engine.Engine`, whose module imports this one."""

    lock: StepLock

    def step(self) -> bool: ...

    def settle(self) -> None: ...

    def cancel(self, generation: Generation) -> None: ...


class BackgroundWorker:
    """Runs steps in a thread that lives as long as there are requests in the background.

    The thread takes turns with the threads that wait for results of their own. It holds the only
    reference to the engine, so that the worker of an idle engine is no cycle.
    """

    def __init__(self) -> None:
        self._mutex = Lock()  # held briefly, never while a step runs
        self._generations: list[Generation] = []
        self._thread: Thread | None = None

    def add(self, engine: Engine, generation: Generation) -> None:
        """Run steps until ``generation`` has ended. May be called from any thread."""
        with self._mutex:
            self._generations.append(generation)
            if self._thread is None:
                thread = Thread(
                    target=self._run, args=(engine,), name="graphllm-worker", daemon=True
                )
                thread.start()
                self._thread = thread

    def join(self) -> None:
        """Wait until the thread has ended, which it does when its requests have."""
        thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    def _run(self, engine: Engine) -> None:
        while True:
            live = self._live()
            try:
                with engine.lock.hold("a request in the background"):
                    if live:
                        engine.step()
                    else:
                        engine.settle()  # releases the blocks of cancelled requests
            except Exception as error:
                for generation in live:
                    if not generation.done:
                        generation.fail(error)
                    engine.cancel(generation)
            if not live and self._ends():
                return

    def _live(self) -> list[Generation]:
        """Return the requests that have not ended, and forget the others."""
        with self._mutex:
            self._generations = [each for each in self._generations if not each.done]
            return self._generations[:]

    def _ends(self) -> bool:
        """Give up the thread, unless there are requests again."""
        with self._mutex:
            if not self._generations:
                self._thread = None
            return self._thread is None
