"""`graphllm quantize`: files that the `gguf` package reads, bad input, and interrupted runs."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from graphllm import GraphllmError, ModelFileError, RequestError
from graphllm.checkpoints.gguf_writer import GgufWriter, TensorEntry, encode_value
from graphllm.graph.dtype import DTYPES
from graphllm.quantize import FILE_TYPES, quantize
from graphllm.quantize.imatrix import read_imatrix
from graphllm.quantize.mixes import FILE_TYPES as TYPES
from graphllm.quantize.mixes import Model, file_type, mixed_format

KINDS = gguf.GGMLQuantizationType
VALUES = {
    "t.u8": np.uint8(200), "t.i8": np.int8(-3), "t.u16": np.uint16(60_000), "t.i16": np.int16(-9),
    "t.u32": np.uint32(4e9), "t.i32": np.int32(-5), "t.f32": np.float32(0.1), "t.flag": True,
    "t.u64": np.uint64(1 << 60), "t.i64": np.int64(-(1 << 60)), "t.f64": np.float64(0.1),
    "t.text": "é▁", "t.floats": np.array([0.5, 2], np.float32), "t.none": np.zeros(0, np.int32),
    "t.words": ["a", "", "ü"], "t.flags": np.array([True, False]),
}  # fmt: skip


def write(path: Path, tensors: dict[str, np.ndarray], kind: str = "bf16") -> Path:
    """Write a model of an architecture that graphllm does not know."""
    metadata = {"general.architecture": "unknown-arch", "unknown-arch.block_count": 2, **VALUES}
    entries = [
        TensorEntry(n, t.shape, DTYPES["f32" if t.ndim == 1 else kind]) for n, t in tensors.items()
    ]
    encoded = {key: encode_value(value) for key, value in metadata.items()}
    with GgufWriter(path, encoded, entries, force=True) as writer:
        for each in entries:
            values = tensors[each.name].astype(each.dtype.numpy)
            writer.write(values.view(np.uint8))
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, 512), "output_norm.weight": (512,),
        "blk.0.attn_v.weight": (24, 512), "blk.0.ffn_up.weight": (7, 96),
        "blk.0.ffn_gate.weight": (5, 50), "blk.1.ffn_down_exps.weight": (3, 8, 256),
        "blk.1.ffn_gate_inp.weight": (3, 512), "blk.1.attn_q.bias": (24,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_file_keeps_its_metadata_and_its_values(tmp_path, tensors):
    source = write(tmp_path / "a.gguf", tensors)
    done = quantize(source, tmp_path / "b.gguf", "Q4_K_M")
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "b.gguf")
    for key in VALUES:
        old, new = (reader.fields[key] for reader in (before, after))
        assert old.types == new.types and old.contents() == new.contents()
    assert after.fields["t.i64"].contents() == -(1 << 60)
    assert after.fields["general.file_type"].contents() == 15
    kinds = {t.name: t.tensor_type.name for t in after.tensors}
    assert kinds == {
        "token_embd.weight": "Q6_K", "output_norm.weight": "F32", "blk.0.attn_v.weight": "Q6_K",
        "blk.0.ffn_up.weight": "Q5_0", "blk.0.ffn_gate.weight": "F16",
        "blk.1.ffn_down_exps.weight": "Q4_K", "blk.1.ffn_gate_inp.weight": "BF16",
        "blk.1.attn_q.bias": "F32",
    }  # fmt: skip
    for each in after.tensors:
        want = tensors[each.name]
        back = gguf.quants.dequantize(each.data, each.tensor_type).reshape(want.shape)
        assert np.abs(back - want).max() < 0.4 and np.corrcoef(back.flat, want.flat)[0, 1] > 0.99
    assert [line.split(":")[0] for line in done.notes] == [
        "1 matrices are q5_0, not q4_k", "1 matrices are f16, not q4_k",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind, tmp_path, tensors):
    some = {name: tensors[name] for name in ("token_embd.weight", "blk.0.attn_v.weight")}
    source = write(tmp_path / "a.gguf", some | {"output.weight": tensors["token_embd.weight"]})
    quantize(source, tmp_path / "b.gguf", kind, threads=2)
    for each in gguf.GGUFReader(tmp_path / "b.gguf").tensors:
        want = tensors[each.name.replace("output", "token_embd")]
        back = gguf.quants.dequantize(each.data, each.tensor_type)
        assert np.corrcoef(back.flat, want.flat)[0, 1] > 0.95
    assert FILE_TYPES[kind].number == gguf.LlamaFileType[f"MOSTLY_{kind}".upper().replace(
        "MOSTLY_F32", "ALL_F32")].value  # fmt: skip


def test_mixes_are_those_of_llama_cpp():
    """Layers with more bits, as llama.cpp's quantiser chooses them for 32 layers."""
    names = frozenset(
        f"blk.{i}.{part}.weight" for i in range(32) for part in ("attn_v", "ffn_down", "attn_k")
    )
    model = Model("llama", 32, 0, 4, names)

    def layers(kind: str, part: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i in range(32):
            each = mixed_format(file_type(kind), f"blk.{i}.{part}.weight", (8, 512), model)
            found.setdefault(each, []).append(i)
        return found

    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for part in ("attn_v", "ffn_down"):
        assert layers("q4_k_m", part)["q6_k"] == layers("q5_k_m", part)["q6_k"] == more
    assert layers("q4_k_s", "attn_v") == {"q5_k": [0, 1, 2, 3], "q4_k": [*range(4, 32)]}
    assert layers("q3_k_m", "attn_v") == {"q5_k": [0, 1], "q4_k": [*range(2, 32)]}
    assert layers("q3_k_m", "ffn_down") == {"q5_k": [0, 1], "q4_k": [*range(2, 32)]}
    assert layers("q2_k", "attn_v") == {"q4_k": [*range(32)]}
    assert layers("q6_k", "attn_k") == {"q6_k": [*range(32)]}


def imatrix_files(folder: Path, entries: dict[str, np.ndarray]) -> list[Path]:
    """Write mean squares [experts, columns] in both forms of llama.cpp, for 6 rows of each."""
    old, new = folder / "imatrix.dat", folder / "imatrix.gguf"
    with open(old, "wb") as file:
        file.write(struct.pack("<i", len(entries)))
        for name, values in entries.items():
            file.write(struct.pack("<i", len(name)) + name.encode())
            file.write(struct.pack("<ii", 6, values.size) + (values * 6).tobytes())
    writer = gguf.GGUFWriter(new, "imatrix")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", values * np.float32(6))
        writer.add_tensor(f"{name}.counts", np.full((len(values), 1), 6, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [old, new]


def test_importance(tmp_path, tensors):
    """Both forms of the file have the same effect: less error in columns that matter."""
    source, rng = write(tmp_path / "a.gguf", tensors), np.random.default_rng(1)
    entries = {
        name: (rng.random(((tensors[name].ndim == 3 and 3) or 1, tensors[name].shape[-1])) ** 8)
        .astype(np.float32)
        for name in ("blk.0.attn_v.weight", "blk.1.ffn_down_exps.weight")
    }  # fmt: skip
    files = [tmp_path / f"{i}.gguf" for i in range(3)]
    quantize(source, files[0], "q4_k_s")
    for path, made in zip(imatrix_files(tmp_path, entries), files[1:], strict=True):
        np.testing.assert_allclose(read_imatrix(path)["blk.0.attn_v.weight"],
                                   entries["blk.0.attn_v.weight"], rtol=1e-6)  # fmt: skip
        notes = quantize(source, made, "q4_k_s", imatrix=path).notes
        assert any("no importance for 2 matrices" in line for line in notes)
    assert files[1].read_bytes() == files[2].read_bytes()
    for name, weights in entries.items():
        errors = []
        for made in files[:2]:
            (found,) = (t for t in gguf.GGUFReader(made).tensors if t.name == name)
            back = gguf.quants.dequantize(found.data, found.tensor_type)
            weight = weights[:, None] if tensors[name].ndim == 3 else weights
            errors.append((weight * (back - tensors[name]) ** 2).sum())
        assert errors[1] < 0.9 * errors[0]


def test_bad_input(tmp_path, tensors):
    source, out = write(tmp_path / "a.gguf", tensors), tmp_path / "b.gguf"

    def fails(says: str, kind: type[GraphllmError], *args, **options) -> None:
        with pytest.raises(kind, match=says):
            quantize(*args, **options)

    fails("unknown type 'q9'; known: q2_k", RequestError, source, out, "q9")
    quantize(source, out, "q8_0")
    fails("b.gguf: exists already", RequestError, source, out, "q8_0")
    fails("is a directory", RequestError, source, tmp_path, "q8_0")
    fails("'token_embd.weight' is q8_0 already", RequestError, out, tmp_path / "c.gguf", "q4_0")
    quantize(out, tmp_path / "c.gguf", "q4_0", allow_requantize=True)
    quantize(source, out, "q8_0", force=True)
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    fails("link.gguf: is a file of the model", RequestError, source, link, "q8_0", force=True)
    fails("c.gguf: is the importance matrix", RequestError, source, tmp_path / "c.gguf", "q8_0",
          imatrix=tmp_path / "c.gguf", force=True)  # fmt: skip
    short = {"blk.0.attn_v.weight": np.ones((1, 256), np.float32)}
    for path in imatrix_files(tmp_path, short):
        says = "'blk.0.attn_v.weight' has 256 values for a tensor of shape"
        fails(says, ModelFileError, source, out, "q4_k", imatrix=path, force=True)
    fails("c.gguf: is a GGUF file, but not an imp", ModelFileError, source, out, "q4_k",
          imatrix=tmp_path / "c.gguf", force=True)  # fmt: skip
    (tmp_path / "broken.dat").write_bytes(b"\x01\0\0\0\x05\0\0\0abc")
    fails("ends at byte 11, before the number of calls", ModelFileError, source, out, "q4_k",
          imatrix=tmp_path / "broken.dat", force=True)  # fmt: skip
    before = out.read_bytes()
    for name, kind in (
        ("blk.0.attn_v.weight", "q4_k"), ("token_embd.weight", "q8_0"),
        ("output_norm.weight", "q8_0"), ("blk.1.ffn_gate_inp.weight", "f16"),
    ):  # fmt: skip
        for value in (np.nan, -np.inf):
            bad = {**tensors, name: tensors[name].copy()}
            bad[name].reshape(-1)[-1] = value
            broken = write(tmp_path / "nan.gguf", bad)
            says = f"tensor '{name}': row .* has a value that is infinite or NaN"
            fails(says, ModelFileError, broken, out, kind, force=True)
    large = {"output.weight": np.full((2, 32), 1e6, np.float32)}
    broken = write(tmp_path / "nan.gguf", large)
    fails("beyond the range of f16", ModelFileError, broken, out, "f16", force=True)
    assert out.read_bytes() == before and not list(tmp_path.glob(".*"))


def command(*words: object, **options) -> subprocess.Popen:
    words = sys.executable, "-m", "graphllm", "quantize", *map(str, words)
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            **options)  # fmt: skip


def test_an_interrupted_run_leaves_the_old_file_or_none(tmp_path):
    rng = np.random.default_rng(0)
    big = {f"blk.{i}.ffn_up.weight": rng.standard_normal((512, 2048)) for i in range(24)}
    source, out = write(tmp_path / "a.gguf", big), tmp_path / "b.gguf"
    start = time.monotonic()
    assert command(source, out, "--type", "q2_k").wait() == 0
    seconds, whole = time.monotonic() - start, out.read_bytes()
    out.unlink()
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        run = command(source, out, "--type", "q2_k", "--force")
        time.sleep(seconds * rng.uniform(0.4, 0.95))
        run.send_signal(number)
        run.communicate()
        assert not out.exists() or out.read_bytes() == whole
        if number != signal.SIGKILL:
            assert not list(tmp_path.glob(".*.part"))
        for rest in tmp_path.glob(".*.part"):
            rest.unlink()
    out.write_bytes(b"old")

    def limit() -> None:  # as a full disk: writing beyond a size fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))

    run = command(source, out, "--type", "q2_k", "--force", preexec_fn=limit, env=os.environ)
    _, error = run.communicate()
    assert run.returncode == 1 and error == f"error: {out}: File too large\n"
    assert out.read_bytes() == b"old" and not list(tmp_path.glob(".*.part"))
