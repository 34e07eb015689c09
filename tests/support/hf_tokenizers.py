"""Small tokenizers of every kind that Hugging Face directories have, trained here and saved."""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from graphllm.tokenizer.edge_cases import EDGE_CASES
from graphllm.tokenizer.sentencepiece_proto import _decode_varint, read_model

ROOT = Path(__file__).parents[2]
WORDS = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTE_PIECES = [f"<0x{value:02X}>" for value in range(256)]


@lru_cache
def corpus() -> list[str]:
    """Plain English, code, and other scripts: half of the hard texts, so that half are new."""
    pages = [path.read_text("utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))]
    texts = [text.encode("utf-8", "replace").decode() for text in EDGE_CASES[::2] * 3]
    return [line for page in pages for line in page.split("\n")] + texts


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


@lru_cache
def byte_level(split: str = "", size: int = 700) -> str:
    """Byte-level BPE, as GPT-2's, or with words cut by ``split``; the JSON of it."""
    made = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    cuts = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, alphabet])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>"],
    )
    made.train_from_iterator(corpus(), trainer)
    return made.to_str()


@lru_cache
def metaspace(specials: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> str:
    """BPE over text with U+2581 for spaces, with byte pieces, as Llama 2's; the JSON of it."""
    made = Tokenizer(models.BPE(unk_token=specials[0], fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        limit_alphabet=150,
        special_tokens=[*specials, *BYTE_PIECES],
    )
    lines = [word for line in corpus() for word in line.split(" ")]
    made.train_from_iterator(lines, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in specials]
    made = Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    begin = ("<s>", made.token_to_id("<s>"))
    if begin[1] is not None:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begin]
        )
    return made.to_str()


@lru_cache
def unigram() -> str:
    """A unigram model with U+2581 for spaces, as XGLM's; the JSON of it."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    made.decoder = decoders.Metaspace("▁", "always")
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=500, show_progress=False, special_tokens=specials, unk_token="<unk>"
    )
    made.train_from_iterator(corpus(), trainer)
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", 2)]
    )
    return made.to_str()


def parts(text: str) -> tuple[Any, Any]:
    """Vocabulary and merges of a tokenizer.json."""
    model = json.loads(text)["model"]
    return model["vocab"], [tuple(pair) for pair in model.get("merges", [])]


def save_fast(folder: Path, text: str, model_type: str, **options: Any) -> None:
    """As transformers saves a PreTrainedTokenizerFast."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **options)
    made.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": model_type})


def save_class(folder: Path, name: str, text: str, model_type: str, **options: Any) -> None:
    """As transformers saves a tokenizer of the class."""
    import transformers

    vocabulary, merges = parts(text)
    if merges:
        options["merges"] = merges
    else:
        vocabulary = [tuple(row) for row in vocabulary]
    getattr(transformers, name)(vocab=vocabulary, **options).save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": model_type})


def _llama3(folder: Path) -> None:
    made = Tokenizer.from_str(byte_level(WORDS, 900))
    made.model.ignore_merges = True
    made.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("[INST]", lstrip=True)])
    first = ("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", pair=None, special_tokens=[first]
            ),
        ]
    )
    save_fast(
        folder,
        made.to_str(),
        "llama",
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        clean_up_tokenization_spaces=True,
    )


def _older_llama(folder: Path, model_type: str, **settings: Any) -> None:
    """As published before transformers 5: a normaliser puts the space before a text."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": {"content": "<unk>"}}
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, **settings}
    save_raw(folder, metaspace(), model_type, **settings)
    write_json(folder / "special_tokens_map.json", names)


def save_raw(folder: Path, text: str, model_type: str = "", **settings: Any) -> None:
    """A directory of a tokenizer.json and settings, as written here."""
    write_json(folder / "config.json", {"model_type": model_type})
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "tokenizer.json").write_text(text, "utf-8")


def _precompiled() -> str:
    """The unigram model with SentencePiece's own map of characters before it."""
    content = json.loads(unigram())
    spec = read_model(train_model("unigram", "nmt_nfkc")).normalizer
    start = spec.index(b"nmt_nfkc") + len("nmt_nfkc")  # field 1; field 2 is the map
    size, start = _decode_varint(spec, start + 1)
    charsmap = base64.b64encode(spec[start : start + size]).decode()
    first = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [first, *content["normalizer"]["normalizers"][1:]],
    }
    return json.dumps(content, ensure_ascii=False)


