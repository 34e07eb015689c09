"""Our parser of plain command lines against typer's, which parses the same declarations."""

from __future__ import annotations

import random
import subprocess
import sys
from inspect import Parameter
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny_models
import typer

from graphllm.cli.declarations import Verb
from graphllm.cli.typer_app import typer_app
from graphllm.cli.verbs import NAMES, find_verb

VALUES = [
    "3",
    "-1",
    "0.5",
    "12.25",
    "text",
    "a b=c",
    "",
    "-",
    "1e3",
    "--json",
    "-p",
    "x.gguf",
    "1_0",
]


def by_typer(verb: Verb, words: list[str]) -> dict[str, Any] | None:
    """The values that typer reads; None for wrong usage."""
    command, found = typer.main.get_command(typer_app([verb])), list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verb, "call", lambda self, **values: found.append(values))
        try:
            with command.make_context("graphllm", [verb.name, *words]) as context:
                command.invoke(context)
        except Exception as error:  # typer's own, which may be of a bundled click
            assert hasattr(error, "format_message") or hasattr(error, "exit_code"), error
    return found[0] if found else None


def command_line(verb: Verb, rng: random.Random) -> list[str]:
    words: list[str] = []
    for _ in range(rng.randint(0, 6)):
        parameter = rng.choice(verb.parameters)
        kind, declared = get_args(parameter.annotation)
        value = rng.choice(VALUES)
        if kind in (int, float, int | None) and rng.random() < 0.8:
            value = rng.choice(VALUES[:4])
        if not declared.flags:
            words.append(value)
        elif kind is bool:
            words.append(rng.choice(rng.choice(declared.flags).split("/")))
        elif rng.random() < 0.3:
            words.append(f"{rng.choice(declared.flags)}={value}")
        else:
            words += [rng.choice(declared.flags), value]
    for each in verb.parameters:
        flags = get_args(each.annotation)[1].flags
        if rng.random() < 0.7 and each.default is Parameter.empty:
            words += [*flags[:1], "model"]
    return words


@pytest.mark.parametrize("name", NAMES)
def test_what_we_parse_typer_parses_alike(name: str) -> None:
    verb, rng, parsed = find_verb(name), random.Random(name), 0
    assert verb is not None and find_verb("rum") is None
    for _ in range(60):
        words = command_line(verb, rng)
        values = verb.parse(words)
        if values is not None:
            parsed += 1
            assert values == by_typer(verb, words), words
    assert parsed > 3


def test_plain_command_lines_need_no_typer() -> None:
    run = find_verb("run")
    assert run is not None
    values = run.parse(["demo", "-p", "Hello", "-n", "32", "--temp=0", "-p", "", "-ngl", "all"])
    assert values is not None and values["prompt"] == ["Hello", ""] and values["temperature"] == 0.0
    assert (values["model"], values["gpu_layers"], values["file"]) == ("demo", "all", None)
    path = run.parse(["demo", "-f", "a.txt"])
    assert path is not None and path["file"] == Path("a.txt")
    wrong = (["--help"], ["demo", "-n"], ["demo", "-n5"], ["demo", "--n=x"], ["demo", "extra"], [])
    assert [run.parse([*words]) for words in wrong] == [None] * len(wrong)


RUN = """
import sys
from graphllm.cli import main
from graphllm.backends import cpu
main()
sys.stdout.flush()
print(*sys.modules, file=sys.stderr)
"""
# Packages that only other verbs, other models or other machines need, and what replaced them.
UNUSED = {
    "typer", "click", "rich", "pydantic",  # `Verb.parse`
    "numba", "llvmlite",  # the cache of kernels
    "cupy", "graphllm.backends.cuda.kernels", "graphllm.backends.cuda.runtime.device",
    "jinja2", "graphllm.chat", "multiprocessing", "asyncio",
    "tokenizers", "graphllm.tokenizer.tokenizer_json", "graphllm.tokenizer.chatglm",
    "concurrent.futures", "statistics", "numpy.random", "graphllm.cli.batch_run",
    "graphllm.cli.bench", "graphllm.profiler", "graphllm.validation", "graphllm.models.qwen3",
}  # fmt: skip


def test_run_imports_no_more_than_it_uses(tmp_path: Path) -> None:
    """Names alone: what a process imports, it waits for at each start."""
    model = tiny_models.write_llama(tmp_path / "tiny.gguf", tiny_models.llama_weights())
    words = ["run", str(model), "--device", "reference", "-p", "hello", "-n", "1", "--temp", "0"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(done.stderr.splitlines()[-1].split())
    assert "graphllm.backends.cpu.kernels.linear" in modules
    assert not modules & UNUSED, sorted(modules & UNUSED)
    assert len([name for name in modules if name.startswith("graphllm")]) < 232
