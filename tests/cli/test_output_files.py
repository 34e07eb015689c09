"""Output files: none replaces an input, and an error leaves an existing file as it was."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from typer.testing import CliRunner

from graphllm.atomic_file import AtomicDirectory, AtomicFile
from graphllm.checkpoints.model_files import check_not_input, model_files
from graphllm.cli import app
from graphllm.cli.output import OutputError, check_writable
from graphllm.errors import RequestError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with a model, texts and links to them."""
    tiny.write_llama(tmp_path / "m.gguf", tiny.llama_weights())
    (tmp_path / "t.jsonl").write_text("hello\n")
    (tmp_path / "m.json").symlink_to("m.gguf")
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "mine.json").hardlink_to(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("embed m.gguf -f t.jsonl -o t.jsonl", "-o t.jsonl: is the file of the texts"),
        ("profile m.gguf -o m.json", "-o m.json: is a file of the model m.gguf"),
        ("profile m.gguf --model-def mine.py -o mine.json", "mine.json: is the model file"),
        ("validate --tiny qwen2 --oracle mine.py -o mine.json", "mine.json: is the oracle"),
        ("quantize m.gguf m.gguf --force", "m.gguf: is a file of the model m.gguf"),
        ("quantize m.gguf t.jsonl --calibrate t.jsonl --force", "t.jsonl: is the text"),
        ("quantize m.gguf t.jsonl --imatrix t.jsonl --force", "is the importance matrix"),
        ("quantize m.gguf o.gguf --calibrate t.jsonl --write-imatrix m.json --force",
         "--write-imatrix m.json: is a file of the model"),
        ("perplexity m.gguf -f t.jsonl --kl-base t.jsonl --force", "--kl-base t.jsonl: is the t"),
        ("perplexity m.gguf -f t.jsonl --kl-base m.gguf --force", "--kl-base m.gguf: is a file"),
    ],
)  # fmt: skip
def test_no_output_replaces_an_input(folder, words, message):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RequestError) as caught:
        CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert message in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        "embed m.gguf -o t.jsonl",
        "perplexity m.gguf -f - --kl-base t.jsonl --force",
        "quantize m.gguf t.jsonl --calibrate - --force",
    ],
)
def test_no_output_replaces_the_file_of_standard_input(folder, words):
    with open("t.jsonl", "rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "graphllm", *words.split()], stdin=file, capture_output=True,
            text=True,
        )  # fmt: skip
    assert "t.jsonl: is standard input; give another name" in done.stderr
    assert Path("t.jsonl").read_text() == "hello\n"


def test_the_files_of_a_model(tmp_path):
    """All parts of a split file, and of a directory those that a loader reads."""
    for number in (1, 2, 3):
        (tmp_path / f"m[1]-0000{number}-of-00003.gguf").touch()
    first = tmp_path / "m[1]-00001-of-00003.gguf"
    assert len(list(model_files(first))) == 3
    with pytest.raises(RequestError, match=r"00003\.gguf: is a file of the model"):
        check_not_input(tmp_path / "m[1]-00003-of-00003.gguf", models=[first])
    directory = tmp_path / "directory"
    (directory / "1_Pooling").mkdir(parents=True)
    names = {"config.json", "model.safetensors", "1_Pooling/config.json", "tokenizer.json"}
    for name in (*names, "report.json", "vectors.npy"):
        (directory / name).touch()
    assert {str(path.relative_to(directory)) for path in model_files(directory)} == names
    check_not_input(directory / "report.json", models=[directory])
    check_not_input(directory / "new", models=[directory, "none"])  # looks for no model


LIMITED = """
import sys
from pathlib import Path
import numpy as np
from graphllm.cli import embed, output, scaffold
for write in (
    lambda: embed._write(Path("v.npy"), np.zeros((99, 99), np.float32)),
    lambda: embed._write(Path("v.jsonl"), np.zeros((99, 99), np.float32)),
    lambda: output.write_file(Path("r.html"), "x" * 9999),
    lambda: scaffold.write_model_file("mine", "llama", force=True),
):
    try:
        write()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    names = ("v.npy", "v.jsonl", "r.html", "mine.py")
    for name in names:
        (tmp_path / name).write_text("old")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    done = subprocess.run(
        [sys.executable, "-c", LIMITED], cwd=tmp_path, preexec_fn=limit, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        *(f"OutputError -o {name}: File too large" for name in names[:3]),
        "RequestError mine.py: File too large",
    ], done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name).read_text() == "old" for name in names)


@pytest.fixture
def umask():
    """A umask that leaves the group the right to read."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_of_files(umask, tmp_path):
    """A new file has those that the umask leaves, also behind a link; a replaced one keeps its."""
    new, link, broken = tmp_path / "new", tmp_path / "link", tmp_path / "broken"
    link.symlink_to("new")
    broken.symlink_to("behind")
    for path in (new, broken):
        with AtomicFile(path, replace=False) as file:
            file.write(b"1")
        assert _mode(path) == 0o640
    new.chmod(0o604)
    with AtomicFile(link, replace=True) as file:
        (part,) = tmp_path.glob(".*.part")
        assert _mode(part) == 0o604, "others could read what is written"
        file.write(b"2")
    assert _mode(new) == 0o604 and new.read_bytes() == b"2"
    assert link.is_symlink() and broken.is_symlink()


def test_a_loop_of_links(tmp_path):
    """It leads to no file: one that is written takes the place of the link."""
    link, other = tmp_path / "link.json", tmp_path / "other"
    link.symlink_to(other)
    other.symlink_to(link)
    with pytest.raises(OutputError, match=r"-o .*/x.json: No such file or directory"):
        check_writable(other / "x.json")
    check_writable(link)
    with AtomicFile(link, replace=True) as file:
        file.write(b"1")
    assert link.read_bytes() == b"1" and not link.is_symlink()


def test_a_replaced_file_keeps_its_owner(monkeypatch, tmp_path):
    """If the system permits it; otherwise the file is written all the same."""
    path, asked = tmp_path / "file", []
    path.touch()
    old = path.stat()

    def refuse(number, *owner):
        asked.append(owner)
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refuse)
    with AtomicFile(path, replace=True) as file:
        file.write(b"2")
    assert asked == [(old.st_uid, old.st_gid)] and path.read_bytes() == b"2"


def test_permissions_of_directories(umask, tmp_path):
    new, link = tmp_path / "new", tmp_path / "link"
    with AtomicDirectory(new, replace=False):
        pass
    assert _mode(new) == 0o750
    new.chmod(0o705)
    link.symlink_to("new")
    with AtomicDirectory(link, replace=True) as part:
        assert _mode(part) == 0o700
        (part / "file").touch()
    assert _mode(new) == 0o705 and (new / "file").is_file() and link.is_symlink()


def test_an_interrupt_while_the_old_directory_is_removed_leaves_nothing(tmp_path, monkeypatch):
    made, unlink, interrupts = tmp_path / "made", os.unlink, [KeyboardInterrupt]
    made.mkdir()
    for name in "abc":
        (made / name).touch()

    def interrupted(path, **options):
        if interrupts and Path(path).name in "abc":
            raise interrupts.pop()
        unlink(path, **options)

    with pytest.raises(KeyboardInterrupt), AtomicDirectory(made, replace=True) as part:
        (part / "new").touch()
        monkeypatch.setattr(os, "unlink", interrupted)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in made.iterdir()] == ["new"] and not interrupts


def test_embeddings_in_a_file(tmp_path):
    from graphllm.cli.embed import _write

    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = Path(tmp_path, "v.npy")
    _write(path, vectors)
    assert np.array_equal(np.load(path), vectors)
