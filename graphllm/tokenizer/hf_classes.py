"""The tokenizer classes of transformers that bring a pipeline of their own.

transformers 5 takes from a tokenizer.json only the vocabulary, the merges, the added tokens and
what is put around a text, where one of these classes reads it; from a vocab.json and a merges.txt
there is nothing else to take. Source: its `models/*/tokenization_*.py`.
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
    """What a class does of its own; without arguments, nothing.

    ``build`` gives an engine the pipeline, of the directory's settings and tokenizer.json's text.
    ``tokens`` are special where a directory names no others, ``extras`` always. ``template``: what
    is put around a text, by the names of tokens and A, whatever tokenizer.json says.
    """

    build: Callable[[Tokenizer, TokenizerDirectory, str], None] | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    template: tuple[str, ...] | None = None

    def extra_tokens(self) -> list[AddedToken]:
        return [AddedToken(text, special=True) for text in self.extras]


def _set_bpe(engine: Tokenizer, fuse_unk: bool, byte_fallback: bool) -> None:
    model = engine.model
    if (kind := type(model).__name__) != "BPE":
        raise ValueError(f"its tokenizer_class reads merges (BPE), and the model is a {kind}")
    model.fuse_unk, model.byte_fallback, model.ignore_merges = fuse_unk, byte_fallback, False


def _set_bytes(engine: Tokenizer, directory: TokenizerDirectory, split: str, nfc: bool) -> None:
    """Words cut by GPT-2's pattern, or by ``split``, in GPT-2's alphabet of bytes."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    _set_bpe(engine, fuse_unk=False, byte_fallback=False)
    prefix = directory.flag("add_prefix_space", False)
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    cuts = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    engine.normalizer = normalizers.NFC() if nfc else normalizers.Sequence([])
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, alphabet])
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
    """Llama 2's merges; ``scheme``: before which texts a space is put, unless before none."""
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
    """Whether a LlamaTokenizer puts a space before the text after each special token, too."""
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

    # The package is off by a last digit in reading some scores, which decides where two ways to
    # cut a text are equally likely; transformers reads them with Python, too.
    rows = json.loads(content)["model"]["vocab"]
    engine.model = models.Unigram([(text, score) for text, score in rows], 3, False)
    scheme = "always" if directory.flag("add_prefix_space", True) else "never"
    parts = [] if engine.normalizer is None else _parts(engine.normalizer)
    charsmap = normalizers.Sequence([])  # what the file maps characters by, if it does
    first = next((part for part in parts if part.get("type") == "Precompiled"), None)
    if first is not None:
        state = {"type": "Sequence", "normalizers": [first]}
        charsmap.__setstate__(json.dumps(state).encode())
    engine.normalizer = normalizers.Sequence([charsmap, normalizers.Replace(Regex(" {2,}"), " ")])
    engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    engine.decoder = decoders.Metaspace(SPACE, scheme)


def _parts(normalizer: Any) -> list[dict[str, Any]]:
    state = json.loads(normalizer.__getstate__())
    found: list[dict[str, Any]] = state.get("normalizers", [state])
    return found


_BEGIN, _END = {"bos_token": "<s>", "eos_token": "</s>"}, "<|endoftext|>"
_GPT2 = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
TOKENIZER_CLASSES = {
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
