"""Progress display on standard error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..terminal import escape_control
from .output import note

Show = Callable[[str, int, int], None]  # (description, amount done, total)

_INTERVAL_S = 10.0  # between lines, without a terminal


@contextmanager
def progress_line(what: str = "loading the model") -> Iterator[Show]:
    """Return a context manager with a callback (description, amount done, total).

    On a terminal it shows a bar. Otherwise it prints one line every 10 seconds: the progress
    reported last, or ``what`` if nothing was reported.
    """
    with _bar() if sys.stderr.isatty() else _Lines(what) as show:
        yield show


@contextmanager
def _bar() -> Iterator[Show]:
    """Show a bar for each description, and remove the bars at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(escape_control(what), total=total)
            bar.update(tasks[what], completed=done, total=total)

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

    def _show(self, what: str, done: int, total: int) -> None:
        self._line = f"{what}: {done} of {total}"

    def _print(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            note(self._line)