@lru_cache
def train_model(kind: str, rule: str = "identity", **options: Any) -> Path:
    """A SentencePiece .model file, of 600 pieces or fewer."""
    from sentencepiece import SentencePieceTrainer

    folder = Path(tempfile.mkdtemp(prefix="graphllm-spm-"))
    atexit.register(shutil.rmtree, folder)
    lines = [line.replace("\0", "") for line in corpus()]
    (folder / "corpus.txt").write_text("\n".join(lines), "utf-8")
    given = {
        "vocab_size": 600,
        "byte_fallback": kind == "bpe",
        "character_coverage": 0.98,
        "normalization_rule_name": rule,
        "remove_extra_whitespaces": rule != "identity",
        "user_defined_symbols": ("<tool>",),
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    SentencePieceTrainer.Train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "made"),
        model_type=kind,
        **{key: [*v] if isinstance(v, tuple) else v for key, v in (given | options).items()},
    )
    return folder / "made.model"


def _merges(folder: Path, model_type: str, **settings: Any) -> None:
    folder.mkdir(parents=True)
    Tokenizer.from_str(byte_level()).model.save(str(folder))
    write_json(folder / "config.json", {"model_type": model_type})
    write_json(folder / "tokenizer_config.json", settings)


def _named(name: str, text: Callable[[], str], model_type: str, **options: Any) -> Any:
    return lambda folder: save_class(folder, name, text(), model_type, **options)


def _with_words(text: str) -> str:
    """With added tokens of all sorts; those of a normalised text are shown as it has them."""
    made = Tokenizer.from_str(text)
    made.add_tokens([
        AddedToken("<tool>"), AddedToken("[INST]", normalized=True),
        AddedToken("hello", single_word=True), AddedToken("world", lstrip=True, normalized=False),
        AddedToken("Paris", rstrip=True), AddedToken("<|", lstrip=True, rstrip=True),
    ])  # fmt: skip
    made.add_special_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)])
    return made.to_str()


def _gemma_text() -> str:
    return metaspace(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))


# What makes the directory of each kind.
KINDS: dict[str, Callable[[Path], None]] = {
    "gpt2": _named("GPT2Tokenizer", byte_level, "gpt2"),
    "gpt2 with a space": _named("GPT2Tokenizer", byte_level, "gpt2", add_prefix_space=True),
    "gpt_neox": _named("GPTNeoXTokenizer", byte_level, "gpt_neox"),
    "qwen2": _named("Qwen2Tokenizer", byte_level, "qwen2"),
    "qwen3": _named("Qwen2Tokenizer", byte_level, "qwen3", eos_token="<|im_end|>"),
    "llama3": _llama3,
    "llama2": _named("LlamaTokenizer", metaspace, "llama"),
    "llama2 legacy": _named("LlamaTokenizer", metaspace, "llama", legacy=True),
    "llama2 bare": _named("LlamaTokenizer", metaspace, "llama", add_prefix_space=False),
    "llama2 bos": _named("LlamaTokenizer", metaspace, "llama", add_bos_token=True),
    "gemma": _named("GemmaTokenizer", _gemma_text, "gemma", add_bos_token=True),
    "xglm": _named("XGLMTokenizer", unigram, "xglm"),
    "xglm precompiled": lambda folder: save_raw(folder, _precompiled(), "xglm"),
    "older llama": lambda folder: _older_llama(folder, "llama", legacy=False),
    "older legacy llama": lambda folder: _older_llama(folder, "llama", legacy=True),
    "older llama null": lambda folder: _older_llama(folder, "llama", legacy=None),
    "mistral": lambda folder: _older_llama(folder, "mistral"),
    "code llama": lambda folder: _older_llama(
        folder, "llama", tokenizer_class="CodeLlamaTokenizer", add_prefix_space=False
    ),
    "added words": lambda folder: save_raw(
        folder, _with_words(metaspace()), "mistral", bos_token="<s>", eos_token="</s>"
    ),
    "added words of gpt2": lambda folder: save_raw(folder, _with_words(byte_level()), "gpt2"),
    "unnamed": lambda folder: save_fast(folder, metaspace(), "", eos_token="</s>"),
    "unigram": lambda folder: save_fast(
        folder, unigram(), "", eos_token="</s>", unk_token="<unk>", bos_token="<s>"
    ),
    "raw unigram": lambda folder: save_raw(
        folder, unigram(), eos_token="</s>", pad_token={"content": "<pad>", "__type": "AddedToken"}
    ),
    "merges": lambda folder: _merges(folder, "gpt2"),
    "merges with both": lambda folder: _merges(
        folder,
        "gpt2",
        add_bos_token=True,
        add_eos_token=True,
        eos_token="<|end|>",
        tokenizer_class="GPT2Tokenizer",
        additional_special_tokens=["<|im_start|>"],
    ),
    "qwen2 merges": lambda folder: _merges(folder, "qwen2", tokenizer_class="Qwen2Tokenizer"),
    "roberta merges": lambda folder: _merges(folder, "roberta"),
    "bart merges": lambda folder: _merges(
        folder, "bart", tokenizer_class="BartTokenizer", add_prefix_space=True, sep_token="<sep>"
    ),
}
