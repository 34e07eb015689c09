"""GGUF files of encoders and of T5: read, and written from directories.

The independent writer is the gguf package, with llama.cpp's names of tensors (TensorNameMap). By
hand, llama.cpp's converter made the same tensors and tokens from MiniLM and two small T5 models,
and llama-cpp-python 0.3.36 the same embeddings (cosine above 0.999997), logits (5e-4 of the range)
and ids, apart from the words that docs/design/tokenizers.md names.
"""

from __future__ import annotations

import json
from base64 import b64encode

import gguf
import hf_models
import numpy as np
import pytest
from encoder_models import write_encoder
from gguf_files import finish
from hf_tokenizers import train_model, write_json
from safetensors.numpy import load_file, save_file
from test_decoder_embeddings import write as write_decoder
from test_encoder_decoders import load as load_t5
from test_encoder_decoders import write as write_seq2seq
from test_encoders import SEQUENCES, write_modules
from translation_tokenizers import unigram_pieces
from typer.testing import CliRunner

import graphllm
from graphllm.cli import app
from graphllm.embedding import EmbeddingModel
from graphllm.errors import ConfigError, ModelFileError
from graphllm.quantize import quantize
from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.sentencepiece_proto import read_model
from graphllm.weights.gguf import GgufFile

pytestmark = pytest.mark.parity
ARCHES = {"bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
          "t5": gguf.MODEL_ARCH.T5}  # fmt: skip


def stored_tensors(family, folder, layers):
    """The tensors of a directory by GGUF's names."""
    names = gguf.get_tensor_name_map(ARCHES[family], layers)
    for name, value in load_file(folder / "model.safetensors").items():
        stored = names.get_name(name, (".weight", ".bias"))
        if stored is not None and "pooler" not in name:
            yield stored, value


def write_bert(path, family, model):
    """A file as llama.cpp's converter writes it, with the vocabulary of `write_encoder`."""
    c, writer = model.config, gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHES[family]])
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_eps(c.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    if family == "nomic_bert":
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    words = json.loads((path.parent / "tokenizer.json").read_text())["model"]["vocab"]
    words = [*words, *(f"[PAD{i}]" for i in range(len(words), c.vocab_size))]
    special = [word.startswith("[") and "PAD" not in word[2:] for word in words]
    pieces = [w if s else w[2:] if w[:2] == "##" else f"▁{w}" for w, s in zip(words, special)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if each else 1 for each in special])
    writer.add_token_type_count(c.type_vocab_size)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    for name, value in stored_tensors(family, path.parent, c.num_hidden_layers):
        writer.add_tensor(name, value)
    return finish(writer, path)


@pytest.mark.parametrize("family, variant", [("bert", 0), ("bert", 2), ("nomic_bert", 0)])
def test_files_of_another_writer(family, variant, tmp_path):
    model = write_encoder(tmp_path, hf_models.SPECS[family], variant)
    path = write_bert(tmp_path / "model.gguf", family, model)
    with graphllm.load(tmp_path, device="cpu") as one, graphllm.load(path, device="cpu") as two:
        assert isinstance(two, EmbeddingModel) and two.settings.pooling == ("cls",)
        for a, b in zip(one.engine.hidden(SEQUENCES), two.engine.hidden(SEQUENCES), strict=True):
            assert np.array_equal(a, b)
        for text in ("the thes cat", "", "Ca-t!", "é [CLS] the"):
            ids = one.tokenizer.encode(text, add_special=True)
            assert two.tokenizer.encode(text, add_special=True) == ids
            assert two.tokenizer.decode(ids) == one.tokenizer.decode(ids)
        assert np.array_equal(two.embed("the"), one.embed("the", pooling="cls"))


def write_t5(folder, variant, **config):
    """A directory with a tokenizer of T5."""
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    pieces = train_model("unigram", "nmt_nfkc", **options)
    rows = len(read_model(pieces).pieces) + 7
    config = {"relative_attention_max_distance": 128, **config}  # llama.cpp has no other
    write_seq2seq(folder, "t5", variant, rows, config)
    (folder / "spiece.model").write_bytes(pieces.read_bytes())
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 0}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", **names})


