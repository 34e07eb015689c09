"""Models that are loaded when they are needed, within a bound on their memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from ..api import LLM
from ..errors import RequestError
from ..runtime.executor import Progress
from ..terminal import escape_control, note
from .app import Model
from .errors import ApiError, log_failure
from .metrics import Metrics


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. Both functions run in a thread, and raise GraphllmError.

    Attributes:
        predict_bytes: returns the predicted memory of the loaded model.
        load: loads it, and calls the given function during long work, which may raise.
    """

    predict_bytes: Callable[[], int]
    load: Callable[[Progress], Model]


@dataclass
class _Entry:
    """A model of the pool.

    Attributes:
        source: see `ModelSource`.
        metrics: counted as long as the server runs.
        model, app: the loaded model and its application; None if it is not loaded.
        nbytes: predicted memory of the loaded model.
        users: requests that run or wait for the model; an idle model has none.
        last_used: number of the use that ended last.
        loading: the task that loads the model, and returns why it failed.
        failed: whether the last attempt to load it failed.
    """

    source: ModelSource
    metrics: Metrics = field(default_factory=Metrics)
    model: Model | None = None
    app: ASGIApp | None = None
    nbytes: int = 0
    users: int = 0
    last_used: int = 0
    loading: asyncio.Task[ApiError | None] | None = None
    failed: bool = False

    def unload(self) -> Model:
        """Forget the loaded model, and return it."""
        assert self.model is not None
        model, self.model, self.app, self.metrics.llm = self.model, None, None, None
        return model


