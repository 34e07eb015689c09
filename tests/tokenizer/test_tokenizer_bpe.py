"""BPE tokenizers of GGUF files, and Phi-3's, against llama.cpp (golden/make_bpe.py)."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vocabulary_files import write_vocabulary

from graphllm import tokenizer
from graphllm.errors import ModelFileError
from graphllm.tokenizer import Tokenizer
from graphllm.tokenizer.pre_tokenizers import CHARACTER_CLASSES, PRE_TOKENIZERS

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden/bpe.json").read_text())
KINDS: dict[str, Any] = GOLDEN["kinds"]
TEXTS: list[str] = GOLDEN["texts"]
BYTES, RAW = GOLDEN["vocabularies"]["bytes"], GOLDEN["vocabularies"]["raw"]
NAMED = (
    "default", "gpt-2", "llama-bpe", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "starcoder", "refact", "command-r", "falcon", "mpt", "gemma4",
)  # fmt: skip
BEGIN, END, MARK = (BYTES["pieces"].index(p) for p in ("<|begin|>", "<|endoftext|>", "<|im_end|>"))


def content(kind: str) -> dict[str, Any]:
    """Return the content of the vocabulary file of a golden kind."""
    pre = kind.removeprefix("lacking ")
    raw = pre == "raw" or (pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].raw)
    vocabulary = ("lacking " if pre != kind else "") + ("raw" if raw else "bytes")
    return GOLDEN["vocabularies"][vocabulary] | {"pre": pre if pre in PRE_TOKENIZERS else "gpt-2"}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def bpe(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary-only file of an unknown architecture."""
    path = tmp_path_factory.mktemp("bpe") / "tiny.gguf"
    return tokenizer.load(write_vocabulary(path, content(kind)))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def check(made: Tokenizer, answers: dict[str, Any], texts: list[str]) -> None:
    for row, text in enumerate(texts):
        ids = numbers(answers["ids"][row])
        assert made.encode(text) == ids, text
        special = answers["special"].get(str(row))
        expect = answers["begin"] + ids if special is None else numbers(special)
        assert made.encode(text, add_special=True, parse_special=True) == expect, text


def test_ids_equal_llama_cpp(kind: str, bpe: Tokenizer) -> None:
    assert len(TEXTS) == len(KINDS[kind]["ids"]) > 150
    check(bpe, KINDS[kind], TEXTS)


def test_pieces_and_ends_equal_llama_cpp(kind: str, bpe: Tokenizer) -> None:
    answers = KINDS[kind]
    pieces = b"".join(b"%d=%s\n" % (token, bpe.piece(token)) for token in range(bpe.vocab_size))
    assert hashlib.sha256(pieces).hexdigest() == answers["pieces_sha256"]
    assert [bpe.bos_id, bpe.eos_id] == answers["bos_eos"]
    assert sorted(bpe.eog_ids) == answers["eog"]
    assert bpe.add_bos == bool(answers["begin"])


def test_every_named_kind_has_answers() -> None:
    assert set(NAMED) <= PRE_TOKENIZERS.keys()
    for name, pre in PRE_TOKENIZERS.items():
        first = next(other for other in PRE_TOKENIZERS if PRE_TOKENIZERS[other] == pre)
        assert first in KINDS, name  # make_bpe.py checks that llama.cpp treats the others alike


def test_text_comes_back(kind: str, bpe: Tokenizer) -> None:
    if kind.startswith("lacking"):
        return  # bytes without a piece are lost
    raw = PRE_TOKENIZERS[kind].raw
    for text in TEXTS:
        expect = text.replace("▁", " ") if raw else text
        ids = bpe.encode(text, add_special=True)
        assert bpe.decode(ids) == expect
        assert bpe.decode(ids, continuation=True) == expect
    assert bpe.decode(bpe.encode("a\udcffb")) == "a�b"


def test_stream_equals_decode(bpe: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(bpe.vocab_size) for _ in range(rng.randint(0, 30))]
        for skip in (True, False):
            stream = bpe.stream(skip)
            text = "".join([stream.push(token) for token in ids]) + stream.finish()
            assert text == bpe.decode(ids, skip)


def test_long_texts(bpe: Tokenizer) -> None:
    words = "hello world, 12345 isn't\n" * 2000
    ids = bpe.encode(words)
    assert ids[: len(bpe.encode(words[:2500])) - 2] == bpe.encode(words[:2500])[:-2]
    assert len(bpe.encode("a" * 20_000)) > 1000  # one word