@pytest.mark.parametrize("variant", [0, 1])
def test_t5(variant, tmp_path):
    """The directory, the file made of it, and a file of gguf's names are the same model."""
    write_t5(tmp_path / "t5", variant)
    done = quantize(tmp_path / "t5", tmp_path / "own.gguf", "f32")
    assert not done.notes
    with load_t5(tmp_path / "t5") as one, load_t5(tmp_path / "own.gguf") as two:
        for source, target in (([5, 6, 7, 1], [0, 9, 8]), ([9] * 100 + [1], [0, 3])):
            want = one.logits(source, target=target)
            assert np.array_equal(two.logits(source, target=target), want)
        for text in EDGE_CASES:
            ids = one.tokenizer.encode(text, add_special=True)
            assert two.tokenizer.encode(text, add_special=True) == ids
            assert two.tokenizer.decode(ids) == one.tokenizer.decode(ids)
        first, again = (llm.generate("the cat", beams=3, max_tokens=8) for llm in (one, two))
        assert first.ids == again.ids and first.score == again.score
        with pytest.raises(graphllm.RequestError, match="target_lang = 'fr' has no use"):
            two.generate("the cat", target_lang="fr")
    written = gguf.GGUFReader(tmp_path / "own.gguf")
    found = {each.name: np.array(each.data) for each in written.tensors}
    want = dict(stored_tensors("t5", tmp_path / "t5", 2))
    assert want.keys() == found.keys()
    assert all(np.array_equal(found[name].reshape(want[name].shape), want[name]) for name in found)


def xlm_roberta(folder):
    """Tokenizer files of XLM-RoBERTa; returns the number of tokens."""
    import transformers

    special = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    vocab = [*special, *unigram_pieces(), ("<mask>", 0.0)]
    transformers.XLMRobertaTokenizer(vocab=vocab).save_pretrained(folder)
    rules = read_model(train_model("unigram", "nmt_nfkc")).charsmap
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {
        "type": "Precompiled",
        "precompiled_charsmap": b64encode(rules).decode(),
    }
    write_json(folder / "tokenizer.json", content)
    return len(vocab)


def test_directories_of_encoders(tmp_path):
    """BERT with all settings of sentence-transformers, XLM-RoBERTa, Nomic BERT: to a file."""
    for family, variant, kind in (("bert", 0, "f32"), ("bert", 4, "f32"), ("nomic_bert", 1, "f16")):
        folder, path = tmp_path / f"{family}-{variant}", tmp_path / f"{family}-{variant}.gguf"
        folder.mkdir()
        rows = {"vocab_size": xlm_roberta(folder)} if variant == 4 else {}
        saved = (folder / "tokenizer.json").read_bytes() if rows else b""
        write_encoder(
            folder, hf_models.SPECS[family], variant, hidden_act="gelu", **rows
        ) if family == "bert" else write_encoder(folder, hf_models.SPECS[family], 0)
        if rows:
            (folder / "tokenizer.json").write_bytes(saved)
        write_modules(folder, "cls", True, query="the ")
        done = quantize(folder, path, kind)
        assert [note.split(" left out")[0] for note in done.notes] == [
            "the maximum length of 9 tokens is", "the prompts 'query' are"
        ]  # fmt: skip
        with graphllm.load(folder, device="cpu") as one, graphllm.load(path, device="cpu") as two:
            assert two.settings.pooling == ("cls",) and two.max_length == one.encoder.cfg.context
            texts = ["the cat", "", "a b", "Where, the naïve THES?"]
            # Tokenizers that know control tokens as pieces spell them differently as text.
            for text in (*(text for text in EDGE_CASES if "<s>" not in text), *texts):
                ids = one.tokenizer.encode(text, add_special=True)
                assert two.tokenizer.encode(text, add_special=True) == ids, text
            found, want = two.embed(texts, pooling="mean"), one.embed(texts, pooling="mean")
            same = [len(one.encode(text)) <= 9 for text in texts]
            np.testing.assert_allclose(found[same], want[same], atol=1e-3 if kind == "f16" else 0)


def test_a_decoder_that_states_a_pooling(tmp_path):
    write_decoder(tmp_path / "model", "qwen3")
    quantize(tmp_path / "model", tmp_path / "model.gguf", "f32")
    with graphllm.load(tmp_path / "model", device="cpu") as model:
        want = model.embed(["abc", "d"])
    with graphllm.load(tmp_path / "model.gguf", device="cpu") as model:
        assert isinstance(model, EmbeddingModel) and model.settings.pooling == ("lasttoken",)
        np.testing.assert_allclose(model.embed(["abc", "d"]), want, atol=1e-6)
    with graphllm.LLM.load(tmp_path / "model.gguf", device="cpu") as llm:
        assert llm.generate([5], max_tokens=1).ids


def test_quantised_on_the_command_line(tmp_path):
    """All commands take the file; q8_0 has nearly the embeddings of the directory."""
    folder, path, lines = tmp_path / "model", tmp_path / "model.gguf", tmp_path / "lines.txt"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    write_encoder(folder, hf_models.SPECS["bert"], 0, **sizes)
    lines.write_text("the cat\na b c\n")
    for command in (
        f"quantize {folder} {path} --type q8_0", f"inspect {path}",
        f"tokenize {path} cat", f"plan {path}", f"diff {path} -p cat",
        f"embed {path} -f {lines} -o {tmp_path / 'vectors.npy'}",
        f"profile {path} -p cat",
    ):  # fmt: skip
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, (command, done.output, done.exception)
    with graphllm.load(folder, device="cpu") as model:
        want = model.embed(["the cat", "a b c"])
    assert (np.load(tmp_path / "vectors.npy") * want).sum(1).min() > 0.999