class ModelPool:
    """Loads models at their first use, one at a time, and unloads idle ones for others.

    All methods but `load_first` and `close` are for the event loop.

    Args:
        sources: the models by name.
        make_app: returns the application of a loaded model with a name, which counts in metrics.
        budget: predicted bytes of all loaded models at most; None for no bound.
        timeout_s: seconds that a request waits for its model.
    """

    def __init__(
        self,
        sources: Mapping[str, ModelSource],
        make_app: Callable[[str, Model, Metrics], ASGIApp],
        budget: int | None = None,
        timeout_s: float = 300,
    ) -> None:
        self._entries = {name: _Entry(source) for name, source in sources.items()}
        self._make_app, self._budget, self._timeout_s = make_app, budget, timeout_s
        self._worker = ThreadPoolExecutor(1, "model loader")
        self._lock = asyncio.Lock()  # held while a model is loaded
        self._released = asyncio.Event()
        self._uses = itertools.count(1)
        self._closing = False

    @property
    def metrics(self) -> dict[str, Metrics]:
        """The metrics of all models."""
        return {name: entry.metrics for name, entry in self._entries.items()}

    def loaded(self, name: str) -> Model | None:
        """Return a model; None if it is not loaded."""
        entry = self._entries[name]
        return None if entry.app is None else entry.model

    def state(self, name: str) -> dict[str, Any]:
        """Return ``status`` of a model in ``/v1/models``, as llama.cpp's server has it."""
        entry = self._entries[name]
        if entry.app is not None:
            return {"value": "loaded"}
        value = "unloaded" if entry.loading is None else "loading"
        return {"value": value, "failed": True} if entry.failed else {"value": value}

    def load_first(self, name: str, progress: Progress) -> None:
        """Load a model before the event loop runs. GraphllmError: that fails.

        ``progress``: called during long work.
        """
        entry = self._entries[name]
        if self._budget is not None:
            entry.nbytes = entry.source.predict_bytes()
            _check_fits(entry.nbytes, self._budget)
        self._load_model(name, entry, progress)
        self._serve(name, entry)

    # -- use
    async def acquire(self, name: str) -> ASGIApp:
        """Return the application of a model, loaded if need be; it stays loaded until `release`.

        ApiError: it cannot be loaded, or not in time.
        """
        entry = self._entries[name]
        entry.users += 1
        try:
            if entry.app is None:
                await self._wait(name, entry)
            assert entry.app is not None
            return entry.app
        except BaseException:
            self.release(name)
            raise

    def release(self, name: str) -> None:
        """End the use of a model that `acquire` returned."""
        entry = self._entries[name]
        entry.users -= 1
        entry.last_used = next(self._uses)
        self._released.set()

    async def _wait(self, name: str, entry: _Entry) -> None:
        """Wait until a model is loaded. ApiError: see `acquire`."""
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(name, entry))
        # Not `wait_for`, which before Python 3.12 ignores a cancellation as the load ends.
        done, _ = await asyncio.wait((entry.loading,), timeout=self._timeout_s)
        if not done:
            raise _busy(f"the model {name!r} is not loaded yet; try again later")
        if (error := done.pop().result()) is not None:
            raise error

    # -- loading
    async def _load(self, name: str, entry: _Entry) -> ApiError | None:
        """Load a model; return what its requests get if that fails."""
        try:
            async with self._lock:
                if self._budget is not None:
                    entry.nbytes = await self._in_thread(entry.source.predict_bytes)
                    await self._make_room(name, entry.nbytes, self._budget)
                await self._in_thread(partial(self._load_model, name, entry, self._progress))
                self._serve(name, entry)
            return None
        except ApiError as error:
            return error
        except Exception as error:
            entry.failed = True
            if entry.model is not None:  # it was loaded, but has no application
                await self._in_thread(entry.unload().close)
            log_failure(error, f"the model {name!r} cannot be loaded")
            text = f"the model {name!r} cannot be loaded; the log of the server says why"
            return ApiError(500, text, "model", "model_load_failed")
        finally:
            entry.loading = None

    async def _make_room(self, name: str, needed: int, budget: int) -> None:
        """Unload idle models until ``needed`` bytes are left of the budget. ApiError."""
        _check_fits(needed, budget)
        until = time.monotonic() + self._timeout_s
        while True:
            loaded = [each for each in self._entries.values() if each.app is not None]
            if sum(each.nbytes for each in loaded) + needed <= budget:
                return
            if idle := [each for each in loaded if not each.users]:
                model = min(idle, key=lambda each: each.last_used).unload()
                gc.unfreeze()  # frozen when it was loaded, and what remains of it may be a cycle
                await self._in_thread(model.close)
                continue
            self._released.clear()
            try:
                left = max(0.0, until - time.monotonic())
                await asyncio.wait_for(self._released.wait(), left)
            except asyncio.TimeoutError:
                text = f"no memory is left for the model {name!r}, since others are in use"
                raise _busy(f"{text}; try again later") from None

    @staticmethod
    def _load_model(name: str, entry: _Entry, progress: Progress) -> None:
        start = time.monotonic()
        entry.model = entry.source.load(progress)
        took = time.monotonic() - start
        note(f"note: the model {escape_control(name)} was loaded in {took:.1f} s")

    def _serve(self, name: str, entry: _Entry) -> None:
        """Make the application of a model that was loaded."""
        assert entry.model is not None
        entry.metrics.llm = entry.model if isinstance(entry.model, LLM) else None
        entry.app, entry.failed = self._make_app(name, entry.model, entry.metrics), False

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._closing:
            raise RequestError("the server is shutting down")

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)

    def close(self) -> None:
        """Close all models, after the event loop has ended."""
        self._closing = True
        self._worker.shutdown(cancel_futures=True)
        for entry in self._entries.values():
            if entry.model is not None:
                entry.unload().close()


def _check_fits(needed: int, budget: int) -> None:
    """Raise RequestError if a model needs more bytes than the budget has."""
    if needed > budget:
        text = f"the model needs {needed / 1e9:.2f} GB of a budget of {budget / 1e9:.2f} GB"
        raise RequestError(text)


def _busy(text: str) -> ApiError:
    return ApiError(503, text, "model", "server_overloaded", {"retry-after": "1"})
