"""Tokenizer classes of transformers with a pipeline of their own.

With one of these classes, transformers 5 takes only the vocabulary, the merges, the added tokens
and the template from tokenizer.json; vocab.json and merges.txt state nothing else. Source:
transformers, `models/*/tokenization_*.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .tokenizer_config import AddedToken, TokenizerDirectory
from .vocabulary import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MADE_UP = tuple(f"<madeupword{i}>" for i in range(7))


@dataclass(frozen=True)
class TokenizerClass:
    """Properties of a tokenizer class. The defaults are those of a class without any.

    Attributes:
        build: Sets the pipeline of an engine from the directory's settings and the text of
            tokenizer.json.
        tokens: Special tokens by name, for directories that do not state them.
        extras: Additional special tokens of every directory.
        template: Names of the special tokens around a text, which is "A", in place of
            tokenizer.json's template; None keeps that.
        pair: The same around two texts, "A" and "B", with the token type after a colon if it is not
            0; None: the second text follows the first one's template.
        model: Kind of the model in tokenizer.json; a file with another one is read as it is. None:
            any kind, which ``build`` may refuse.
    """

    build: Callable[[Tokenizer, TokenizerDirectory, str], None] | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    template: tuple[str, ...] | None = None
    pair: tuple[str, ...] | None = None
    model: str | None = None

    def extra_tokens(self) -> list[AddedToken]:
        return [AddedToken(text, special=True) for text in self.extras]


def _set_bpe(engine: Tokenizer, fuse_unk: bool, byte_fallback: bool) -> None:
    model = engine.model
    if (kind := type(model).__name__) != "BPE":
        raise ValueError(f"its tokenizer_class reads merges (BPE), but the model is {kind}")
    model.fuse_unk, model.byte_fallback, model.ignore_merges = fuse_unk, byte_fallback, False


def _set_bytes(engine: Tokenizer, directory: TokenizerDirectory, split: str, nfc: bool) -> None:
    """Set up byte-level BPE; words are split by the pattern ``split``, or GPT-2's if empty."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    _set_bpe(engine, fuse_unk=False, byte_fallback=False)
    prefix = directory.flag("add_prefix_space", False)
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    splits = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    engine.normalizer = normalizers.NFC() if nfc else normalizers.Sequence([])
    engine.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    engine.decoder = decoders.ByteLevel()


