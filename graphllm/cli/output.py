"""Output of the command line.

On a terminal, control characters in all output are escaped (`graphllm.terminal`), so that no error,
path, argument, name in a file or model output can send control sequences to the terminal. Names,
paths and messages are escaped in a pipe, too, since they may end up in a log. Generated text is
written to a pipe unchanged, in UTF-8.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import GraphllmError
from ..terminal import escape_control, escape_control_lines

if TYPE_CHECKING:
    from ..atomic_file import AtomicFile

# Escape sequences of graphllm's own tables; the names in them are escaped before styling.
_STYLE = re.compile("(\033\\[(?:0|1|2|31|32)m)")
_NOT_IN_JSON = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class OutputError(GraphllmError):
    """A standard stream cannot be used, or a file cannot be written."""


class StdoutError(OutputError):
    """Standard output cannot be written."""


class _Stdout(io.FileIO):
    """Standard output whose write errors are `StdoutError`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutError(f"standard output: {error.strerror}") from None


class _ClosedStdin:
    """Replacement for a standard input that was closed when the process started."""

    def isatty(self) -> bool:
        return False

    @property
    def buffer(self) -> Any:
        raise OutputError("standard input is closed")


def open_streams() -> None:
    """Prepare standard input, output and error.

    The descriptor of a closed stream is reserved, so that no other file gets its number. Output to
    a pipe is UTF-8; on a terminal, characters that its encoding cannot express are escaped.

    Raises:
        OutputError: standard output is closed.
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
    except (AttributeError, OSError):  # an in-memory stream, as in a notebook
        return
    terminal = sys.stdout.isatty()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(number, "wb", closefd=False)),
        encoding=sys.stdout.encoding if terminal else "utf-8",
        errors="backslashreplace" if terminal else "surrogateescape",
        line_buffering=terminal,
    )


def discard_output() -> None:
    """Discard buffered output, so that the interpreter's last flush does not fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(line: str) -> None:
    """Print one line on standard output and flush it."""
    print(escape_control(line, limit=None), flush=True)


def show_table(text: str) -> None:
    """Print the lines of a table on standard output; styles are kept on a terminal only.

    Newlines and styles are not escaped here: a table escapes the names in it itself.
    """
    parts = _STYLE.split(text) if sys.stdout.isatty() else [text]
    parts[::2] = map(escape_control_lines, parts[::2])
    print("".join(parts), flush=True)


def show_json(value: Any, ascii: bool = True) -> None:
    """Print a value as one line of JSON; ``ascii`` escapes all non-ASCII characters."""
    text = json.dumps(value, ensure_ascii=ascii)
    if sys.stdout.isatty():
        text = _NOT_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text, flush=True)


def write_text(text: str) -> None:
    """Write a piece of generated text or of a prompt to standard output and flush it."""
    sys.stdout.write(escape_control_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def check_writable(path: Path, flag: str = "-o") -> None:
    """Raise OutputError if the file of ``flag`` cannot be written, before the work is done.

    A regular file is replaced, for which its directory must be writable, too.
    """
    from ..atomic_file import real_path

    parent = real_path(path).parent
    if path.is_dir():
        code = errno.EISDIR
    elif not parent.is_dir():
        code = errno.ENOTDIR if parent.exists() else errno.ENOENT
    else:
        touched = [each for each in (path, parent) if each.exists()]
        if not _is_replaced(path):
            touched.remove(parent)
        if all(os.access(each, os.W_OK) for each in touched):
            return
        code = errno.EACCES
    raise OutputError(f"{flag} {path}: {os.strerror(code)}")


def _is_replaced(path: Path) -> bool:
    """Whether an output replaces what has its name; devices and pipes are written to instead."""
    return path.is_file() or not path.exists()


@contextmanager
def output_file(path: Path) -> Iterator[AtomicFile | BinaryIO]:
    """Open the file of ``-o``, which replaces an existing one at the end of the block.

    OutputError: it cannot be written; the existing file stays as it was.
    """
    from ..atomic_file import AtomicFile

    try:
        with AtomicFile(path, True) if _is_replaced(path) else path.open("wb") as file:
            yield file
    except OSError as error:  # NumPy's have a message alone
        raise OutputError(f"-o {path}: {error.strerror or error}") from None


def write_file(path: Path, text: str) -> None:
    """Write the file of ``-o`` as `output_file` does, in UTF-8."""
    with output_file(path) as file:
        file.write(text.encode("utf-8"))


def note_traceback() -> None:
    """Print the traceback of the current exception on standard error."""
    import traceback

    with suppress(OSError):
        print(escape_control_lines(traceback.format_exc()), file=sys.stderr, end="", flush=True)
