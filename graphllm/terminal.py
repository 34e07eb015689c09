"""Escaping of text before it is printed on a terminal or written to a log.

A terminal obeys control characters: they move the cursor, change colours and titles, and can inject
input as if the user had typed it. `escape_control` escapes them in one line of untrusted text (an
error, a path, an argument, a string from a file), `escape_control_lines` in several lines.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from contextlib import suppress

MAX_CHARS = 2000  # of a line of untrusted text
# Cc: C0, DEL and C1. Cf: invisible characters that reorder or hide text. Cs: bytes that were not
# UTF-8.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# Control characters, and characters that override the direction of text. Other format characters
# belong to scripts (the joiners of Persian, Hindi and emoji) and stay in generated text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control(text: object, limit: int | None = MAX_CHARS) -> str:
    r"""Return ``text`` on one line, with control, format and line-separating characters escaped.

    Escapes are those of Python literals: ``\x1b``, ``\n``, ``\u202e``; a byte of a path that is not
    UTF-8 becomes ``\xff``. Text beyond ``limit`` characters is cut, with a note of how much.
    """
    line = str(text)
    if limit is not None and len(line) > limit:
        line = f"{line[:limit]} ... ({len(line) - limit} more characters)"
    if line.isprintable():
        return line
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in line)


def escape_control_lines(text: str) -> str:
    """Escape control characters of ``text`` except newlines and tabs.

    That is C0, C1, DEL, and the characters that override the direction of text (U+202A to U+202E,
    U+2066 to U+2069).
    """
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # Python's surrogateescape of a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def style(text: str, *codes: int) -> str:
    """Wrap ``text`` in the ANSI codes (SGR) of a style and their reset."""
    return f"\033[{';'.join(map(str, codes))}m{text}\033[0m"


def note(text: str) -> None:
    """Print a line on standard error."""
    with suppress(OSError):  # a failure of standard error cannot be reported anywhere
        print(escape_control(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning line on standard error."""
    note(f"graphllm: {text}")
