"""Models of the Hugging Face Hub: the local cache, downloads and their errors."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys

import huggingface_hub
import pytest

from graphllm.checkpoints import hub
from graphllm.checkpoints.checkpoint import checkpoint_path
from graphllm.errors import ModelFileError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return an empty cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


def keep(cache, *files: str, revision: str = "0a1b"):
    """Put a model org/small with these files in the cache."""
    folder = cache / "models--org--small"
    found = folder / "snapshots" / revision
    found.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for name in files:
        (found / name).write_text("{}")
    return found


def test_a_cached_model_is_found(cache):
    found = keep(cache, "config.json", "model.safetensors", "tokenizer.json")
    assert checkpoint_path("org/small") == found


def test_a_model_without_tokenizer_or_modules_is_downloaded(cache, monkeypatch):
    """If it cannot be, the files in the cache are used."""
    asked = []

    def fails(name, revision, allow_patterns):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    found = keep(cache, "config.json", "model.safetensors", "vocab.json")
    assert hub.find_cached("org/small") is None
    assert checkpoint_path("org/small") == found and asked == ["org/small"]
    (found / "merges.txt").write_text("")
    assert hub.find_cached("org/small") == found
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [{"type": f"a.{kind}", "path": kind[:1] * (kind != kinds[0])} for kind in kinds]
    (found / "modules.json").write_text(json.dumps(modules))
    for file in ("P/config.json", "D/config.json", "D/model.safetensors"):
        assert hub.find_cached("org/small") is None
        (found / file).parent.mkdir(exist_ok=True)
        (found / file).write_text("{}")
    assert checkpoint_path("org/small") == found and asked == ["org/small"]
    (found / "modules.json").write_text('{"type"')  # loading reports it
    assert hub.find_cached("org/small") == found


ENCODER = '{"architectures": ["BertModel"]}'


def test_modules_that_other_programs_do_not_cache_are_downloaded(cache, monkeypatch):
    """transformers caches a model of embeddings without them; it would get mean pooling."""
    found = keep(cache, "config.json", "model.safetensors", "tokenizer.json")
    modules, asked = found / "modules.json", []

    def download(name, revision, allow_patterns):
        asked.append(name)
        if len(asked) == 1:
            modules.write_text("[]")
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for architectures in ("[]", '["BertForSequenceClassification"]', '["LlamaForCausalLM"]', "3"):
        (found / "config.json").write_text(f'{{"architectures": {architectures}}}')
        assert hub.find_cached("org/small") == found
    (found / "config.json").write_text(ENCODER)
    assert hub.find_cached("org/small") is None
    assert checkpoint_path("org/small") == found and modules.is_file()
    assert checkpoint_path("org/small") == found and asked == ["org/small"]
    modules.unlink()
    for _ in range(2):  # the repository has none: it is asked once
        assert checkpoint_path("org/small") == found and asked == ["org/small"] * 2


def test_a_model_whose_modules_cannot_be_looked_for(cache, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = keep(cache, "config.json", "model.safetensors", "tokenizer.json")
    (found / "config.json").write_text(ENCODER)
    assert checkpoint_path("org/small") == found
    assert "files of the tokenizer or of modules may be missing" in capsys.readouterr().err
    # As huggingface_hub notes a file that a commit lacks.
    missing = found.parents[1] / ".no_exist" / found.name / "modules.json"
    missing.parent.mkdir(parents=True)
    missing.touch()
    cached = huggingface_hub.try_to_load_from_cache("org/small", "modules.json", cache_dir=cache)
    assert cached is huggingface_hub._CACHED_NO_EXIST
    assert checkpoint_path("org/small") == found and not capsys.readouterr().err


def test_an_incomplete_model_is_not_found(cache, monkeypatch):
    found = keep(cache, "config.json")
    assert hub.find_cached("org/small") is None
    (found / "model.safetensors.index.json").write_text('{"weight_map": {"a": "*"}}')
    with pytest.raises(ModelFileError, match=r"weight_map does not name \.safetensors files"):
        hub.find_cached("org/small")
    (found / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    assert hub.find_cached("org/small") is None
    (found / "1.safetensors").write_text("")
    (found / "tokenizer.json").write_text("{}")
    assert hub.find_cached("org/small") == found
    (cache / "models--org--small" / "refs" / "main").write_text("../../elsewhere")
    assert hub.find_cached("org/small") is None


def test_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFileError, match=r"org/none: no such file, and not in the .* cache"):
        checkpoint_path("org/none")


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFileError, match=r"pip install 'graphllm\[hub\]'"):
        checkpoint_path("org/none")


def test_a_download_and_one_that_fails(monkeypatch, tmp_path):
    """Copies of the weights for other programs are not downloaded."""
    asked = []
    index = '{"weight_map": {"x": "a-1.safetensors", "y": "b/2.safetensors"}}'

    (folder := tmp_path / "0a1b").mkdir()
    there = ["model.safetensors.index.json", "a-1.safetensors", "b/2.safetensors"]
    there += ["consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin"]

    def download(name, revision, allow_patterns):
        if name == "org/gone":
            raise OSError("401 Client Error\nRepository Not Found")
        got = [n for n in there if any(fnmatch.fnmatch(n, p) for p in allow_patterns)]
        asked.append((revision, got))
        for each in got:
            (folder / each).parent.mkdir(exist_ok=True)
            (folder / each).write_text(index if each.endswith("json") else "")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint_path("org/new") == folder
    assert asked == [("main", there[:1]), ("0a1b", there[1:3])]
    there = ["model.safetensors"]
    for path in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
        path.unlink()
    assert checkpoint_path("org/one") == folder and asked[2:] == [("main", there)]
    with pytest.raises(ModelFileError, match="cannot be downloaded: 401 Client Error Repository"):
        checkpoint_path("org/gone")


def test_files_of_embedding_models_and_translation_models_are_downloaded(monkeypatch, tmp_path):
    """Of modules in folders of other names, too, which modules.json states."""
    there = [
        "model.safetensors", "modules.json", "sentence_bert_config.json", "source.spm",
        "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json",
        "2_Dense/model.safetensors", "head/config.json", "head/model.safetensors",
    ]  # fmt: skip
    left_out = ["onnx/model.safetensors", "pytorch_model.bin", "2_Dense/pytorch_model.bin"]
    modules = [{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "head"}]

    def download(name, revision, allow_patterns):
        for each in there + left_out:
            if any(fnmatch.fnmatch(each, pattern) for pattern in allow_patterns):
                (tmp_path / each).parent.mkdir(exist_ok=True)
                (tmp_path / each).write_text(json.dumps(modules))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoint_path("org/new") == tmp_path
    got = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path)) for path in got) == sorted(there)


def test_without_a_network(tmp_path):
    """The command line with the real huggingface_hub and no server."""
    done = subprocess.run(
        [sys.executable, "-m", "graphllm", "inspect", "org/none"],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "error: org/none: no such file, and not in the Hugging Face cache"
    )
    assert "it cannot be downloaded: " in done.stderr


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/etc/none", "../up/none", "org/"])
def test_other_names_are_paths(name):
    with pytest.raises(ModelFileError, match=r"no such file$"):
        checkpoint_path(name)
