"""HellaSwag: choose the ending of a text among four, with the meaning of llama.cpp's score.

A task has six lines: the context, the index of the right ending, and four endings. The model
chooses the ending whose tokens have the largest mean log-probability after the context; tokens are
counted from the first one in which the four endings differ (Zellers et al. 2019, acc_norm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.packed_evaluation import Passage
from ..errors import RequestError
from ..loading.loaded_model import LoadedModel
from .perplexity import encode_text

_ENDINGS = 4
_LINES = 2 + _ENDINGS  # of a task
_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Task:
    """A context, four endings, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class MultipleChoice:
    """Choices of a model.

    Attributes:
        choices: index of the chosen ending of each task.
        right: index of the right one.
    """

    choices: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """Share of the tasks in which the right ending was chosen."""
        return sum(a == b for a, b in zip(self.choices, self.right)) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the accuracy (Wilson 1927)."""
        n, p = len(self.right), self.accuracy
        z = _Z**2 / n
        half = z * math.sqrt(n * (4 * p * (1 - p) + z)) / (2 * _Z)
        return (p + z / 2 - half) / (1 + z), (p + z / 2 + half) / (1 + z)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm perplexity --hellaswag --json`` prints."""
        return {
            "tasks": len(self.right),
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "choices": list(self.choices),
        }

    def table(self) -> str:
        """Return the accuracy as text."""
        low, high = self.interval
        return (
            f"{len(self.right)} tasks\n"
            f"accuracy = {100 * self.accuracy:.2f} %, 95 % interval {100 * low:.2f} to "
            f"{100 * high:.2f} %"
        )


def parse_tasks(text: str, most: int | None = None) -> list[Task]:
    """Return the tasks of a text in llama.cpp's format, the first ``most`` of them.

    RequestError names the line that is invalid.
    """
    lines = text.splitlines()
    if not lines or len(lines) % _LINES:
        raise RequestError(f"{len(lines)} lines; a task has {_LINES}")
    found = []
    for at in range(0, len(lines), _LINES):
        context, right, *endings = lines[at : at + _LINES]
        if right.strip() not in map(str, range(_ENDINGS)):
            raise RequestError(f"line {at + 2}: {right[:40]!r} must be an index from 0 to 3")
        if empty := [at + 3 + i for i, ending in enumerate(endings) if not ending.strip()]:
            raise RequestError(f"line {empty[0]}: the ending is empty")
        found.append(Task(context, tuple(endings), int(right)))
    return found[:most]


def answer(
    llm: LoadedModel,
    tasks: Sequence[Task],
    progress: Callable[[int, int, float], None] = lambda done, total, share: None,
) -> MultipleChoice:
    """Let a model choose the ending of each task.

    Args:
        llm: the model.
        tasks: the tasks.
        progress: called after each task with (tasks done, tasks, accuracy so far).

    Raises:
        RequestError: a task does not fit the context.
    """
    passages = [each for task in tasks for each in _passages(llm, task)]
    scores = np.zeros(len(passages))
    choices = list[int]()
    with llm.engine.lock.hold("hellaswag"):
        for index, first, values in llm.engine.packed_evaluation().logprobs(passages):
            scores[index] += values.sum(dtype=np.float64)
            passage = passages[index]
            if first + len(values) < len(passage.ids):
                continue
            scores[index] /= len(passage.ids) - passage.first
            if index % _ENDINGS == _ENDINGS - 1:
                choices.append(int(scores[index + 1 - _ENDINGS : index + 1].argmax()))
                progress(len(choices), len(tasks), _result(choices, tasks).accuracy)
    return _result(choices, tasks)


def _result(choices: Sequence[int], tasks: Sequence[Task]) -> MultipleChoice:
    """Return the result of the first tasks, those with a choice."""
    return MultipleChoice(tuple(choices), tuple(task.right for task in tasks[: len(choices)]))


def _passages(llm: LoadedModel, task: Task) -> list[Passage]:
    """Return the context with each ending; tokens are predicted from where the endings differ."""
    ids = [encode_text(llm, f"{task.context} {ending}") for ending in task.endings]
    shortest = min(map(len, ids))
    if shortest < 2:
        raise RequestError("a task has a single token: nothing precedes it")
    differ = (i for i in range(shortest) if len({each[i] for each in ids}) > 1)
    first = max(1, min(next(differ, shortest), shortest - 1))
    return [Passage(each, first) for each in ids]