@pytest.mark.parametrize("name", CHARACTER_CLASSES)
def test_unicode_classes_are_those_of_llama_cpp(name: str) -> None:
    """Whatever version of Unicode the installed tokenizers package has."""
    from tokenizers import Regex, pre_tokenizers

    codes = (
        *range(0xD800),
        *range(0xE000, 0x34000),
        *range(0xE0000, 0xE0200),
    )  # beyond all of the classes
    text = "".join(map(chr, codes))
    left = pre_tokenizers.Split(Regex(CHARACTER_CLASSES[name]), "removed").pre_tokenize_str(text)
    rest = {char for part, _ in left for char in part}
    found = "".join(char for char in text if char not in rest)
    assert hashlib.sha256(found.encode()).hexdigest() == GOLDEN["classes"][name]


def test_phi3_pieces_take_spaces_along(tmp_path: Path) -> None:
    path = tmp_path / "p.gguf"
    answers = GOLDEN["phi3_kind"]
    check(
        tokenizer.load(write_vocabulary(path, GOLDEN["phi3"], title="Phi-3 tiny")),
        answers,
        answers["texts"],
    )
    other = tokenizer.load(write_vocabulary(path, GOLDEN["phi3"], title="Phi"))
    assert len(other.encode("<|end|>\n", parse_special=True)) > 1


def test_specials_only_when_asked(tmp_path: Path) -> None:
    """Also if merging, or a word that is a token, would result in a control token."""
    changed = BYTES | {"pieces": [*BYTES["pieces"], "Ġhello", "hello"], "pre": "llama-bpe"}
    changed["types"] = [*BYTES["types"], 1, 3]
    made = tokenizer.load(write_vocabulary(tmp_path / "c.gguf", changed))
    control = made.vocab_size - 1
    assert control not in made.encode("hello")
    assert made.encode("x hello")[-1] == control - 1
    assert made.encode("hello", parse_special=True) == [control]
    assert MARK not in made.encode("<|im_end|>")
    assert made.decode(made.encode("<|im_end|>x")) == "<|im_end|>x"
    assert made.decode(made.encode("<|im_end|>x", parse_special=True)) == "x"


def test_pieces_that_gpt_oss_always_shows(tmp_path: Path) -> None:
    changed = BYTES | {"pieces": [*BYTES["pieces"], "<|channel|>"], "types": [*BYTES["types"], 3]}
    made = tokenizer.load(write_vocabulary(tmp_path / "c.gguf", changed, pre="gpt-4o"))
    assert made.decode(made.encode("<|channel|>a")) == "<|channel|>a"
    assert made.encode("<|channel|>") == [made.vocab_size - 1]


def test_flags_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"

    def ids(text: str, **keys: Any) -> list[int]:
        made = tokenizer.load(write_vocabulary(path, BYTES, **keys))
        return made.encode(text, add_special=True)

    assert ids("", pre="llama-bpe") == [BEGIN]
    assert ids("", pre="llama-bpe", add_bos_token=False) == []
    assert ids("", pre="qwen2", add_bos_token=True, add_eos_token=True) == [BEGIN, END]
    assert ids("", add_bos_token=True, bos_token_id=None) == [11]  # as in llama.cpp
    assert ids(" a", add_space_prefix=True) == ids(" a")
    made = tokenizer.load(write_vocabulary(path, BYTES, add_space_prefix=True))
    assert made.decode(made.encode(" a")) == " a"
    assert ids("1234 a_b") == ids("1234 a_b", pre="default")
    with pytest.raises(ModelFileError, match=r"f\.gguf: key .*add_bos_token'.* no begin token"):
        tokenizer.load(write_vocabulary(path, RAW, bos_token_id=None))
    with pytest.raises(ModelFileError, match=r"add_eos_token'.* no end token"):
        tokenizer.load(write_vocabulary(path, RAW, add_eos_token=True, eos_token_id=None))


def test_gemma4_by_either_name(tmp_path: Path) -> None:
    """`tokenizer.ggml.model` = gemma4, whatever `pre` says, or `pre` = gemma4."""
    path = tmp_path / "g.gguf"
    for keys in ({"pre": "qwen2"}, {"model": "gpt2", "pre": "gemma4"}):
        check(tokenizer.load(write_vocabulary(path, RAW, **keys)), KINDS["gemma4"], TEXTS)


def test_infill_pieces_by_key(tmp_path: Path) -> None:
    """A name turns a user-defined token into a control token, unless the key is present."""
    token = BYTES["pieces"].index("<|fim_prefix|>")
    path = tmp_path / "i.gguf"
    assert token not in tokenizer.load(write_vocabulary(path, BYTES)).encode("<|fim_prefix|>")
    made = tokenizer.load(write_vocabulary(path, BYTES, fim_pre_token_id=BEGIN))
    assert made.encode("<|fim_prefix|>") == [token]
    assert BEGIN in tokenizer.load(write_vocabulary(path, BYTES, fim_sep_token_id=BEGIN)).eog_ids


