"""What is shown while something takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..terminal import escape_control
from .output import note

Show = Callable[[str, int, int], None]  # what, done, total

_QUIET_S = 10.0  # without a terminal, before the first line and between two


@contextmanager
def progress_line(what: str = "loading the model") -> Iterator[Show]:
    """A callback (what, done, total) that shows progress on standard error.

    At a terminal it is a bar. Elsewhere nothing is shown for 10 seconds, then a line at most every
    10 seconds: of what was reported last, or of ``what`` if nothing was.
    """
    with _bar() if sys.stderr.isatty() else _Lines(what) as show:
        yield show


@contextmanager
def _bar() -> Iterator[Show]:
    """A bar for each thing that is reported, gone at the end."""
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
    """A thread that prints a line now and then, of what is under way."""

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
        while not self._over.wait(_QUIET_S):
            note(self._line)
