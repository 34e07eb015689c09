"""llama2.c files, against a writer in this module that follows `legacy_export` and `run.c`."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from llama2c_files import (
    CONTEXT,
    DIM,
    HEADS,
    HIDDEN,
    KV,
    LAYERS,
    VOCAB,
    write_model,
)

from graphllm.errors import ModelFileError
from graphllm.graph.dtype import F32
from graphllm.weights.llama2c import Llama2c, read_vocabulary


def patched(path: Path, field: int, value: int) -> Path:
    """Write the file with another number in its header."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4 * field, value % 2**32)
    path.write_bytes(data)
    return path


def fails(path: Path, *words: str, data: bool = True) -> None:
    with pytest.raises(ModelFileError) as caught:
        Llama2c(path, data)
    for word in (path.name, *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_and_configuration(tmp_path: Path, shared: bool) -> None:
    weights = write_model(tmp_path / "m.bin", shared)
    with Llama2c(tmp_path / "m.bin") as file:
        assert file.interleaved and file.path == tmp_path / "m.bin"
        assert file.tensors.keys() == weights.keys()
        for name, value in weights.items():
            info, raw = file.readable(name), file.raw(name)
            assert (info.shape, info.dtype) == (value.shape, F32)
            rows = value.shape[0] if value.ndim > 1 else 1
            assert raw.shape == (rows, 4 * value.shape[-1]) and not raw.flags.writeable
            assert raw.tobytes() == value.tobytes()
            file.release(name)
        assert file.config == {
            "hidden_size": DIM,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": shared,
        }


def test_without_data_the_header_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    weights = write_model(path, shared=True)
    path.write_bytes(path.read_bytes()[:28])
    with Llama2c(path, data=False) as file:
        assert file.tensors.keys() == weights.keys()
        with pytest.raises(ModelFileError, match="opened without its data"):
            file.raw("model.norm.weight")
    fails(path, "28 bytes, but a model of dim 24, hidden 20")


def test_every_cut_and_every_addition_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin", shared=False)
    whole = (tmp_path / "m.bin").read_bytes()
    bad = tmp_path / "bad.bin"
    for size in [*range(60), *range(60, len(whole), 97), len(whole) - 1]:
        bad.write_bytes(whole[:size])
        fails(bad)
    bad.write_bytes(whole + b"\0")
    fails(bad, f"{len(whole) + 1} bytes, but a model of")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (0, 0x616B3432, "version 20 is not supported, only version 0"),
        (0, -24, "not a llama2.c file: dim = -24"),
        (1, 0, "not a llama2.c file: hidden = 0"),
        (2, 2**31 - 1, "layers = 2147483647 must be at most 4096"),
        (2, 4, "bytes, but a model of"),
        (3, 5, "dim = 24 must be an even multiple of heads = 5"),
        (3, 8, "dim = 24 must be an even multiple of heads = 8"),
        (4, 4, "heads = 6 is not a multiple of kv_heads = 4"),
        (5, 0, "not a llama2.c file: vocab = 0"),
        (5, -(2**31), "bytes, but a model of"),
        (5, -VOCAB, "bytes, but a model of"),
        (6, 0, "not a llama2.c file: context = 0"),
        (6, 12, "bytes, but a model of"),
    ],
)
def test_bad_headers(tmp_path: Path, field: int, value: int, words: str) -> None:
    write_model(tmp_path / "bad.bin", shared=True)
    fails(patched(tmp_path / "bad.bin", field, value), words)


def test_damaged_headers_never_crash(tmp_path: Path) -> None:
    write_model(tmp_path / "m.bin", shared=True)
    data, rng = (tmp_path / "m.bin").read_bytes(), random.Random(0)
    bad = tmp_path / "bad.bin"
    opened = 0
    for _ in range(2000):
        changed = bytearray(data[:28])
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(28)] = rng.choice((0, 1, 2, 3, 12, 24, 127, 128, 255))
        bad.write_bytes(changed)
        try:
            with Llama2c(bad, data=False) as file:
                opened += len(file.tensors) >= 11
        except ModelFileError as error:
            assert "\n" not in str(error)
    assert 100 < opened < 1900


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    fails(path, "No such file")
    for content, words in (
        (b"", "cannot be opened"),
        (b"abc", "not a llama2.c file: 3 bytes"),
        (b"PK\x03\x04" * 100, "a pickle"),
        (b"\x80\x02\x8a\nl\xfc\x9c", "a pickle"),
        (b"24ka" + bytes([1, 0, 0, 0]), "version 1 is not supported"),
    ):
        path.write_bytes(content)
        fails(path, words)


# ------------------------------------------------------------------------------------ vocabulary

PIECES = [b"<unk>", b"\n<s>\n", b"<0x0A>", " é".encode(), b"", b"\xff"]
SCORES = [0.0, 0.0, -1.5, -3e4, 0.25, -0.0]


def vocabulary(longest: int = 6) -> bytes:
    data = struct.pack("<i", longest)
    for piece, score in zip(PIECES, SCORES):
        data += struct.pack("<fi", score, len(piece)) + piece
    return data


def test_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(vocabulary())
    pieces, scores = read_vocabulary(path)
    assert pieces == PIECES
    assert scores.dtype == np.float32 and (scores == np.array(SCORES, np.float32)).all()
    path.write_bytes(struct.pack("<i", 3))
    pieces, scores = read_vocabulary(path)
    assert pieces == [] and scores.shape == (0,)


def test_truncated_and_damaged_vocabularies(tmp_path: Path) -> None:
    path, whole = tmp_path / "tokenizer.bin", vocabulary()
    ends = {4 + sum(8 + len(piece) for piece in PIECES[:n]) for n in range(len(PIECES) + 1)}
    for size in set(range(len(whole))) - ends:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"tokenizer\.bin: "):
            read_vocabulary(path)
    for data, words in (
        (vocabulary(longest=5), "token 2: 6 bytes are not in 0..5"),
        (vocabulary(longest=-1), "token 0: 5 bytes are not in 0..-1"),
        (struct.pack("<ifi", 9, 0.0, -1), "token 0: -1 bytes are not in 0..9"),
        (struct.pack("<ifi", 2**31 - 1, 0.0, 2**31 - 1), "token 0: the file is truncated"),
        (struct.pack("<ifi", 9, float("nan"), 0), "token 0: its score is nan"),
        (struct.pack("<i", 9) + bytes(8 * (2**20 + 1)), "token 1048576: more than 1048576 tokens"),
    ):
        path.write_bytes(data)
        with pytest.raises(ModelFileError) as caught:
            read_vocabulary(path)
        assert words in str(caught.value) and "\n" not in str(caught.value)
