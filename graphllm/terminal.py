"""Text that is safe to show on a terminal or in a log.

A terminal obeys control characters: they move the cursor, change colours and titles, and can inject
input as if the user had typed it. `escape_control` escapes them in one line of untrusted text (an
error, a path, an argument, a string from a file), `escape_control_lines` in several lines.
"""

from __future__ import annotations

import re
import sys
import unicodedata

MOST = 2000  # characters of a line that come from elsewhere
# Cc: C0, DEL and C1. Cf: invisible characters, which reorder or hide text. Cs: what was no UTF-8.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# What a terminal obeys, and what overrides the order of characters. Other format characters are
# part of writing (the joiners of Persian, of Hindi and of emoji) and stay in an answer.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_control(text: object, most: int | None = MOST) -> str:
    r"""``text`` in one line, with control, format and line-separating characters escaped.

    As in Python's literals: ``\x1b``, ``\n``, ``\u202e``; a byte that is no UTF-8 (in a path) as
    ``\xff``. What is longer than ``most`` characters is cut, and the cut is stated.
    """
    line = str(text)
    if most is not None and len(line) > most:
        line = f"{line[:most]} ... ({len(line) - most} more characters)"
    if line.isprintable():
        return line
    return "".join(_escaped(c) if unicodedata.category(c) in _UNSAFE else c for c in line)


def escape_control_lines(text: str) -> str:
    """``text`` with its newlines and tabs, all other C0 and C1 characters, DEL and the characters
    that override the direction of text (U+202A to U+202E, U+2066 to U+2069) escaped."""
    return _OBEYED.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a file's name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def style(text: str, *codes: int) -> str:
    """``text`` between the ANSI codes of a style (SGR) and their reset."""
    return f"\033[{';'.join(map(str, codes))}m{text}\033[0m"


def warn(text: str) -> None:
    """Print a line on standard error, for what goes on otherwise than asked."""
    print(f"graphllm: {escape_control(text)}", file=sys.stderr)
