"""docs/define-a-model.md as a reader goes through it: its files, its commands, what they print."""

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
from graphllm.model import config

PAGE = Path(__file__).parents[2] / "docs" / "define-a-model.md"
# The figures of these differ from run to run, and which ops take longest: only their frame is held.
TIMED = ("profile",)


def blocks() -> list[tuple[str, str]]:
    """(kind, text) of each block of code, in order."""
    return re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text("utf-8"), re.S)


def sessions(text: str) -> list[tuple[list[str], list[str]]]:
    """(words, what is printed) of each command of a block."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    return [(p.splitlines()[0].split(), p.splitlines()[1:]) for p in parts]


def figures_out(line: str) -> str:
    """The line without its figures, and without the unit that they are large enough for."""
    return re.sub(r"-?\d[\d.]*(e[-+]\d+)?", "#", re.sub(r"\b[mu]s/token", "ms/token", line))


def called(words: list[str], capsys) -> tuple[int, str]:
    """Exit code and output of a command."""
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return 0, capsys.readouterr().out
    done = CliRunner().invoke(app, words[1:])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parity
def test_the_walk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ops, "_REGISTRY", dict(ops._REGISTRY))  # it declares an op
    monkeypatch.setattr(find("cpu"), "kernels", dict(find("cpu").kernels))  # and a kernel
    before = dict(config.ACTIVATIONS)  # and an activation
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
    """The page shows what the command prints, figures aside."""
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
    """Without the columns that are there only where the machine's ceilings were measured; of an
    op's row its name alone."""
    line = re.sub(r" +", " ", re.sub(r" +roofline +headroom$", "", line))
    return re.sub(r"^(relu_squared) #.*", r"\1", line)


def test_lines_that_the_page_names_are_there():
    """The mistake is in the line that the report names."""
    text = next(t for kind, t in blocks() if t.startswith("# wrong.py"))
    assert text.splitlines()[15].strip() == "h = ops.mul(ops.silu(up), gate)"
