"""Patterns of modules in compressed-tensors configurations: names, ``re:`` expressions, classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import quote

_PREFIX = "re:"
_LINEAR = "Linear"  # the class of every module with packed weights
# Expressions and names of modules come from files. These limits keep backtracking short: a match
# takes at most a few times the length of the name to the power of the repetitions.
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{?]")
_BRANCH = re.compile(r"\(|(?<!\()[*+{?]")  # groups and repetitions
_REPETITION = re.compile(r"[*+]|\{(?!\d?,?\d\})")  # of more than 9 characters
_MAX_BRANCHES, _MAX_REPETITIONS, _MAX_LENGTH, _MAX_EXPRESSIONS = 6, 3, 1000, 100
_MAX_STEPS = 2_000_000  # 125 characters with 3 repetitions; names have some 60


class ModulePatterns:
    """A list of patterns. ValueError, with a description, for an expression that is not supported.

    A pattern is the path of a module, ``re:`` and an expression that matches the beginning of the
    path, or the class ``Linear``.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = list(patterns)
        self._names = {each for each in patterns if not each.startswith(_PREFIX)}
        texts = [each for each in dict.fromkeys(patterns) if each.startswith(_PREFIX)]
        if len(texts) > _MAX_EXPRESSIONS:
            raise ValueError(f"{len(texts)} expressions, more than {_MAX_EXPRESSIONS}")
        self._expressions = [_expression(each) for each in texts]
        self._power = max((_repetitions(each.pattern) for each in self._expressions), default=0)

    def match(self, module: str) -> int:
        """Return how closely the list names ``module``: 3 by path, 2 by an expression, 1 by class,
        0 not at all.

        ValueError if the name of the module is too long for the expressions.
        """
        if module in self._names:
            return 3
        if len(module) ** self._power > _MAX_STEPS:
            raise ValueError(
                f"the name has {len(module)} characters, too many for an expression with "
                f"{self._power} repetitions"
            )
        if any(each.match(module) for each in self._expressions):
            return 2
        return int(_LINEAR in self._names)


def _expression(pattern: str) -> re.Pattern[str]:
    text = pattern.removeprefix(_PREFIX)
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"{quote(pattern)} has more than {_MAX_LENGTH} characters")
    plain = _ESCAPE.sub("x", text)
    if _REPEATED_GROUP.search(plain) or len(_BRANCH.findall(plain)) > _MAX_BRANCHES:
        text = f"repeats a group, or has more than {_MAX_BRANCHES} groups and repetitions"
        raise ValueError(f"{quote(pattern)} {text}")
    if _repetitions(text) > _MAX_REPETITIONS:
        raise ValueError(f"{quote(pattern)} has more than {_MAX_REPETITIONS} long repetitions")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{quote(pattern)} is no regular expression: {error}") from None


def _repetitions(text: str) -> int:
    """Return the number of repetitions in an expression that can take many characters."""
    return len(_REPETITION.findall(_ESCAPE.sub("x", text)))
