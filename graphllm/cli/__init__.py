"""The command line: one module for each verb, or a few; ``graphllm --help`` lists them.

Errors are one line on standard error with exit code 1 (2 for wrong usage); a traceback shows only
with GRAPHLLM_DEBUG set. Nothing here computes: each verb calls the Python API and prints.
"""

from __future__ import annotations

import os
import sys

import typer

from ..debug import debug_level
from ..errors import GraphllmError
from ..family import user_line
from ..scopes import shown_line
from . import bench, chat, compare, diff, new, plan, profile, run, show, validate
from .hints import hinted
from .options import app

__all__ = [
    "app", "bench", "chat", "compare", "diff", "main", "new", "plan", "profile", "run", "show",
    "validate",
]  # fmt: skip


def _call() -> None:
    """Parse the arguments and call the verb.

    Not through the library's own ``main``, which has its own mind about Ctrl-C and closed pipes.
    """
    command = typer.main.get_command(app)
    with command.make_context("graphllm", sys.argv[1:]) as context:
        command.invoke(context)
    sys.stdout.flush()


def main() -> None:
    """The entry point: runs a verb and turns its failure into one line and an exit code."""
    try:
        _call()
    except KeyboardInterrupt:
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)  # at once: taking the interpreter down would give weights back one by one
    except BrokenPipeError:
        # The reader has gone: nothing more can be said, also not by the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except GraphllmError as error:
        if debug_level():
            raise
        print(f"error: {hinted(error)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if hasattr(error, "exit_code"):  # the library's: wrong usage, or --help has been shown
            if hasattr(error, "show"):
                error.show()
            sys.exit(error.exit_code)
        if debug_level():
            raise
        print(f"error: {_told(error)}", file=sys.stderr)
        sys.exit(1)


def _told(error: Exception) -> str:
    """An exception that nobody meant in a line, which begins with that of the user's file."""
    where = user_line(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    what = ": ".join([type(error).__name__, *filter(None, [" ".join(text.split())])])
    if where is None:
        return f"{what} (GRAPHLLM_DEBUG=1 shows where)"
    return f"{shown_line(where)}: {what}"
