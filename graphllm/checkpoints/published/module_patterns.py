"""Patterns of modules in compressed-tensors configurations: names, ``re:`` expressions, classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import quote

_PREFIX = "re:"
_LINEAR = "Linear"  # the class of every module with packed weights
# Expressions come from files. These limits keep backtracking short.
_REPEATED_GROUP = re.compile(r"\)[*+{?]")
_BRANCH = re.compile(r"(?<!\\)(?:\(|(?<!\()[*+{?])")  # groups and repetitions
_MAX_BRANCHES, _MAX_LENGTH = 6, 1000


class ModulePatterns:
    """A list of patterns. ValueError, with a description, for an expression that is not supported.

    A pattern is the path of a module, ``re:`` and an expression that matches the beginning of the
    path, or the class ``Linear``.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._names = {each for each in patterns if not each.startswith(_PREFIX)}
        self._expressions = [
            _expression(each) for each in dict.fromkeys(patterns) if each.startswith(_PREFIX)
        ]

    def match(self, module: str) -> int:
        """Return how closely the list names ``module``: 3 by path, 2 by an expression, 1 by class,
        0 not at all."""
        if module in self._names:
            return 3
        if any(each.match(module) for each in self._expressions):
            return 2
        return int(_LINEAR in self._names)


def _expression(pattern: str) -> re.Pattern[str]:
    text = pattern.removeprefix(_PREFIX)
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"{quote(pattern)} has more than {_MAX_LENGTH} characters")
    if _REPEATED_GROUP.search(text) or len(_BRANCH.findall(text)) > _MAX_BRANCHES:
        text = f"repeats a group, or has more than {_MAX_BRANCHES} groups and repetitions"
        raise ValueError(f"{quote(pattern)} {text}")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{quote(pattern)} is no regular expression: {error}") from None
