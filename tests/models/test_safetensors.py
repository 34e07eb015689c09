"""The safetensors reader: against the `safetensors` package, and against malformed files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fuzz_safetensors
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from fuzz_safetensors import INDEX, SHARDS, SINGLE, entries, index, packed

from graphllm.errors import ModelFileError
from graphllm.graph.dtype import BF16, F16, F32
from graphllm.weights.safetensors import Safetensors
from graphllm.weights.safetensors_format import BOOL, U8
from graphllm.weights.strict_json import json_object

FUZZ = Path(fuzz_safetensors.__file__)
MUTATIONS = 4000


def fails(path: Path, *words: str, data: bool = True) -> None:
    with pytest.raises(ModelFileError) as caught:
        Safetensors(path, data)
    for word in (path.name, *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    path.write_bytes(packed(header, data))
    return path


def entry(kind: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def two_shards(folder: Path) -> dict[str, str]:
    """Write two shards without an index; return the shard of each tensor."""
    homes = {}
    for seed, shard in enumerate(SHARDS):
        header, data = entries(seed)
        write(folder / shard, header, data)
        homes |= {name: shard for name in header if name != "__metadata__"}
    return homes


# ------------------------------------------------------------------------------------ valid files


def test_what_the_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {
        "one": rng.standard_normal(3).astype(np.float32),
        "two": rng.standard_normal((4, 8)).astype(np.float16),
        "three": rng.standard_normal((2, 3, 5)).astype(np.float32),
        "empty": np.zeros((0, 5), np.int32),
        "narrow": np.zeros((3, 0), np.float32),
        "scalar": np.array(-7, np.int64),
        "bytes": rng.integers(0, 256, (2, 3, 4), np.uint8),
        "signed": rng.integers(-128, 128, (9,), np.int8),
        "flags": np.array([True, False]),
    }
    safetensors.numpy.save_file(written, tmp_path / SINGLE, {"format": "pt"})
    for path in (tmp_path, tmp_path / SINGLE):
        with Safetensors(path) as file:
            assert file.path == path and file.tensors.keys() == written.keys()
            for name, value in written.items():
                info, raw = file.readable(name), file.raw(name)
                assert (info.shape, info.dtype.numpy) == (value.shape, value.dtype)
                assert raw.tobytes() == value.tobytes() and not raw.flags.writeable
                row = value.shape[-1] * value.itemsize if value.ndim else value.itemsize
                assert raw.dtype == np.uint8 and raw.shape[1] == row
                assert raw.shape[0] == np.prod(value.shape[:-1])
                file.release(name)
                assert raw.tobytes() == value.tobytes()


def test_bf16_and_names_of_dtypes(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    header = {
        "b": entry("BF16", [3, 4], 0, 24),
        "u": entry("U8", [2], 24, 26),
        "t": entry("BOOL", [1], 26, 27),
        "h": entry("F16", [1], 27, 29),
        "f": entry("F32", [], 29, 33),
    }
    with Safetensors(
        write(tmp_path / "x.safetensors", header, values.tobytes() + b"123456789")
    ) as f:
        assert [f.tensors[n].dtype for n in "buthf"] == [BF16, U8, BOOL, F16, F32]
        assert (f.raw("b").view(ml_dtypes.bfloat16) == values).all()
        assert f.raw("h").tobytes() == b"45" and f.raw("f").tobytes() == b"6789"
        assert f.raw("f").shape == (1, 4)


@pytest.mark.parametrize("padding", range(8))
def test_raw_is_a_view_wherever_the_data_begin(tmp_path: Path, padding: int) -> None:
    """Data may begin at any byte: only newer writers align them."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    text = json.dumps({"x": entry("F32", [2, 3], 0, 24)}).encode() + b" " * padding
    with Safetensors(write(tmp_path / SINGLE, text, values.tobytes())) as file:
        raw, again = file.raw("x"), file.raw("x")
        assert raw.ctypes.data == again.ctypes.data and not raw.flags.owndata
        assert raw.ctypes.data % 4096 == file.tensors["x"].offset % 4096
        assert (raw.view(np.float32) == values).all()
        file.close()
        assert raw.tobytes() == values.tobytes()
        with pytest.raises(ModelFileError, match="closed"):
            file.raw("x")
        file.release("x")


