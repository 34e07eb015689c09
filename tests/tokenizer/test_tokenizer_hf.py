"""Tokenizers of Hugging Face directories, against transformers'."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hf_tokenizers import (
    KINDS,
    WORDS,
    byte_level,
    metaspace,
    save_raw,
    unigram,
    write_json,
)
from tokenizers import Tokenizer as Package
from tokenizers import decoders
from tokenizers.models import WordPiece

from graphllm import tokenizer
from graphllm.chat import directory_template
from graphllm.embedding.pairs import PairTemplate
from graphllm.errors import ModelFileError, RequestError
from graphllm.tokenizer import Tokenizer
from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.package_encoding import LONG, encode_text
from graphllm.tokenizer.tokenizer_config import TokenizerDirectory
from graphllm.tokenizer.untrusted_files import hold_stderr

CHATS = (
    "<s>[INST] hi [/INST] hello</s><s>[INST] again [/INST]",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|> x<|eot_id|>\n\ny<think>\nz</think>",
    "<s>\n<s>  x </s>",
)
TEXTS = [*EDGE_CASES, *CHATS]
BARE = [  # written without transformers
    "older llama", "older legacy llama", "mistral", "raw unigram", "xglm precompiled", "merges",
    "merges with both", "qwen2 merges",
]  # fmt: skip


def clean(text: str) -> str:
    """A lone surrogate counts as U+FFFD; transformers refuses it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the directory of a kind, written once."""
    folders: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("hf") / "model"
            KINDS[kind](folders[kind])
        return folders[kind]

    return of


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_equal_transformers(kind: str, made: Any) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(made(kind))
    own = tokenizer.from_directory(made(kind))
    assert own.vocab_size == len(oracle)
    assert (own.bos_id, own.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = oracle(clean(text), add_special_tokens=special).input_ids
            assert own.encode(text, special, parse_special=True) == ids, text
            for skip in (True, False):
                shown = oracle.decode(ids, skip_special_tokens=skip)
                assert own.decode(ids, skip_special=skip) == shown, text


def word_pieces() -> str:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"日本éçShHs"]
    words += [f"##{character}" for character in "ehloHELOéÉ日本"]
    made = Package(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(words[:5])
    return str(made.to_str())


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "text", "settings"),
    [
        ("bert", word_pieces, {}),
        ("bert", word_pieces, {"do_lower_case": False}),
        ("bert", word_pieces, {"tokenizer_class": "BertTokenizer", "strip_accents": False}),
        ("electra", word_pieces, {"tokenize_chinese_chars": False}),
        ("distilbert", word_pieces, {"tokenizer_class": "DistilBertTokenizer"}),
        ("bert", word_pieces, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("roberta", byte_level, {}),
        ("roberta", byte_level, {"add_prefix_space": True}),
        ("bart", byte_level, {"tokenizer_class": "BartTokenizer", "add_prefix_space": True}),
        ("xlm-roberta", unigram, {}),
        ("xlm-roberta", unigram, {"add_prefix_space": False}),
        ("camembert", unigram, {}),
        ("modernbert", metaspace, {"tokenizer_class": "LlamaTokenizer"}),
    ],
)
def test_flags_of_encoders(tmp_path: Path, kind: str, text: Any, settings: dict[str, Any]) -> None:
    """tokenizer_config.json states the pipeline, not tokenizer.json, as in transformers."""
    from transformers import AutoTokenizer

    save_raw(tmp_path, text(), kind, **settings)
    theirs, own = AutoTokenizer.from_pretrained(tmp_path), tokenizer.from_directory(tmp_path)
    for line in ("hello", " hé  HELLO", "日本h é", "Hello\n x"):
        assert own.encode(line, add_special=True) == theirs(line)["input_ids"], line
    if settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "LlamaTokenizer"):
        return  # keep the file's template, which has none for pairs
    pair = theirs("hello", "h h", return_token_type_ids=True)
    texts = [own.encode(each, add_special=False) for each in ("hello", "h h")]
    assert PairTemplate(own, 2).join(*texts) == (pair["input_ids"], pair["token_type_ids"])


def test_a_class_that_reads_merges_refuses_a_unigram_model(tmp_path: Path) -> None:
    save_raw(tmp_path, unigram(), "llama", tokenizer_class="LlamaTokenizer")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: its tokenizer_class reads merges"):
        tokenizer.from_directory(tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen3", "xglm", "unigram"])
def test_texts_of_any_ids_equal_transformers(kind: str, made: Any) -> None:
    """Including incomplete characters, of which byte-level vocabularies consist."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(made(kind))
    own = tokenizer.from_directory(made(kind))
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(own.vocab_size) for _ in range(rng.randint(1, 20))]
        for skip in (True, False):
            assert own.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parity
