"""Everything that the command line prints.

On a terminal, control characters are escaped in everything (`graphllm.terminal`), so that no error,
path, argument, name in a file or answer of a model can make the terminal do anything. Names, paths
and messages are escaped in a pipe, too, since they may end in a log. An answer is written to a pipe
as it is, in UTF-8.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import GraphllmError
from ..terminal import escape_control, escape_control_lines

# The styles that graphllm's own tables have, whose names are escaped before they are coloured.
_STYLE = re.compile("(\033\\[(?:0|1|2|31|32)m)")
_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputError(GraphllmError):
    """A standard stream cannot be used, or a file cannot be written."""


class StdoutError(OutputError):
    """Standard output cannot be written."""


class _Stdout(io.FileIO):
    """Standard output, whose errors say that they are its errors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutError(f"standard output: {error.strerror}") from None


class _ClosedStdin:
    """In place of a standard input that was closed before the process began."""

    def isatty(self) -> bool:
        return False

    @property
    def buffer(self) -> Any:
        raise OutputError("standard input is closed")


def open_streams() -> None:
    """Prepare standard input, output and error. OutputError if there is no standard output.

    Where one of them is closed its number is taken, so that no other file gets it. An encoding that
    cannot express all characters escapes the rest on a terminal; into a pipe goes UTF-8.
    """
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = _ClosedStdin()
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError):  # a stream in memory, as a notebook has it
        return
    terminal = sys.stdout.isatty()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(number, "wb", closefd=False)),
        encoding=sys.stdout.encoding if terminal else "utf-8",
        errors="backslashreplace" if terminal else "surrogateescape",
        line_buffering=terminal,
    )


def discard_output() -> None:
    """Drop what could not be written, so that the interpreter's last flush does not fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(line: str) -> None:
    """Print one line on standard output, at once."""
    print(escape_control(line, limit=None), flush=True)


def show_table(text: str) -> None:
    """Print lines on standard output, at once, with their styles if that is a terminal.

    A newline or a style that is in a name stays: a table escapes its names itself.
    """
    parts = _STYLE.split(text) if sys.stdout.isatty() else [text]
    parts[::2] = map(escape_control_lines, parts[::2])
    print("".join(parts), flush=True)


def show_json(value: Any, ascii: bool = True) -> None:
    """Print a value as a line of JSON, at once; ``ascii``: with all other characters escaped."""
    text = json.dumps(value, ensure_ascii=ascii)
    if sys.stdout.isatty():
        text = _NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text, flush=True)


def write_text(text: str) -> None:
    """Write a piece of an answer, or of a prompt, to standard output at once."""
    sys.stdout.write(escape_control_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def check_writable(path: Path) -> None:
    """Refuse a file of ``-o`` that cannot be written, before its contents are made. OutputError."""
    parent = path.parent
    if path.is_dir():
        code = errno.EISDIR
    elif not parent.is_dir():
        code = errno.ENOTDIR if parent.exists() else errno.ENOENT
    elif not os.access(path if path.exists() else parent, os.W_OK):
        code = errno.EACCES
    else:
        return
    raise OutputError(f"-o {path}: {os.strerror(code)}")


def write_file(path: Path, text: str) -> None:
    """Write a file of ``-o``. OutputError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise OutputError(f"-o {path}: {error.strerror}") from None


def note(text: str) -> None:
    """Print a line beside the output, on standard error."""
    with suppress(OSError):  # nobody can be told where standard error cannot be written
        print(escape_control(text), file=sys.stderr, flush=True)


def note_traceback() -> None:
    """Print the traceback of the exception that is being handled, on standard error."""
    with suppress(OSError):
        print(escape_control_lines(traceback.format_exc()), file=sys.stderr, end="", flush=True)
