"""Command line: one module per verb; ``graphllm --help`` lists the verbs.

An error is one line on standard error, with exit code 1 (2 for wrong usage); a traceback is printed
only if GRAPHLLM_DEBUG is set. The verbs compute nothing themselves: they call the Python API and
print its results with `output`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

# A loaded model is many objects that live to the end. With Python's threshold of 700 new objects,
# the collector would scan them repeatedly: 35 ms in the start of `run`.
_NEW_OBJECTS_PER_COLLECTION = 50_000


def __getattr__(name: str) -> Any:
    """Import ``app`` at first use, so that `main` handles Ctrl-C during the import."""
    if name == "app":
        from .typer_app import typer_app
        from .verbs import NAMES, find_verb

        globals()[name] = typer_app(filter(None, map(find_verb, NAMES)))
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Terminated(BaseException):
    """SIGTERM was received. Propagation removes temporary files and ends child processes."""


def main() -> None:
    """Run a verb; report its failure as one line and an exit code."""
    try:
        _run()
    except KeyboardInterrupt:  # a second one, or one during error handling
        _end("interrupted", 128 + signal.SIGINT)


def _run() -> None:
    gc.set_threshold(_NEW_OBJECTS_PER_COLLECTION)
    try:
        signal.signal(signal.SIGTERM, _terminate)
        sys.unraisablehook = _unraisable
        _call()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is done and written
    except KeyboardInterrupt:
        _end("interrupted", 128 + signal.SIGINT)
    except Terminated:
        _end("terminated", 128 + signal.SIGTERM)
    except BrokenPipeError:  # the reader of the pipe has exited
        from .output import discard_output

        discard_output()
    except Exception as error:
        _fail(error)


def _unraisable(unraisable: Any) -> None:
    """Exit on a signal that arrived in a callback, where Python ignores exceptions."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end("interrupted", 128 + signal.SIGINT)
    if issubclass(unraisable.exc_type, Terminated):
        _end("terminated", 128 + signal.SIGTERM)
    sys.__unraisablehook__(unraisable)


def _terminate(number: int, frame: Any) -> NoReturn:
    raise Terminated


def _call() -> None:
    """Parse the arguments and call the verb.

    Typer's own ``main`` is not used, since it handles Ctrl-C and closed pipes differently.
    """
    from .output import open_streams

    open_streams()
    from .verbs import NAMES, find_verb

    words = sys.argv[1:]
    verb = find_verb(words[0]) if words else None
    values = verb.parse(words[1:]) if verb else None
    if verb and values is not None:
        verb.call(**values)
    else:
        import typer

        from .typer_app import typer_app

        app = typer_app([verb] if verb else filter(None, map(find_verb, NAMES)))
        command = typer.main.get_command(app)
        with command.make_context("graphllm", words) as context:
            command.invoke(context)
    sys.stdout.flush()


def _end(text: str, code: int) -> NoReturn:
    """Exit at once: shutting down the interpreter would free all weights one by one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        lead = "\n" if sys.stderr.isatty() else ""  # after the ^C that the terminal echoes
        with suppress(OSError):
            os.write(2, f"{lead}{text}\n".encode())
    os._exit(code)


def _fail(error: Exception) -> NoReturn:
    """Print an error and exit."""
    from ..env import debug_level
    from ..terminal import note
    from .error_messages import error_message, is_interrupt, usage_message
    from .output import StdoutError, discard_output, note_traceback

    if is_interrupt(error):
        _end("interrupted", 128 + signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(error, StdoutError):
        discard_output()
    code = getattr(error, "exit_code", None)  # of typer's exceptions
    if hasattr(error, "format_message"):
        if line := usage_message(error):
            note(f"error: {line}")
    elif code is None:
        if debug_level():
            note_traceback()
        else:
            note(f"error: {error_message(error)}")
    sys.exit(1 if code is None else code)
