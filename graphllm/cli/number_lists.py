"""Lists of numbers, and sizes, on the command line."""

from __future__ import annotations

import re

from ..errors import RequestError

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
_MAX_VALUES = 1000  # in one list
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]i?)?B", re.ASCII | re.IGNORECASE)


def parse_numbers(flag: str, text: str) -> list[int]:
    """Return the values of a list: ``512``, ``1,2,4``, ``1-8``, ``8-64+8`` or ``1-64*2``.

    RequestError: the list is invalid.
    """
    values: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise RequestError(
                f"{flag} {text!r} must be comma-separated integers or ranges: first-last, "
                "first-last+step or first-last*factor"
            )
        first, last, sign, step = match.groups()
        at, end, by = int(first), int(last or first), int(step or 1)
        if at > end or by < 1 or (sign == "*" and (by < 2 or at < 1)):
            raise RequestError(f"{flag} {part.strip()!r} is an empty or infinite range")
        while at <= end and len(values) <= _MAX_VALUES:
            values.append(at)
            at = at * by if sign == "*" else at + by
    if len(values) > _MAX_VALUES:
        raise RequestError(f"{flag} {text!r} has more than {_MAX_VALUES} values")
    return values


def parse_size(flag: str, text: str) -> int:
    """Return a number of bytes: ``1.1GB``, ``900 MB``, ``850MiB``, ``1000000B``.

    RequestError: the size is invalid.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"{flag} {text!r} must be a size in B, KB, MB, GB, KiB, MiB or GiB")
    number, unit = float(match[1]), (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    found = int(number * base ** " kmg".index(unit[:1] or " "))
    if not 0 < found < 1 << 60:
        raise RequestError(f"{flag} {text!r} is not a possible size of a file")
    return found