def test_vocab_json_is_read_by_its_class(made: Any) -> None:
    """As in transformers, the class stated next to a file decides how it is read."""
    text = "<s>[INST] x"
    kinds = ("older llama", "older legacy llama", "mistral")
    ids = [tokenizer.from_directory(made(k)).encode(text, parse_special=True) for k in kinds]
    assert ids[0] != ids[1] and ids[1] == ids[2]


@pytest.mark.parity
def test_classes_of_model_types_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.auto import tokenization_auto as auto

    types = (
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma",
        "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "glm", "glm4", "xglm", "bloom",
        "olmo2", "granite", "starcoder2", "stablelm", "smollm3", "deepseek_v2", "deepseek_v3",
        "gpt_oss", "modernbert", "bert", "distilbert", "electra", "nomic_bert", "mpnet", "roberta",
        "bart", "xlm-roberta", "camembert",
    )  # fmt: skip
    plain = (None, "MistralCommonBackend", "TokenizersBackend")
    for kind in types:
        default = auto.TOKENIZER_MAPPING_NAMES.get(kind)
        own = TokenizerDirectory(tmp_path, {"model_type": kind})
        assert own.class_name(False) == ("TokenizersBackend" if default in plain else default), kind
        fast = TokenizerDirectory(
            tmp_path, {"model_type": kind, "tokenizer_class": "LlamaTokenizerFast"}
        )
        misnamed = kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        generic = default in plain and default is not None
        expect = "TokenizersBackend" if generic else default if misnamed else "LlamaTokenizer"
        assert fast.class_name(False) == expect, kind
        assert fast.class_name(True) == ("TokenizersBackend" if not misnamed else expect), kind


@pytest.mark.parametrize("kind", BARE)
def test_stream_equals_decode(kind: str, made: Any) -> None:
    own = tokenizer.from_directory(made(kind))
    rng = random.Random(0)
    rows = [own.encode(text) for text in TEXTS]
    rows += [[rng.randrange(own.vocab_size) for _ in range(rng.randint(0, 30))] for _ in range(100)]
    for ids in rows:
        for skip in (True, False):
            for continuation in (True, False):
                stream = own.stream(skip, continuation)
                text = "".join([stream.push(token) for token in ids]) + stream.finish()
                assert text == own.decode(ids, skip, continuation)


def test_pieces_are_the_bytes_of_the_text(made: Any) -> None:
    own = tokenizer.from_directory(made("merges"))
    for text in TEXTS:
        ids = own.encode(text)
        assert b"".join(map(own.piece, ids)) == clean(text).encode()
        assert own.decode(ids) == clean(text)
    stream = own.stream()
    shown = [stream.push(token) for token in own.encode("a👩‍👩‍👧‍👦b")]
    assert "".join(shown) == "a👩‍👩‍👧‍👦b" and "" in shown and "�" not in shown
    llama = tokenizer.from_directory(made("mistral"))
    ids = llama.encode("hello 𝔘 world")
    assert b"".join(map(llama.piece, ids)) == " hello 𝔘 world".encode()
    assert llama.decode(ids) == "hello 𝔘 world"
    assert llama.decode(ids, continuation=True) == " hello 𝔘 world"


