"""Multiple choice by a small random model, against float64 arithmetic on its logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.errors import RequestError
from graphllm.quality.hellaswag import MultipleChoice, answer, parse_tasks

# Endings that share their beginning, and one that begins another one.
TASKS = """\
Cooking: A man cuts an onion
2
and cries.
and laughs.
He puts it into a pan.
and cries. He laughs.
Swimming: She
0
jumps
dives into the water and is gone
jumps high
sinks
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("hellaswag") / "tiny.gguf", "llama")


def score(llm, ids: list[int], first: int) -> float:
    """Mean log-probability of the tokens from ``first`` on."""
    rows = llm.logits(ids)[first - 1 : -1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return float(rows[np.arange(len(rows)), ids[first:]].mean())


def test_the_likeliest_ending_is_chosen(path):
    tasks = parse_tasks(TASKS)
    assert [(task.right, len(task.endings)) for task in tasks] == [(2, 4), (0, 4)]
    with graphllm.load(path, device="cpu", threads=1, context=128, max_sequences=8) as llm:
        done = list[tuple[int, int]]()
        found = answer(llm, tasks, lambda count, total, share: done.append((count, total)))
        for task, choice in zip(tasks, found.choices, strict=True):
            ids = [llm.encode(f"{task.context} {ending}") for ending in task.endings]
            first = next(i for i in range(99) if len({tuple(each[i : i + 1]) for each in ids}) > 1)
            first = min(first, min(map(len, ids)) - 1)
            scores = [score(llm, each, first) for each in ids]
            assert choice == int(np.argmax(scores)) and np.diff(sorted(scores)).min() > 1e-3
    assert done == [(1, 2), (2, 2)] and found.right == (2, 0)


def test_interval():
    """Wilson's interval solves (share - p)^2 = z^2 p (1 - p) / n."""
    found = MultipleChoice((1,) * 30, (1,) * 21 + (0,) * 9)
    assert found.accuracy == 0.7
    for p in found.interval:
        assert (0.7 - p) ** 2 == pytest.approx(1.959963984540054**2 * p * (1 - p) / 30)
    assert math.isclose(MultipleChoice((1,), (1,)).interval[1], 1)


def test_invalid_tasks_are_errors():
    for text, message in (
        ("", "0 lines; a task has 6"),
        ("one\ntwo", "2 lines"),
        (TASKS.replace("\n2\n", "\n4\n"), "line 2: '4' must be an index from 0 to 3"),
        (TASKS.replace("sinks", " "), "line 12: the ending is empty"),
    ):
        with pytest.raises(RequestError, match=message):
            parse_tasks(text)


def test_the_verb(path, tmp_path):
    file = tmp_path / "tasks.txt"
    file.write_text(TASKS)
    command = [sys.executable, "-m", "graphllm", "perplexity", str(path), "--device", "cpu"]
    words = [*command, "--hellaswag", str(file), "--hellaswag-tasks", "1", "--json"]
    done = subprocess.run(words, capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["tasks"] == 1 and found["accuracy"] == (found["choices"] == [2])
    file.write_text(TASKS + "one line more\n")
    done = subprocess.run(words, capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {file}: 13 lines; a task has 6\n"
