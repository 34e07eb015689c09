"""What clients learn from the message of an error."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

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