def _gpt2(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    _set_bytes(engine, directory, "", nfc=False)


def _gpt_neox(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    _set_bytes(engine, directory, "", nfc=True)


def _qwen2(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    _set_bytes(engine, directory, _QWEN2, nfc=True)


def _llama(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    _set_pieces(engine, directory, prefix_scheme(directory), always_strips=False)


def _code_llama(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    _set_pieces(engine, directory, "first", always_strips=True)


def _set_pieces(
    engine: Tokenizer, directory: TokenizerDirectory, scheme: str, always_strips: bool
) -> None:
    """Set up Llama 2's BPE; ``scheme``: prepend scheme if a space is put before a text."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    _set_bpe(engine, fuse_unk=True, byte_fallback=True)
    prefix = directory.flag("add_prefix_space", True)
    scheme = scheme if prefix else "never"
    strip = [decoders.Strip(" ", 1, 0)] if prefix or always_strips else []
    engine.normalizer = normalizers.Sequence([])
    engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    engine.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def prefix_scheme(directory: TokenizerDirectory) -> str:
    """Return the prepend scheme of a LlamaTokenizer.

    "always" puts a space also before the text after each special token, "first" does not.
    """
    return "always" if directory.flag("legacy", False) else "first"


def _gemma(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    _set_bpe(engine, fuse_unk=True, byte_fallback=True)
    engine.normalizer = normalizers.Replace(" ", SPACE)
    engine.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    engine.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _xglm(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    engine.model = models.Unigram(_scored_pieces(content), 3, False)
    scheme = "always" if directory.flag("add_prefix_space", True) else "never"
    merged = normalizers.Replace(Regex(" {2,}"), " ")
    engine.normalizer = normalizers.Sequence([_charsmap(engine), merged])
    engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    engine.decoder = decoders.Metaspace(SPACE, scheme)


def _scored_pieces(content: str) -> list[tuple[str, float]]:
    """Return the pieces of a unigram model.

    The package reads some scores with an error in the last digit, which matters where two
    segmentations are equally likely. transformers reads them with Python as well.
    """
    return [(text, score) for text, score in json.loads(content)["model"]["vocab"]]


def _charsmap(engine: Tokenizer) -> Any:
    """Return a normalizer of the file's character map, which is empty if it has none."""
    from tokenizers import normalizers

    parts = [] if engine.normalizer is None else _parts(engine.normalizer)
    found = normalizers.Sequence([])
    first = next((part for part in parts if part.get("type") == "Precompiled"), None)
    if first is not None:
        state = {"type": "Sequence", "normalizers": [first]}
        found.__setstate__(json.dumps(state).encode())
    return found


def _bert(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    model: Any = engine.model
    model.max_input_chars_per_word, model.continuing_subword_prefix = 100, "##"
    accents = directory.settings.get("strip_accents")  # null: as lowercase
    engine.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=directory.flag("tokenize_chinese_chars", True),
        strip_accents=None if accents is None else directory.flag("strip_accents", False),
        lowercase=directory.flag("do_lower_case", True),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(prefix="##")


def _xlm_roberta(engine: Tokenizer, directory: TokenizerDirectory, content: str) -> None:
    from tokenizers import decoders, models, pre_tokenizers

    rows = _scored_pieces(content)
    unknown = 3
    if directory.class_name(byte_level=False) == "CamembertTokenizer":
        unknown = next((i for i, (text, _) in enumerate(rows) if text == "<unk>"), 0)
    scheme = "always" if directory.flag("add_prefix_space", True) else "never"
    engine.model = models.Unigram(rows, unknown, False)
    engine.normalizer = _charsmap(engine)
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, scheme)]
    )
    engine.decoder = decoders.Metaspace(SPACE, scheme)


def _parts(normalizer: Any) -> list[dict[str, Any]]:
    state = json.loads(normalizer.__getstate__())
    found: list[dict[str, Any]] = state.get("normalizers", [state])
    return found


_BEGIN, _END = {"bos_token": "<s>", "eos_token": "</s>"}, "<|endoftext|>"
_GPT2 = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_BERT_TOKENS = {
    f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")
}
_ROBERTA_TOKENS = _BEGIN | {
    "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>",
    "mask_token": "<mask>",
}  # fmt: skip
_BERT_NAMES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
_CLS_SEP, _BOS_EOS = ("cls_token", "A", "sep_token"), ("bos_token", "A", "eos_token")
_BERT_PAIR = (*_CLS_SEP, "B:1", "sep_token:1")
_ROBERTA_PAIR = (*_CLS_SEP, "sep_token", "B", "sep_token")
_XLM_ROBERTA_PAIR = (*_BOS_EOS, "eos_token", "B", "eos_token")
_BERT_CLASS = TokenizerClass(
    _bert, _BERT_TOKENS, template=_CLS_SEP, pair=_BERT_PAIR, model="WordPiece"
)
_ROBERTA_CLASS = TokenizerClass(
    _gpt2, _ROBERTA_TOKENS, template=_CLS_SEP, pair=_ROBERTA_PAIR, model="BPE"
)
_XLM_ROBERTA_CLASS = TokenizerClass(
    _xlm_roberta, _ROBERTA_TOKENS, template=_BOS_EOS, pair=_XLM_ROBERTA_PAIR, model="Unigram"
)
TOKENIZER_CLASSES = {
    **dict.fromkeys(_BERT_NAMES, _BERT_CLASS),
    "MPNetTokenizer": TokenizerClass(
        _bert,
        _ROBERTA_TOKENS | {"unk_token": "[UNK]"},
        template=_CLS_SEP,
        pair=_ROBERTA_PAIR,
        model="WordPiece",
    ),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer"), _ROBERTA_CLASS),
    **dict.fromkeys(("XLMRobertaTokenizer", "CamembertTokenizer"), _XLM_ROBERTA_CLASS),
    "GPT2Tokenizer": TokenizerClass(_gpt2, _GPT2),
    "GPTNeoXTokenizer": TokenizerClass(
        _gpt_neox, _GPT2 | {"pad_token": "<|padding|>"}, template=("A",)
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _qwen2, {"eos_token": _END, "unk_token": _END, "pad_token": _END}
    ),
    "LlamaTokenizer": TokenizerClass(_llama, _BEGIN | {"unk_token": "<unk>"}),
    "CodeLlamaTokenizer": TokenizerClass(
        _code_llama,
        _BEGIN | {"unk_token": "<unk>"},
        (*(f"▁<{name}>" for name in ("PRE", "MID", "SUF", "EOT")), "<FILL_ME>"),
        ("bos_token", "A"),
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "XGLMTokenizer": TokenizerClass(
        _xglm,
        _BEGIN
        | {"sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        _MADE_UP,
        ("eos_token", "A"),
    ),
}