@pytest.mark.parametrize("kind", BARE)
def test_no_text_becomes_a_control_token(kind: str, made: Any) -> None:
    own = tokenizer.from_directory(made(kind))
    names = ("<s>", "</s>", "<pad>", "<|endoftext|>", "<|end|>", "<|im_start|>", "<madeupword3>")
    known = {}
    for name in names:
        ids = own.encode(name, parse_special=True)
        if own.piece(ids[-1]).decode() == name and len(ids) <= 2:
            known[name] = ids[-1]
    assert known
    for text in (*TEXTS, *names, "".join(names), " ".join(names)):
        assert not set(own.encode(text)) & set(known.values()), text
        ids = own.encode(text, add_special=True)
        assert not set(ids[1:-1]) & set(known.values()), text
    for name, token in known.items():
        text = f"x{name}y"
        assert own.decode(own.encode(text)) == text
        assert token in own.encode(text, parse_special=True)
        assert own.decode([token]) == "" and own.decode([token], skip_special=False) != ""


def test_text_never_becomes_an_end_token(tmp_path: Path) -> None:
    """Even one that its file declares ordinary; it is decoded, as in transformers."""
    text = Package.from_str(byte_level())
    text.add_tokens(["<|done|>", "<tool>"])
    save_raw(tmp_path, text.to_str(), "gpt2", tokenizer_class="PreTrainedTokenizerFast")
    done = text.token_to_id("<|done|>")
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [done, 3]})
    own = tokenizer.from_directory(tmp_path)
    assert {done, 3} <= own.eog_ids
    assert done not in own.encode("a<|done|>") and done + 1 in own.encode("a<tool>")
    assert done in own.encode("a<|done|>", parse_special=True)
    assert own.decode([done]) == "<|done|>"
    assert own.encode(own.piece(3).decode()) == [3]  # an ordinary token


def test_a_padding_token_that_is_text_stays_text(tmp_path: Path) -> None:
    save_raw(tmp_path, byte_level(), pad_token="!")
    own = tokenizer.from_directory(tmp_path)
    assert len(own.encode("a!b!!")) == 5
    assert own.decode(own.encode("a!b!!"), skip_special=False) == "a!b!!"


