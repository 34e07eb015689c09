"""Progress display on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from .terminal import escape_control, note

_INTERVAL_S = 10.0  # between lines, without a terminal
_REFRESH_S = 0.1  # between updates of the rate


class Show(Protocol):
    """Shows a description, the amount done, the total, and optionally a rate in words."""

    def __call__(self, what: str, done: int, total: int, rate: str = "") -> None: ...


@contextmanager
def progress_line(what: str = "loading the model") -> Iterator[Show]:
    """Return a context manager with a callback (description, amount done, total).

    On a terminal it shows a bar. Otherwise it prints one line every 10 seconds: the progress
    reported last, or ``what`` if nothing was reported.
    """
    with _bar() if sys.stderr.isatty() else _Lines(what) as show:
        yield show


@contextmanager
def request_progress(
    total: int, computed: Callable[[], tuple[int, int]], wanted: bool | None = None
) -> Iterator[Callable[[], None]]:
    """Return a context manager with a callback that updates the progress of requests.

    Args:
        total: number of requests.
        computed: returns the number of requests that have ended, and of tokens sampled so far.
        wanted: whether to show the progress, see `progress_line`; by default only if there are
            several requests, and only at a terminal.
    """
    if not (total > 1 and sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    start, due = time.perf_counter(), 0.0
    with progress_line("generating") as show:

        def update() -> None:
            nonlocal due
            now = time.perf_counter()
            if now >= due:
                due = now + _REFRESH_S
                ended, tokens = computed()
                show("generating", ended, total, f"{tokens / (now - start):.1f} tok/s")

        yield update


@contextmanager
def _bar() -> Iterator[Show]:
    """Show a bar for each description, and remove the bars at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int, rate: str = "") -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(escape_control(what), total=total, rate="")
            rate = rate and f"{done} of {total}, {rate}"
            bar.update(tasks[what], completed=done, total=total, rate=rate)

        yield show


class _Lines:
    """A thread that prints the current progress at intervals."""

    def __init__(self, what: str) -> None:
        self._line = what
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> Show:
        self._thread.start()
        return self._show

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        self._thread.join()

    def _show(self, what: str, done: int, total: int, rate: str = "") -> None:
        self._line = f"{what}: {done} of {total}" + (rate and f", {rate}")

    def _print(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            note(self._line)
