"""What clients learn from the message of an error."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import tiny_models as tiny
from running_server import Running

import graphllm
from graphllm.errors import RequestError
from graphllm.server import errors
from graphllm.server.errors import api_error, hide_folder

FOLDERS = ("/data", "/data/own models", "/data/own models/small", "/srv")


@pytest.mark.parametrize("order", list(permutations(FOLDERS)))
def test_folders_of_models_are_hidden(monkeypatch, order):
    """Nested folders too, whichever was served first."""
    monkeypatch.setattr(errors, "_hidden", set())
    for folder in order:
        hide_folder(Path(folder, "a.gguf"))
    for folder in FOLDERS:
        message = api_error(RequestError(f"{folder}/a.gguf: no chat template ({folder}/b)")).message
        assert message == "a.gguf: no chat template (b)"


def test_other_paths_are_left_whole():
    hide_folder(Path("/models/a.gguf"))
    text = "/home/models/a.json: not found; nor models/b"
    assert api_error(RequestError(text)).message == text


def test_a_model_in_the_root_hides_nothing():
    hide_folder(Path("/a.gguf"))
    assert api_error(RequestError("/b/c")).message == "/b/c"


def test_relative_folders_are_hidden(monkeypatch):
    """As they were given, and in their absolute form; but not as a part of another path."""
    monkeypatch.setattr(errors, "_hidden", set())
    hide_folder(Path("own/models/a.gguf"))
    hide_folder(Path("b.gguf"))
    text = f"own/models/a.gguf: {Path.cwd()}/own/models/c; /srv/own/models/d, ../own/models/e"
    want = "a.gguf: c; /srv/own/models/d, ../own/models/e"
    assert api_error(RequestError(text)).message == want


TEMPLATE = "{{ raise_exception('no') if messages[0].content == 'a' else messages[0].content }}"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATHS = {"/v1/chat/completions": {}, "/apply-template": {}, "/v1/responses": {"input": "a"},
         "/v1/messages": {"model": "tiny", "max_tokens": 1}}  # fmt: skip


def test_errors_of_a_template_file_do_not_name_its_folder(tmp_path, monkeypatch):
    for name in ("models", "secret"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    path = tiny.write_tiny(Path("models/tiny.gguf"), "llama")
    Path("secret/chat.jinja").write_text(TEMPLATE)
    for template, want in (
        ("./secret/chat.jinja", "chat.jinja: no"),
        (tmp_path / "secret" / "chat.jinja", "chat.jinja: no"),
        (None, "tiny.gguf: the model has no chat template"),
    ):
        with graphllm.load(path, device="cpu", threads=1, chat_template=template) as llm:
            server = Running(llm)
            answers = {each: server.call(each, {**CHAT, **own}) for each, own in PATHS.items()}
            server.stop()
        for each, (status, found) in answers.items():
            assert status == 400 and found["error"]["message"].startswith(want), found
            if each != "/v1/messages":  # Anthropic's errors name no field
                field = "input" if each == "/v1/responses" else "messages"
                assert found["error"]["param"] == field