def change(path, out, **values):
    """Copy a file with other metadata; None leaves a key out."""
    from graphllm.checkpoints.gguf_writer import GgufWriter, encode_value, read_encoded_metadata
    from graphllm.quantize.driver import open_source

    source = open_source(path)
    metadata = read_encoded_metadata(path)
    for key, value in values.items():
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = encode_value(value)
    with GgufWriter(out, metadata, source.tensors, force=True) as writer:
        for each in source.tensors:
            writer.write(source.raw(each.name))
    return out


def test_wrong_files(tmp_path):
    write_encoder(tmp_path, hf_models.SPECS["bert"], 0)
    quantize(tmp_path, tmp_path / "bert.gguf", "f32")
    write_t5(tmp_path / "t5", 0)
    quantize(tmp_path / "t5", tmp_path / "t5.gguf", "f32")
    stored = graphllm.weights.gguf.GgufFile(tmp_path / "t5.gguf").metadata
    rules = np.array(stored["tokenizer.ggml.precompiled_charsmap"])
    units = rules[4 : 4 + int.from_bytes(rules[:4].tobytes(), "little")].view("<u4")
    outside = rules.copy()
    outside[4:-1].view()[: units.nbytes] = np.where(units >> 31, units, 0x7FFFFC00).view(np.uint8)
    token = "tokenizer.ggml."
    for name, key, value, says in (
        ("bert", "bert.pooling_type", 4, r"pooling_type = 4 is not supported, only 1 \(mean\)"),
        ("bert", "bert.attention.causal", True, "attention.causal = True is not supported"),
        ("bert", f"{token}token_type_count", 9, "token_type"),
        ("bert", f"{token}seperator_token_id", 999, "999 is not one of the"),
        ("bert", f"{token}normalizer.lowercase", "yes", "'yes' is not true or false"),
        ("bert", "bert.attention.head_count", 7, "7 does not divide"),
        ("t5", "t5.decoder_start_token_id", 10**6, "is not a token id below"),
        ("t5", "t5.decoder_start_token_id", None, "missing key 'decoder_start_token_id'"),
        ("t5", "t5.attention.relative_buckets_count", 64, "is not 64 buckets"),
        ("t5", "t5.decoder_block_count", 10**6, "missing tensor"),
        ("t5", f"{token}precompiled_charsmap", rules[:100], "a trie of"),
        ("t5", f"{token}precompiled_charsmap", outside, "node outside"),
        ("t5", f"{token}precompiled_charsmap", "rules", "not an array of bytes"),
    ):
        path = change(tmp_path / f"{name}.gguf", tmp_path / "changed.gguf", **{key: value})
        with pytest.raises((ConfigError, ModelFileError), match=says):
            graphllm.load(path, device="reference").tokenizer.encode("a")


@pytest.mark.parametrize("names", [("shared", "decoder.embed_tokens"), ("encoder.embed_tokens",)])
def test_names_of_the_embedding_of_t5(names, tmp_path):
    """A directory may have copies of the table; a GGUF file has one."""
    write_t5(tmp_path / "t5", 0)
    file = tmp_path / "t5" / "model.safetensors"
    tensors = load_file(file)
    table = tensors.pop("shared.weight")
    save_file({**tensors, **{f"{name}.weight": table for name in names}}, file)
    quantize(tmp_path / "t5", tmp_path / "own.gguf", "f32")
    stored = GgufFile(tmp_path / "own.gguf")
    assert stored.tensors["token_embd.weight"].shape == table.shape
    assert stored.raw("token_embd.weight").tobytes() == table.tobytes()
    stored.close()


def test_what_a_file_cannot_state(tmp_path):
    write_t5(tmp_path / "t5", 0, relative_attention_max_distance=64)
    folder = tmp_path / "bert"
    folder.mkdir()
    write_encoder(folder, hf_models.SPECS["bert"], 1)

    def fails(model, says):
        with pytest.raises((ConfigError, ModelFileError), match=says):
            quantize(tmp_path / model, tmp_path / "out.gguf", "f32")

    fails("t5", "GGUF cannot state attention.bias_reach = 64, its keys mean 128")
    fails("bert", "GGUF cannot state mlp.act = 'gelu_new'")
    write_encoder(folder, hf_models.SPECS["bert"], 0, "SequenceClassification")
    fails("bert", "GGUF has no name for tensor 'classifier")
    write_encoder(folder, hf_models.SPECS["bert"], 0)
    write_modules(folder, "mean")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    fails("bert", "pooling 'max' cannot be written as GGUF")
    (folder / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": false}')
    write_modules(folder, "mean")
    fails("bert", "GGUF cannot state how the tokenizer normalises")
