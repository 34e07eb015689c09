"""Run what docs/server.md shows, as far as it needs no container."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
from doc_examples import DOCS
from running_server import KEY, MODEL
from typer.testing import CliRunner

from graphllm.cli import app

PAGE = (DOCS / "server.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
(CONTAINER,) = (text for language, text in BLOCKS if language == "dockerfile")


def lists_of(instruction: str) -> list[str]:
    """Return the arguments of an instruction of the container file in its JSON form."""
    (found,) = re.findall(rf"^{instruction}\b.*?(\[.*\])$", CONTAINER, re.MULTILINE)
    return json.loads(found)


def flags() -> Iterator[str]:
    """Flags of `graphllm serve` in the container file, and after the image in its command."""
    (command,) = (text for language, text in BLOCKS if language == "sh" and "podman run" in text)
    arguments = shlex.split(command.replace("\\\n", " "))
    last = len(arguments) - 1 - arguments[::-1].index("graphllm")
    for each in [*lists_of("ENTRYPOINT"), *arguments[last:]]:
        if each.startswith("--"):
            yield each


def test_flags_of_the_container_exist():
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    found = set(flags())
    assert {"--host", "--port", "--api-key-file"} == found
    assert all(flag in shown for flag in found)
    assert re.search(r"^USER \d+$", CONTAINER, re.MULTILINE)


def test_health_check(server):
    """It succeeds without a key, and fails if nothing listens."""
    _, option, code = lists_of("HEALTHCHECK.*CMD")
    for port, fails in ((server.port, False), (1, True)):
        command = [sys.executable, option, code.replace("8080", str(port))]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert bool(done.returncode) == fails


def test_structured_outputs(openai, server):
    pytest.importorskip("llguidance")
    (code,) = (text for language, text in BLOCKS if "structured_outputs" in text)
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        shown = eval(code.replace('"demo"', repr(MODEL)), {"client": client})
    assert shown.choices[0].message.content in ("yes", "no")


def test_langchain(server, capsys):
    """The chat; the embeddings need a server of two models."""
    pytest.importorskip("langchain_openai")
    (code,) = (text for language, text in BLOCKS if "import ChatOpenAI" in text)
    code = code.replace("8080", str(server.port)).replace('"none"', repr(KEY))
    exec(code.partition("embeddings =")[0].replace('"chat"', f"{MODEL!r}, max_tokens=8"), {})
    assert capsys.readouterr().out