def ends(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> set:
    write_json(folder / "config.json", config)
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        write_json(path, generation)
    return set(tokenizer.from_directory(folder).eog_ids)


def test_ends(tmp_path: Path) -> None:
    text = Package.from_str(byte_level(WORDS))
    text.add_special_tokens(["<|eot_id|>", "<|other|>"])
    eot = text.token_to_id("<|eot_id|>")
    save_raw(tmp_path, text.to_str(), eos_token="<|endoftext|>")
    assert ends(tmp_path, {}) == {0, eot}  # by name: EOS of the tokenizer, and known end tokens
    assert ends(tmp_path, {"eos_token_id": 9}) == {0, eot, 9}
    assert ends(tmp_path, {"eos_token_id": [9, 10]}) == {0, eot, 9, 10}
    assert ends(tmp_path, {"eos_token_id": 9}, {"eos_token_id": [7]}) == {0, eot, 7}
    assert ends(tmp_path, {"eos_token_id": 9}, {"top_k": 1}) == {0, eot, 9}
    assert ends(tmp_path, {"eos_token_id": 50256}) == {0, eot}  # default of the model type
    assert tokenizer.from_directory(tmp_path, {"eos_token_id": 8}).eog_ids == {0, eot, 8}


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", ["x", -1, 2**31, 1.5, True, [1, -1], {"id": 1}, "x" * 10**6])
def test_bad_eos_ids(tmp_path: Path, key: str, value: Any) -> None:
    save_raw(tmp_path, byte_level(WORDS))
    for configs in ({key: value}, {}), ({}, {key: value}):
        with pytest.raises(ModelFileError, match=rf"config\.json: {key} = .* is neither") as caught:
            ends(tmp_path, *configs)
        assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_rows_without_a_token(tmp_path: Path) -> None:
    """A vocabulary that is padded up to the embedding's rows."""
    save_raw(tmp_path, byte_level())
    write_json(tmp_path / "config.json", {"vocab_size": 768})
    own = tokenizer.from_directory(tmp_path)
    assert own.vocab_size == 768 and own.piece(767) == b"" and own.decode([767, 5, 700])
    for token in (-1, 768):
        with pytest.raises(RequestError, match="is not one of the 768 tokens"):
            own.decode([token])
    write_json(tmp_path / "config.json", {"vocab_size": 5})
    assert tokenizer.from_directory(tmp_path).vocab_size == 700


def test_dropout_of_training_is_off(tmp_path: Path) -> None:
    content = json.loads(byte_level())
    content["model"]["dropout"] = 0.5
    save_raw(tmp_path, json.dumps(content))
    own = tokenizer.from_directory(tmp_path)
    assert len({tuple(own.encode("the tokenizer of the directory")) for _ in range(20)}) == 1


def test_load_takes_directories(made: Any) -> None:
    own = tokenizer.load(made("merges"))
    assert own.piece(own.encode("a")[0]) == b"a"


# -- malformed files


def changed(text: str, change: Any) -> str:
    content = json.loads(text)
    change(content)
    return json.dumps(content)


def added(token: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": True, **flags}


SPEECH = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
MAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # the package panics
BAD_JSON: list[tuple[Any, Any, str]] = [  # good file, change, message
    (lambda: "", None, "EOF"),
    (lambda: "{", None, "EOF"),
    (lambda: "[1, 2]", None, "tokenizer.json: "),
    (lambda: '{"model": {"type": "Other"}}', None, "tokenizer.json: "),
    (byte_level, lambda c: c["model"]["vocab"].update(x=2**40), "expected u32"),
    (byte_level, lambda c: c["model"]["vocab"].update(two=5), "the same id 5"),
    (byte_level, lambda c: c["model"]["vocab"].update(x=2**31), "is too large"),
    (byte_level, lambda c: c["added_tokens"].append(added(900, "<x>")), "has the id 900"),
    (byte_level, lambda c: c.update(decoder=None), "no decoder"),
    (byte_level, lambda c: c.update(decoder=SPEECH), "decoder CTC is not supported"),
    (metaspace, lambda c: c["decoder"]["decoders"].reverse(), "decoder Strip is not supported"),
    (unigram, lambda c: c.update(normalizer=MAP), "charsmap"),
]


def set_at(*path: Any) -> Any:
    """Return a change of a file that sets a value; the last of ``path`` is the value."""

    def change(content: Any) -> None:
        *names, last, value = path
        for name in names:
            content = content[name]
        content[last] = value

    return change


ZEROS = "BAAAAAAAAAA="  # a table that ends before its first entry
SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}
ENDS = {"type": "TemplateProcessing", "single": [SPECIAL], "pair": [SPECIAL], "special_tokens": {}}
PANICS = [  # the package panics while it reads the file, or with the first text
    set_at("normalizer", MAP),
    set_at("normalizer", {**MAP, "precompiled_charsmap": ZEROS}),
    set_at("model", "continuing_subword_prefix", "##########"),
    set_at("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    set_at("post_processor", ENDS),
]


@pytest.mark.parametrize("change", PANICS)
def test_a_panic_is_one_line_and_writes_nothing(tmp_path: Path, change: Any, capfd: Any) -> None:
    save_raw(tmp_path, changed(byte_level(WORDS), change))
    with pytest.raises(ModelFileError) as caught:
        tokenizer.from_directory(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: ")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_output_of_others_is_not_lost(capfd: Any) -> None:
    with hold_stderr():
        os.write(2, b"one\n")
        assert capfd.readouterr().err == ""
    assert "one\n" in capfd.readouterr().err
    with pytest.raises(ValueError, match="x"), hold_stderr():
        os.write(2, b"panicked\n")
        raise ValueError("x")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("text", "change", "message"), BAD_JSON, ids=[m for *_, m in BAD_JSON])
def test_bad_tokenizer_json(tmp_path: Path, text: Any, change: Any, message: str) -> None:
    save_raw(tmp_path, text() if change is None else changed(text(), change))
    with pytest.raises(ModelFileError, match=message) as caught:
        tokenizer.from_directory(tmp_path)
    shown = str(caught.value)
    assert shown.startswith(str(tmp_path / "tokenizer.json")) and "\n" not in shown


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{,", "not valid JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"bos_token": {"a": 1}}', "key 'bos_token'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "not an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "'x' is not the id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', "added token 1"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"999": "<far>"}}', "id 999"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9999999999": "z"}}', "is not the id"),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}', "not a list"),
        (
            "tokenizer_config.json",
            f'{{"added_tokens_decoder": {{"{"9" * 5000}": "z"}}}}',
            "not the id",
        ),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "not valid JSON: .*surrogates"),
        ("added_tokens.json", '{"<x>": "y"}', "'y' is not the id"),
        ("added_tokens.json", '{"<x>": [1]}', r"\[1\] is not the id"),
        ("special_tokens_map.json", "\xff", "byte 0 is not valid UTF-8"),
        ("generation_config.json", '{"eos_token_id": [1.5]}', "eos_token_id"),
        ("config.json", "nothing", "not valid JSON"),
    ],
)
def test_bad_settings(tmp_path: Path, name: str, content: str, message: str) -> None:
    save_raw(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    if name != "tokenizer_config.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFileError, match=message) as caught:
        tokenizer.from_directory(tmp_path)
    shown = str(caught.value)
    assert shown.startswith(str(tmp_path / name)) and "\n" not in shown


def test_bad_merges(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    KINDS["merges"](folder)
    merges = (folder / "merges.txt").read_text("utf-8")
    for text, message in ((merges + "a b c\n", "is not a pair: 'a b c'"), ("zz yy\n", "zz")):
        (folder / "merges.txt").write_text(text, "utf-8")
        with pytest.raises(ModelFileError, match=rf"merges\.txt: .*{message}"):
            tokenizer.from_directory(folder)
    (folder / "merges.txt").write_text(merges, "utf-8")
    for value in ("x", -1, None, True, 2**31):
        write_json(folder / "vocab.json", {"a": value})
        with pytest.raises(ModelFileError, match=r"vocab\.json: the id of 'a'"):
            tokenizer.from_directory(folder)


def test_missing_and_huge(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tokenizer: neither"):
        tokenizer.from_directory(tmp_path)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        tokenizer.from_directory(tmp_path / "none")
    save_raw(tmp_path, "")
    os.truncate(tmp_path / "tokenizer.json", 200_000_001)  # a sparse file
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: 200 MB, more than 200"):
        tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"],
)
def test_not_regular_files(tmp_path: Path, name: str) -> None:
    """A pipe without a writer, and a device without an end."""
    save_raw(tmp_path, byte_level())
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        with pytest.raises(ModelFileError, match=f"{name}: not a regular file"):
            tokenizer.from_directory(tmp_path)
            directory_template(tmp_path)


def test_a_model_that_cannot_encode(tmp_path: Path) -> None:
    """A unigram model without an unknown token."""
    save_raw(tmp_path, changed(unigram(), lambda c: c["model"].update(unk_id=None)))
    own = tokenizer.from_directory(tmp_path)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: .*unk"):
        own.encode("ꙮ")


@pytest.mark.parametrize("kind", ["mistral", "raw unigram", "merges with both"])
def test_damaged_files_never_crash(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "m"
    KINDS[kind](folder)
    files = sorted(folder.iterdir())
    rng = random.Random(0)
    read = 0
    for _ in range(100):
        path = rng.choice(files)
        data = path.read_bytes()
        damaged = bytearray(data[: rng.choice((len(data), rng.randrange(len(data))))])
        for _ in range(rng.choice((0, 1, 5))):
            damaged[rng.randrange(len(damaged) or 1) :][:1] = rng.choice(
                (b'"', b"{", b"0", b"\xff")
            )
            damaged[rng.randrange(len(damaged) + 1) :] += b"" if rng.random() < 0.5 else b"]"
        path.write_bytes(damaged)
        try:
            own: Tokenizer = tokenizer.from_directory(folder)
            own.decode(own.encode("hello <s>tësting\n😀</s>", True, True), skip_special=False)
            read += 1
        except ModelFileError as error:
            assert "\n" not in str(error)
        path.write_bytes(data)
    assert 0 < read < 100


# -- threads


class WaitingEngine:
    """An engine whose encoding of one text lasts until an event."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.begun, self.end = engine, Event(), Event()

    def encode(self, text: str, **options: Any) -> Any:
        if text == "wait":
            self.begun.set()
            assert self.end.wait(60)
        return self.engine.encode(text, **options)


@pytest.mark.parametrize("parse_special", [False, True])
def test_a_long_text_does_not_delay_others(made: Any, parse_special: bool) -> None:
    """Whether they parse special tokens or not: their engines have settings of their own."""
    own = tokenizer.from_directory(made("merges with both"))
    name = "_engine" if parse_special else "_text_engine"
    waiting = WaitingEngine(getattr(own, name))
    setattr(own, name, waiting)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(own.encode, "wait", parse_special=parse_special)
        assert waiting.begun.wait(60)
        try:
            others = [pool.submit(own.encode, "<|end|>", False, parse) for parse in (False, True)]
            text, control = [other.result(10) for other in others]
        finally:
            waiting.end.set()
        assert long.result() and control == [own.eos_id] and own.eos_id not in text


class NamedCalls:
    """An engine of which the names of the called methods are noted."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.names = engine, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.engine, name)


def test_long_texts_release_the_lock_of_python() -> None:
    """Which only the package's batches do."""
    engine = Package.from_str(byte_level())
    noted: Any = NamedCalls(engine)
    for length in (LONG - 1, LONG):
        text = ("hello  wörld " * length)[:length]
        assert encode_text(noted, text).ids == engine.encode(text).ids
    assert noted.names == ["encode", "encode_batch"]


@pytest.mark.parametrize("kind", [*BARE, "added words", "added words of gpt2"])
def test_both_engines_have_the_tokens_of_the_file(kind: str, made: Any) -> None:
    own = tokenizer.from_directory(made(kind))
    read = Package.from_str(own.engine.to_str())
    for engine in (own.engine, own._text_engine):
        assert engine.get_vocab(with_added_tokens=True) == read.get_vocab(with_added_tokens=True)
        assert repr(engine.get_added_tokens_decoder()) == repr(read.get_added_tokens_decoder())
    for text in (*TEXTS, "\n".join(TEXTS)):
        for special, parse in product((False, True), repeat=2):
            read.encode_special_tokens = not parse
            engine = own.engine if parse else own._text_engine
            ids = engine.encode(clean(text), add_special_tokens=special).ids
            assert ids == read.encode(clean(text), add_special_tokens=special).ids


# -- chat templates


def test_template_of_a_directory(tmp_path: Path) -> None:
    assert directory_template(tmp_path) is None
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tools.jinja").write_text("tools")
    assert directory_template(tmp_path) == "tools"
    (more / "rag.jinja").write_text("rag")
    assert directory_template(tmp_path) is None
    (more / "default.jinja").write_text("more")
    assert directory_template(tmp_path) == "more"
    rows = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": rows})
    assert directory_template(tmp_path) == "listed"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "text"})
    assert directory_template(tmp_path) == "text"
    (tmp_path / "chat_template.jinja").write_text("own ▁", "utf-8")
    assert directory_template(tmp_path) == "own ▁"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: byte 0 is not valid UTF-8"):
        directory_template(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": 3})
    with pytest.raises(ModelFileError, match="the chat template is a int, not a string"):
        directory_template(tmp_path)
