"""Small GGUF files for tests, written by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_spm(path: Path, vocabulary: dict[str, Any], **flags: bool) -> Path:
    """A file with a SentencePiece vocabulary only: ``pieces``, ``scores`` and ``types``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.encode() for piece in vocabulary["pieces"]])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "types" in vocabulary:
        writer.add_token_types(vocabulary["types"])
    for key, value in flags.items():
        writer.add_bool("tokenizer.ggml." + key, value)
    return finish(writer, path)


def write_tensors(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A file with one of each kind of metadata and a few tensors; their values as written."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -5)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -6000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -7)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "naïve ▁ text")
    writer.add_array("t.ints", [3, -1, 4])
    writer.add_array("t.floats", [0.25, -1.5])
    writer.add_array("t.strings", ["", "a", "日本"])
    tensors = {
        "one": rng.standard_normal(3).astype(np.float32),
        "two": rng.standard_normal((4, 8)).astype(np.float16),
        "three": rng.standard_normal((2, 3, 5)).astype(np.float32),
    }
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    raw = rng.integers(0, 256, (5, 2 * 34), dtype=np.uint8)
    writer.add_tensor("blocks", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer, path)
    return tensors | {"blocks": raw}


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
