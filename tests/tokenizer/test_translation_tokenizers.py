"""Tokenizers of translation models: ids and texts equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_tokenizers import write_json
from translation_tokenizers import from_transformers, m2m_100, marian

from graphllm import tokenizer
from graphllm.errors import ModelFileError, RequestError
from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.languages import Languages
from graphllm.tokenizer.tokenizer_config import TokenizerDirectory

pytestmark = pytest.mark.parity
# Control tokens in a text are text here, but control tokens to transformers.
TEXTS = [text for text in EDGE_CASES if "\0" not in text and "<s>" not in text][::3]


def languages(folder: Path) -> Languages:
    return Languages.of(tokenizer.from_directory(folder), TokenizerDirectory(folder))


@pytest.mark.parametrize(
    "name, source, target",
    [
        ("T5Tokenizer", None, None),
        ("MBartTokenizer", "ro_RO", "de_DE"),
        ("NllbTokenizer", "fra_Latn", "zho_Hant"),
        ("MarianTokenizer", None, "deu"),
        ("M2M100Tokenizer", "fr", "zu"),
    ],
)
def test_ids_and_texts(tmp_path, name, source, target):
    import transformers

    writers = {"MarianTokenizer": marian, "M2M100Tokenizer": m2m_100}
    writers.get(name, lambda folder: from_transformers(folder, name))(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    own = languages(tmp_path)
    if source is not None:
        theirs.src_lang = source
    code = f">>{target}<<" if name == "MarianTokenizer" else ""
    for text in TEXTS:
        ids = own.encode(text, source, target)
        assert ids == theirs(code + text)["input_ids"], text
        answer = [token for token in ids if token not in own.codes.values()]
        wanted = theirs.decode(answer, skip_special_tokens=True)
        assert own.tokenizer.decode(answer).strip() == wanted.strip(), text
    if target is not None and not code:
        names = {"fr": "__zu__"}
        token = names.get(source, target)
        assert own.first_token(target) == theirs.convert_tokens_to_ids(token)


def test_wrong_languages(tmp_path):
    m2m_100(tmp_path)
    own = languages(tmp_path)
    with pytest.raises(RequestError, match=r"source_lang = 'frr' is not one of .* fr"):
        own.encode("a", "frr", None)
    with pytest.raises(RequestError, match="target_lang = 'xx' is not one of"):
        own.first_token("xx")
    marian_folder = tmp_path / "marian"
    marian_folder.mkdir()
    marian(marian_folder)
    with pytest.raises(RequestError, match="source_lang = 'fra' has no use"):
        languages(marian_folder).encode("a", "fra", "deu")


@pytest.mark.parametrize(
    "content", ['{"</s>": 0}', '{"</s>": 0, "<unk>": 0}', '{"</s>": -1}', "[]"]
)
def test_malformed_vocabularies(tmp_path, content):
    marian(tmp_path)
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"vocab\.json"):
        tokenizer.from_directory(tmp_path)


def test_malformed_model_and_codes(tmp_path):
    m2m_100(tmp_path)
    for codes in ("esperanto", ["m2m100"]):
        write_json(tmp_path / "tokenizer_config.json", {"language_codes": codes})
        with pytest.raises(ModelFileError, match=r"language_codes = .* is not supported"):
            tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"not a model")
    with pytest.raises(ModelFileError, match=r"sentencepiece\.bpe\.model"):
        tokenizer.from_directory(tmp_path)