def test_release_gives_up_pages_that_can_be_read_again(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    write(tmp_path / SINGLE, {"x": entry("U8", [64, 1 << 20], 0, 64 << 20)}, values.tobytes())

    def resident() -> int:  # bytes of mapped files in memory
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) << 10

    with Safetensors(tmp_path) as file:
        raw = file.raw("x")
        assert raw.sum(dtype=np.int64) == values.sum(dtype=np.int64)
        touched = resident()
        file.release("x")
        assert resident() <= touched - (60 << 20)
        assert (raw.reshape(-1) == values).all()


def test_shards(tmp_path: Path) -> None:
    homes = two_shards(tmp_path)
    (tmp_path / INDEX).write_bytes(index(homes))
    for path in (tmp_path, tmp_path / INDEX):
        with Safetensors(path) as file:
            assert file.tensors.keys() == homes.keys()
            for name, shard in homes.items():
                wanted = dict(safetensors.deserialize((tmp_path / shard).read_bytes()))
                assert file.raw(name).tobytes() == bytes(wanted[name]["data"])
                file.release(name)


def test_a_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    """As in transformers."""
    (tmp_path / INDEX).write_bytes(index(two_shards(tmp_path)))
    write(tmp_path / SINGLE, {"x": entry("U8", [1], 0, 1)}, b"1")
    assert list(Safetensors(tmp_path).tensors) == ["x"]


def test_shards_may_lie_in_folders_and_behind_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot" / "parts").mkdir(parents=True)
    write(tmp_path / "blobs" / "abc", {"x": entry("U8", [1], 0, 1)}, b"1")
    (tmp_path / "snapshot" / "parts" / "a.safetensors").symlink_to("../../blobs/abc")
    (tmp_path / "snapshot" / INDEX).write_bytes(index({"x": "parts/a.safetensors"}))
    assert Safetensors(tmp_path / "snapshot").raw("x").tobytes() == b"1"


def test_without_data_only_the_header_must_be_there(tmp_path: Path) -> None:
    header, data = entries(0)
    whole = packed(header, data)
    path = tmp_path / SINGLE
    path.write_bytes(whole[: len(whole) - len(data)])
    with Safetensors(path, data=False) as file:
        assert len(file.tensors) == len(header) - 1
        with pytest.raises(ModelFileError, match="opened without its data"):
            file.raw("layer.0.1")
        file.release("layer.0.1")
    fails(path, "layer.0.0", "end past the file's")
    path.write_bytes(whole[: len(whole) - len(data) - 1])
    fails(path, "header: the file ends at byte", data=False)


def test_no_tensors(tmp_path: Path) -> None:
    assert Safetensors(write(tmp_path / SINGLE, {})).tensors == {}
    assert Safetensors(write(tmp_path / SINGLE, b"{}   ")).tensors == {}


# ---------------------------------------------------------------------------------- damaged files


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    whole, cut = packed(*entries(0)), tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"cut\.safetensors: "):
            Safetensors(cut)


