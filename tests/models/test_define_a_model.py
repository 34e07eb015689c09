"""Run docs/define-a-model.md: its files, its commands, and what they print."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from pseudo_terminal import without_progress
from typer.testing import CliRunner

from graphllm import ops
from graphllm.backends import find
from graphllm.cli import app
from graphllm.graph import op
from graphllm.model import config

PAGE = Path(__file__).parents[2] / "docs" / "define-a-model.md"
# Verbs whose figures and order of ops differ from run to run: only headings are compared.
TIMED = ("profile",)


def blocks() -> list[tuple[str, str]]:
    """Return (language, text) of each block of code, in order."""
    return re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text("utf-8"), re.S)


def sessions(text: str) -> list[tuple[list[str], list[str]]]:
    """Return (words, printed lines) of each command of a block."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    return [(p.splitlines()[0].split(), p.splitlines()[1:]) for p in parts]


def figures_out(line: str) -> str:
    """Return the line with a placeholder for each figure, and one unit for all times."""
    return re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", re.sub(r"\b[mu]s/token", "ms/token", line))


def called(words: list[str], capsys) -> tuple[int, str]:
    """Run a command; return its exit code and output."""
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return 0, capsys.readouterr().out
    done = CliRunner().invoke(app, words[1:])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parity
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The page declares an op, a kernel and an activation.
    monkeypatch.setattr(op, "_REGISTRY", dict(ops.registry()))
    monkeypatch.setattr(find("cpu"), "_kernels", dict(find("cpu").kernels))
    before = dict(config.ACTIVATIONS)
    commands = 0
    try:
        for kind, text in blocks():
            if kind == "python":
                name, added = re.match(r"# (\w+\.py)(, at its end)?\n", text).groups()
                with (tmp_path / name).open("a" if added else "w") as file:
                    file.write(text)
                continue
            for words, printed in sessions(text):
                code, output = called(words, capsys)
                _check(words, printed, code, output)
                commands += 1
    finally:
        config.ACTIVATIONS.clear()
        config.ACTIVATIONS.update(before)
    assert commands == 14 and "<section>" in (tmp_path / "report.html").read_text()


def _check(words: list[str], printed: list[str], code: int, output: str) -> None:
    """Check that the page shows what the command prints, except for figures."""
    assert code == ("wrong.py" in words), output
    have = [figures_out(line) for line in without_progress(output).splitlines()]
    want = [figures_out(line) for line in printed]
    if words[1] in TIMED:
        have, want = ([_head(line) for line in lines] for lines in (have, want))
        want = [line for line in want if line.startswith(("op ", "relu_squared"))]
        assert want and set(want) <= set(have), output
        ran = [line for line in want if "ran on" in line]
        assert ran == [line for line in have if "ran on" in line], output
        return
    if "..." not in printed:
        assert have == want, output
    else:
        at = printed.index("...")
        assert have[:at] == want[:at] and have[-len(want[at + 1 :]) :] == want[at + 1 :], output


def _head(line: str) -> str:
    """Return the line without the columns that need measured ceilings; of an op's row, its name."""
    line = re.sub(r" +", " ", re.sub(r" +roofline +headroom$", "", line))
    return re.sub(r"^(relu_squared) #.*", r"\1", line)


def test_the_mistake_is_in_the_line_that_the_report_names():
    text = next(t for kind, t in blocks() if t.startswith("# wrong.py"))
    assert text.splitlines()[15].strip() == "h = ops.mul(ops.silu(up), gate)"
