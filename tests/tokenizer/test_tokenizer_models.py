"""SentencePiece .model files against the sentencepiece package, and llama2.c's pieces.

ChatGLM's tokenizers are tested against formulas of its published `tokenization_chatglm.py`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hf_tokenizers import train_model, write_json
from sentencepiece import SentencePieceProcessor

from graphllm import tokenizer
from graphllm.errors import ModelFileError
from graphllm.tokenizer import Tokenizer, sentencepiece_proto
from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.sentencepiece_model import from_llama2c

TEXTS = [
    text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    for text in (*EDGE_CASES, "a <tool> b<tool>", "x <n> y", "<|blank_3|>a")
]
KINDS = [("bpe", "identity"), ("bpe", "nmt_nfkc"), ("unigram", "identity"), ("unigram", "nmt_nfkc")]


def save(
    folder: Path, model: Path, name: str = "tokenizer.model", kind: str = "llama", **settings: Any
) -> Tokenizer:
    """Return the tokenizer of a directory with the .model file and this model type."""
    folder.mkdir(exist_ok=True)
    shutil.copy(model, folder / name)
    write_json(folder / "config.json", {"model_type": kind})
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.from_directory(folder)


@pytest.mark.parametrize(("kind", "rule"), KINDS)
def test_ids_and_texts_equal_sentencepiece(tmp_path: Path, kind: str, rule: str) -> None:
    oracle = SentencePieceProcessor(model_file=str(train_model(kind, rule)))
    own = save(tmp_path, train_model(kind, rule))
    assert own.vocab_size == oracle.vocab_size()
    assert (own.bos_id, own.eos_id, own.eog_ids) == (1, 2, {2})
    for text in TEXTS:
        ids = oracle.encode(text)
        assert own.encode(text) == ids, text
        assert own.encode(text, add_special=True) == [1, *ids], text
        if oracle.unk_id() not in ids:
            assert own.decode(ids) == oracle.decode(ids), text
    ids = own.encode("a</s>a", True, True)
    assert ids[:-1] == [1, *own.encode("a"), 2] and own.piece(ids[-1]) == b"a"
    assert 2 not in own.encode("a</s>a")


def test_a_llama_adds_no_space_before_a_space(tmp_path: Path) -> None:
    """transformers 5 adds none, unlike SentencePiece; nor after special tokens."""
    model = train_model("bpe")
    own = save(tmp_path, model, tokenizer_class="LlamaTokenizer")
    oracle = SentencePieceProcessor(model_file=str(model))
    for text in TEXTS:
        kept = text[:1] in (" ", "▁")
        assert own.encode(text) == oracle.encode(text)[int(kept) :], text
    assert own.piece(own.encode("</s>a", parse_special=True)[1]) == b"a"
    own = save(tmp_path, model, tokenizer_class="LlamaTokenizer", legacy=True)
    assert own.piece(own.encode("</s>a", parse_special=True)[1]) == b" a"
    own = save(tmp_path, model, tokenizer_class="LlamaTokenizer", add_prefix_space=False)
    assert own.piece(own.encode("a")[0]) == b"a"


def test_what_the_directory_adds(tmp_path: Path) -> None:
    model = train_model("bpe")
    size = SentencePieceProcessor(model_file=str(model)).vocab_size()
    added = {
        "300": {"content": "<|placed|>", "special": True},
        str(size): {"content": "<|end|>", "special": True},
        str(size + 3): {"content": "<said>", "special": False},
    }
    settings = {"eos_token": "<|end|>", "add_bos_token": False, "add_eos_token": True}
    own = save(tmp_path, model, added_tokens_decoder=added, pad_token="<pad>", **settings)
    assert own.vocab_size == size + 5 and own.piece(size + 1) == b"" and own.eos_id == size
    assert own.encode("x<said>y", parse_special=True) == own.encode("x<said>y")
    assert size + 3 in own.encode("x<said>y") and size not in own.encode("x<|end|>y")
    assert own.encode("<|end|><|placed|>", True, True) == [size, 300, size]
    assert own.decode([size + 3, size]) == "<said>" and own.piece(300) == b"<|placed|>"
    assert own.eog_ids == {2, size}
    write_json(tmp_path / "config.json", {"vocab_size": size + 64})
    assert tokenizer.from_directory(tmp_path).vocab_size == size + 64
    with pytest.raises(ModelFileError, match=r"'<s>' has the id 9 in the directory, but 1 in"):
        save(tmp_path, model, added_tokens_decoder={"9": "<s>"})


# -- ChatGLM

PIECES = ["<n>", "<|tab|>", *[f"<|blank_{n}|>" for n in range(2, 81)]]
COMMANDS = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]


@pytest.fixture(scope="module")
def ice_text() -> Path:
    return train_model(
        "unigram",
        vocab_size=800,
        byte_fallback=True,
        user_defined_symbols=(*PIECES, *COMMANDS),
        pad_id=3,
    )


class PublishedChatGlm:
    """ChatGLM-6B's tokenizer by its published formulas."""

    def __init__(self, model: Path, images: int) -> None:
        self.sp, self.images = SentencePieceProcessor(model_file=str(model)), images

    def encode(self, text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for count in range(80, 1, -1):
            text = text.replace(" " * count, f"<|blank_{count}|>")
        return [token + self.images for token in self.sp.encode(text)]

    def prompt(self, text: str) -> list[int]:
        ends = [self.sp.piece_to_id(name) + self.images for name in ("[gMASK]", "<sop>")]
        return self.encode(text) + ends

    def decode(self, ids: list[int]) -> str:
        text = self.sp.decode([token - self.images for token in ids if token >= self.images])
        text = text.replace("<n>", "\n").replace("<|tab|>", "\t")
        for count in range(2, 81):
            text = text.replace(f"<|blank_{count}|>", " " * count)
        return text


@pytest.mark.parametrize(("images", "settings"), [(0, {"num_image_tokens": 0}), (20_000, {})])
def test_chatglm_6b(tmp_path: Path, ice_text: Path, images: int, settings: dict[str, Any]) -> None:
    own = save(tmp_path, ice_text, "ice_text.model", "chatglm", **settings)
    oracle = PublishedChatGlm(ice_text, images)
    assert own.vocab_size == oracle.sp.vocab_size() + images and not own.add_bos
    names = ("<sop>", "<eop>")
    assert [own.bos_id, own.eos_id] == [oracle.sp.piece_to_id(n) + images for n in names]
    assert own.eos_id in own.eog_ids
    for text in TEXTS:
        if any(name in text for name in COMMANDS):
            continue  # the published code parses these in text, graphllm only on request
        ids = oracle.encode(text)
        assert own.encode(text) == ids, text
        assert own.encode(text, add_special=True) == oracle.prompt(text), text
        if oracle.sp.unk_id() + images not in ids:
            assert own.decode(ids) == oracle.decode(ids), text
    code = "def f(x):\n\tif x:\n" + " " * 8 + "return  x\n" + " " * 85 + "# end"
    assert own.decode(own.encode(code)) == code
    stream = own.stream()
    assert "".join([stream.push(token) for token in own.encode(code)]) == code
    assert own.encode("x[gMASK]<sop>", parse_special=True) == own.encode("x", add_special=True)
    assert own.bos_id not in own.encode("x[gMASK]<sop>")
    if images:
        assert own.decode([5, own.encode("a")[0]]) == own.decode(own.encode("a")[:1])


def test_chatglm_6b_requires_its_pieces(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"ice_text\.model: pieces: there is no \[gMASK\]"):
        save(tmp_path, train_model("bpe"), "ice_text.model", "chatglm")
    with pytest.raises(ModelFileError, match=r"num_image_tokens = -1 is not a count"):
        save(tmp_path, train_model("bpe"), "ice_text.model", "chatglm", num_image_tokens=-1)


def test_chatglm2_and_3(tmp_path: Path) -> None:
    model = train_model("bpe")
    sp = SentencePieceProcessor(model_file=str(model))
    own = save(tmp_path, model, kind="chatglm", tokenizer_class="ChatGLMTokenizer")
    start = sp.vocab_size()  # then [MASK], [gMASK], [sMASK], sop, eop and the roles
    mask, sop, user, assistant, observed = (start + n for n in (1, 3, 6, 7, 8))
    assert own.vocab_size == start + 9 and (own.bos_id, own.eos_id) == (1, 2)
    assert own.eog_ids == {2, user, observed}
    for text in TEXTS:
        assert own.encode(text) == sp.encode(text), text
        assert own.encode(text, add_special=True) == [mask, sop, *sp.encode(text)], text
    chat = "[gMASK]sop<|user|>\n sop of bread<|assistant|>"
    ids = [mask, sop, user, *sp.encode("\n sop of bread"), assistant]
    assert own.encode(chat, parse_special=True) == ids
    assert not {mask, sop, user} & set(own.encode(chat))
    assert own.piece(sop) == b"sop" and own.decode([mask, sop, user]) == ""


# -- llama2.c


def test_llama2_c_pieces(tmp_path: Path) -> None:
    model = train_model("bpe", user_defined_symbols=())
    sp = SentencePieceProcessor(model_file=str(model))
    pieces = [sp.id_to_piece(token).replace("▁", " ").encode() for token in range(sp.vocab_size())]
    pieces[1], pieces[2] = b"\n<s>\n", b"\n</s>\n"
    scores = [sp.get_score(token) for token in range(sp.vocab_size())]
    own = from_llama2c(pieces, scores, tmp_path / "tokenizer.bin")
    assert (own.bos_id, own.eos_id, own.add_bos) == (1, 2, True)
    for text in TEXTS:
        assert own.encode(text) == (sp.encode(text) if text else []), text
        assert own.decode(own.encode(text, add_special=True)) == text.replace("▁", " ")
    name = str(tmp_path / "tokenizer.bin")
    for bad, message in (
        (pieces[:100], "100 pieces; a llama"),
        ([*pieces[:20], b"x", *pieces[21:]], "tokens: 20 is a byte token"),
        (pieces[:-1], "values for"),
    ):
        with pytest.raises(ModelFileError, match=message) as caught:
            from_llama2c(bad, scores, tmp_path / "tokenizer.bin")
        assert str(caught.value).startswith(name)


# -- malformed files


def test_other_files(tmp_path: Path) -> None:
    model = train_model("unigram")
    texts = save(tmp_path / "a", model, "spiece.model"), save(tmp_path, model)
    assert texts[0].encode("hello world") == texts[1].encode("hello world")
    with pytest.raises(ModelFileError, match=r"bpe\.model: models with this file number"):
        save(tmp_path / "b", model, "sentencepiece.bpe.model", "xglm")
    for content in (b"", b"AAAA 0\nAAAB 1\n", model.read_bytes()[:-3], bytes(1000)):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelFileError, match=r"tokenizer\.model: not a SentencePiece model"):
            tokenizer.from_directory(tmp_path)


def test_a_model_with_too_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = train_model("unigram")
    monkeypatch.setattr(sentencepiece_proto, "LARGEST_ID", 100)
    with pytest.raises(ModelFileError, match=r"tokenizer\.model: more than 100 pieces"):
        save(tmp_path, model)


def test_damaged_models_never_crash(tmp_path: Path) -> None:
    rng = random.Random(0)
    save(tmp_path, train_model("unigram", "nmt_nfkc"))
    models = [train_model(*kind).read_bytes() for kind in KINDS]
    read = 0
    for _ in range(200):
        damaged = bytearray(rng.choice(models))
        for _ in range(rng.choice((1, 3, 20))):
            damaged[-1 - rng.randrange(rng.choice((400, len(damaged))))] = rng.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        try:
            own = tokenizer.from_directory(tmp_path)
            own.decode(own.encode("hello <s>tësting\n😀</s> ①", True, True), skip_special=False)
            read += 1
        except ModelFileError as error:
            assert "\n" not in str(error)
    assert 0 < read < 200