def test_damaged_headers_give_an_error_or_what_the_package_reads(tmp_path: Path) -> None:
    """In a subprocess with limited memory."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), str(tmp_path), str(MUTATIONS), "1"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    outcomes = json.loads(done.stdout)["outcomes"]
    assert sum(outcomes.values()) >= MUTATIONS
    assert min(outcomes[kind] for kind in ("ran", "ModelFileError")) > MUTATIONS / 20


X = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        ({"x": X}, 9, "the last 1 bytes belong to no tensor"),
        ({"x": X}, 7, "its 8 bytes at 69 end past the file's 76 bytes"),
        ({"x": {**X, "dtype": "F33"}}, 8, "unknown dtype 'F33'"),
        ({"x": {**X, "dtype": ["F32"]}}, 8, "unknown dtype"),
        ({"x": {**X, "dtype": "F64"}}, 8, "F64 of shape [2] does not have 8 bytes"),
        ({"x": entry("F4", [3], 0, 1)}, 1, "F4 of shape [3] does not have 1 bytes"),
        ({"x": {**X, "shape": [-2]}}, 8, "shape is not a list"),
        ({"x": {**X, "shape": [2.0]}}, 8, "shape is not a list"),
        ({"x": {**X, "shape": [True, 2]}}, 8, "shape is not a list"),
        ({"x": {**X, "shape": 2}}, 8, "shape is not a list"),
        ({"x": {**X, "shape": [2] + [1] * 8}}, 8, "shape is not a list of at most 8"),
        ({"x": {**X, "shape": [2**63]}}, 8, "shape is not a list"),
        ({"x": {**X, "shape": [2**32, 2**32]}}, 8, "does not have 8 bytes"),
        ({"x": entry("F32", [0, 2**62, 2**62], 0, 0)}, 0, "is too large"),
        ({"x": {**X, "data_offsets": [8, 0]}}, 8, "data_offsets are not"),
        ({"x": {**X, "data_offsets": [0]}}, 8, "data_offsets are not"),
        ({"x": {**X, "data_offsets": [0, "8"]}}, 8, "data_offsets are not"),
        ({"x": {**X, "more": 1}}, 8, "not an object of data_offsets, dtype, shape"),
        ({"x": {"dtype": "F32", "shape": [2]}}, 8, "not an object of data_offsets, dtype, shape"),
        ({"x": X, "y": entry("F32", [2], 4, 12)}, 12, "'y': overlaps the previous tensor"),
        ({"x": X, "y": X}, 8, "'y': overlaps the previous tensor"),
        ({"x": X, "y": entry("F32", [1], 9, 13)}, 13, "'y': its data follow a gap"),
        ({"x": entry("F32", [1], 4, 8)}, 8, "'x': its data follow a gap"),
        ({"x": X, "__metadata__": {"a": 1}}, 8, "__metadata__ does not map strings"),
        ({"x": X, "__metadata__": None}, 8, "__metadata__ does not map strings"),
        (b'{"x":1,"x":2}', 0, "not valid JSON: 'x' appears twice"),
        (b'{"x":{"shape":[],"shape":[]}}', 0, "not valid JSON: 'shape' appears twice"),
        (b'{"x":NaN}', 0, "NaN is not a JSON number"),
        (b'{"\xff":1}', 0, "not valid JSON: 'utf-8' codec"),
        (b'{"\\ud800":1}', 0, "not valid JSON: 'utf-8' codec"),
        (b"[]", 0, "does not start with '{'"),
        (b" {}", 0, "does not start with '{'"),
        (b"{} x", 0, "not valid JSON: Extra data"),
        ({"a\nb" * 50: 1}, 0, "tensor 'a\\nba\\nb"),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, size: int, words: str) -> None:
    fails(write(tmp_path / "bad.safetensors", header, bytes(size)), words)


def test_limits_of_a_header(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    fails(write(path, b'{"a":' * 100_000), "nested too deeply")
    fails(write(path, b'{"a":[' + b"1," * (1 << 21) + b"1]}"), "more than 2097152 values")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be opened: cannot mmap an empty file"),
        (b"abc", "not a safetensors file"),
        (b"PK\x03\x04" * 100, "not a safetensors file"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (
            (3).to_bytes(8, "little") + b"{}",
            "header: the file ends at byte 10, but the header at 11",
        ),
        ((0).to_bytes(8, "little") + b"{}", "header: does not start with '{'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    ],
)
def test_not_a_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    fails(path, words)


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [("F64", [2], 16), ("F8_E4M3FNUZ", [2, 2], 4), ("F8_E5M2", [1], 1), ("F4", [4], 2),
     ("U16", [1], 2), ("F6_E2M3", [4], 3), ("I16", [2], 4)],
)  # fmt: skip
def test_other_dtypes_are_listed_but_not_read(
    tmp_path: Path, kind: str, shape: list[int], size: int
) -> None:
    header = {"x": entry(kind, shape, 0, size), "y": entry("U8", [1], size, size + 1)}
    with Safetensors(write(tmp_path / SINGLE, header, bytes(size) + b"1")) as file:
        info = file.info("x")
        assert (info.dtype.name, info.shape, info.nbytes) == (kind.lower(), tuple(shape), size)
        for read in (file.readable, file.raw):
            with pytest.raises(ModelFileError) as caught:
                read("x")
            for word in (SINGLE, "tensor 'x'", kind.lower(), "only f32, f16, bf16"):
                assert word in str(caught.value)
        assert file.raw("y").tobytes() == b"1"
        with pytest.raises(ModelFileError, match="tensor 'z': not in the file"):
            file.raw("z")


# ------------------------------------------------------------------------------ directories, index


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer.0.1": SHARDS[1]}, (SHARDS[0], "'layer.0.1'", f"lists it in '{SHARDS[1]}'")),
        ({"new": SHARDS[1]}, (SHARDS[1], "tensor 'new': missing")),
        ({"layer.1.0": None}, (INDEX, "tensor 'layer.1.0': 'None' is not a .safetensors file")),
        ({"layer.1.0": "lost.safetensors"}, ("lost.safetensors: missing, but named in",)),
        (
            {"layer.1.0": "../a.safetensors"},
            ("'../a.safetensors' is not a .safetensors file within",),
        ),
        ({"layer.1.0": "x/../../a.safetensors"}, ("is not a .safetensors file within",)),
        ({"layer.1.0": "/tmp/a.safetensors"}, ("is not a .safetensors file within",)),
        ({"layer.1.0": "a.bin"}, ("'a.bin' is not a .safetensors file within",)),
        ({"layer.1.0": "a\n.safetensors"}, (r"'a\n.safetensors' is no",)),
    ],
)
def test_inconsistent_index(tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    (tmp_path / INDEX).write_bytes(index(two_shards(tmp_path) | change))
    with pytest.raises(ModelFileError) as caught:
        Safetensors(tmp_path)
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    homes = two_shards(tmp_path)
    del homes["layer.1.3"]
    (tmp_path / INDEX).write_bytes(index(homes))
    fails(tmp_path, SHARDS[1], f"tensor 'layer.1.3': not in {INDEX}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "'weight_map' is missing, empty"),
        (b'{"weight_map":{}}', "'weight_map' is missing, empty or not an object"),
        (b'{"weight_map":[]}', "'weight_map' is missing, empty"),
        (b"[]", "not a JSON object"),
        (b"", "cannot be opened"),
        (b'{"weight_map":{"a":"1","a":"2"}}', "'a' appears twice"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ],
)
def test_a_malformed_index(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / INDEX).write_bytes(content)
    fails(tmp_path, INDEX, words)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(index(two_shards(tmp_path)))
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    fails(tmp_path, SHARDS[1], "end past the file's")
    assert len(Safetensors(tmp_path, data=False).tensors) == 16


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-2.bin", "a.pt", "a.pth"]
)
def test_pickles_are_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    words = (name, "never loaded; convert it to safetensors")
    fails(tmp_path, *words)
    fails(tmp_path / name, *words)


def test_directories_without_weights(tmp_path: Path) -> None:
    fails(tmp_path, f"no {SINGLE} and no {INDEX}")
    (tmp_path / "other.safetensors").write_bytes(b"")
    fails(tmp_path, f"no {SINGLE} and no {INDEX}, only other.safetensors")


def test_not_a_regular_file(tmp_path: Path) -> None:
    fails(tmp_path / "missing.safetensors", "No such file")
    os.mkfifo(tmp_path / SINGLE)
    fails(tmp_path, "not a regular file")
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).symlink_to("gone")
    fails(tmp_path, SINGLE, "No such file")


def test_json_objects() -> None:
    value = {"a": [1, -2.5, 1e300, None, True, {"b": "é \U0001f600"}], "": {}}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert json_object(text.encode(), "here") == value
    with pytest.raises(ModelFileError, match="here: not a JSON object"):
        json_object(b"3", "here")
