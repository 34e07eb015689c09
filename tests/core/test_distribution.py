"""The source distribution and the wheel built from it have every file of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_models import llama_weights, write_llama

IMPORTS = """
import importlib
import pkgutil
import graphllm
from graphllm.backends.cuda.runtime.source import MODULES

print(graphllm.__file__)
for package in (graphllm, graphllm.models):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            module.name.endswith("__main__") or importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name in ("cupy", "torch"), error
print(len(MODULES), sum("__global__" in module.text for module in MODULES))
"""
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout"),
    pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed"),
]


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an "sdist" or a "wheel" of the directory ``source``, as pip does without isolation."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files of the package that git tracks, by their paths in a wheel."""
    listed = run("git", "ls-files", "graphllm", "models", cwd=ROOT).splitlines()
    return {f"graphllm/{name}" if name.startswith("models/") else name for name in listed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build a wheel from an unpacked source distribution of the tracked files."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    with tarfile.open(build("sdist", folder / "tree", folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked")
    (source,) = (folder / "unpacked").iterdir()
    return build("wheel", source, folder / "wheel")


def test_the_wheel_has_every_file_that_git_tracks(wheel, tracked):
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == tracked
    for kind in (".cu", ".cuh", ".css", ".html", ".js", ".py"):
        assert any(name.endswith(kind) for name in found)


def test_the_wheel_runs_outside_of_the_checkout(wheel, tmp_path):
    """Every module is imported, a model runs, and a report, a model file and CUDA sources are
    written from the files of the wheel."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    write_llama(work / "tiny.gguf", llama_weights())
    (work / "imports.py").write_text(IMPORTS)
    where, modules, sources = run(
        sys.executable, "imports.py", cwd=work, PYTHONPATH=str(site)
    ).split()
    assert where == str(site / "graphllm" / "__init__.py")
    assert int(modules) == int(sources) > 100
    for words in (
        ("run", "tiny.gguf", "-p", "a", "-n", "2", "--device", "reference"),
        ("profile", "tiny.gguf", "-n", "2", "-r", "1", "--device", "reference", "-o", "r.html"),
        ("new", "my_model", "--like", "gemma3_text"),
    ):
        run(sys.executable, "-m", "graphllm", *words, cwd=work, PYTHONPATH=str(site))
    assert "<script" in (work / "r.html").read_text("utf-8")
    assert (work / "my_model.py").read_text("utf-8").count("gemma3") > 0