def test_unknown_pre_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"u\.gguf: key .*pre'.*'mine' is not") as caught:
        tokenizer.load(write_vocabulary(tmp_path / "u.gguf", BYTES, pre="mine"))
    assert all(name in str(caught.value) for name in NAMED)
    with pytest.raises(ModelFileError, match=r"pre'.*7 is not"):
        tokenizer.load(write_vocabulary(tmp_path / "u.gguf", BYTES, pre=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": None, "types": None}, "tokens': missing"),
        ({"merges": None}, "merges': missing"),
        ({"types": [1, 1]}, "2 values"),
        ({"types": [6] * len(BYTES["types"])}, "byte token"),
        ({"bos_token_id": 99999}, "99999 is not one of"),
        ({"fim_pre_token_id": 99999}, "99999 is not one of"),
        ({"add_bos_token": 1}, "is not true or false"),
    ],
)
def test_bad_vocabularies(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        tokenizer.load(write_vocabulary(tmp_path / "bad.gguf", BYTES | change))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_impossible_merges_are_noted(tmp_path: Path) -> None:
    """They have no effect, as in llama.cpp; merges of missing pieces are applied."""
    sound = tokenizer.load(write_vocabulary(tmp_path / "a.gguf", BYTES, pre="gpt-2"))
    assert sound.notes == []
    count = len(BYTES["merges"])
    for bad in ("", "alone", "a b c", " a b", "a ", "a  b", b"\xff \xfe"):
        merges = [*BYTES["merges"], bad]
        own = tokenizer.load(
            write_vocabulary(tmp_path / "b.gguf", BYTES, merges=merges, pre="gpt-2")
        )
        (note,) = own.notes
        assert note.startswith(
            f"1 of {count + 1} merges are not pairs of pieces and have no effect"
        )
        stored = bad if isinstance(bad, bytes) else bad.encode()
        assert note.endswith(f"{stored!r} (entry {count})")
        assert [own.encode(text) for text in TEXTS] == [sound.encode(text) for text in TEXTS]
    merges = [*BYTES["merges"], "zq qz"]
    (note,) = tokenizer.load(
        write_vocabulary(tmp_path / "c.gguf", BYTES, merges=merges, pre="gpt-2")
    ).notes
    assert note.startswith(
        f"1 of {count + 1} merges have pieces that are not tokens, such as 'zq qz'"
    )


def test_a_missing_pre_tokenizer_is_noted(tmp_path: Path) -> None:
    own = tokenizer.load(write_vocabulary(tmp_path / "a.gguf", BYTES | {"pre": None}))
    (note,) = own.notes
    assert "key 'tokenizer.ggml.pre' is missing" in note and "'default'" in note


def test_unusual_vocabularies(tmp_path: Path) -> None:
    """Empty, duplicate and undecodable pieces, useless merges, text outside the alphabet."""
    pieces = ["a", "b", "", "a", b"\xff\xfe", "ab", "日", "c d"]
    merges = ["a b", "a b", "ab ", " ab", "a", "x y", "ab c d"]
    made = tokenizer.load(
        write_vocabulary(tmp_path / "u.gguf", {"pieces": pieces, "merges": merges})
    )
    assert made.encode("ab") == [5]
    assert made.encode("aba日\n") == [5, 3]
    assert made.decode([3, 1, 2, 6, 7]) == "ab日c d"
    assert (made.bos_id, made.eos_id, made.add_bos) == (None, None, False)
    few = {"pieces": ["a"], "merges": ["x y"]}
    alone = tokenizer.load(write_vocabulary(tmp_path / "n.gguf", few))
    assert alone.encode("aa bxy") == [0, 0]


def test_damaged_vocabularies_never_crash(tmp_path: Path) -> None:
    rng = random.Random(0)
    for name in ("llama-bpe", "gemma4"):
        path = write_vocabulary(tmp_path / "d.gguf", content(name))
        data = path.read_bytes()
        for _ in range(100):
            changed = bytearray(data)
            for _ in range(rng.choice((1, 3, 20, 200))):
                changed[rng.randrange(len(data))] = rng.choice((0, 1, 3, 6, 32, 65, 128, 255))
            path.write_bytes(changed)
            try:
                made = tokenizer.load(path)
                made.decode(made.encode("hello <tool> tësting\n😀", True, True), skip_special=False)
            except ModelFileError as error:
                assert "\n" not in str(error)


def test_only_what_is_needed_is_imported(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "b.gguf", BYTES)
    code = (
        "import sys, graphllm.tokenizer as t; both = ('tokenizers', 'sentencepiece');"
        "print([m in sys.modules for m in both]); t.load(sys.argv[1]);"
        "print([m in sys.modules for m in both])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == ["[False, False]", "[True, False]"]
