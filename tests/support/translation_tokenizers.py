"""Small tokenizers of translation models, as files of a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_tokenizers import train_model, write_json

from graphllm.tokenizer.sentencepiece_proto import read_model


def unigram_pieces() -> list[tuple[str, float]]:
    proto = read_model(train_model("unigram", "nmt_nfkc"))
    return [(p.decode(), float(s)) for p, s in zip(proto.pieces, proto.scores)][3:]


def vocabulary(folder: Path, first: tuple[str, ...], last: tuple[str, ...] = ()) -> None:
    """A vocab.json in another order than the model, and without some of its pieces."""
    pieces = [piece for piece, _ in unigram_pieces()[::-1] if piece not in first]
    every = [*first, *pieces[: len(pieces) * 4 // 5], *last]
    write_json(folder / "vocab.json", {text: token for token, text in enumerate(every)})


def marian(folder: Path) -> None:
    vocabulary(folder, ("</s>", "<unk>", ">>fra<<", ">>deu<<"), ("<pad>",))
    for name in ("source.spm", "target.spm"):
        shutil.copy(train_model("unigram", "nmt_nfkc"), folder / name)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer"})
    write_json(folder / "config.json", {"model_type": "marian", "eos_token_id": 0})


def m2m_100(folder: Path) -> None:
    vocabulary(folder, ("<s>", "<pad>", "</s>", "<unk>"))
    shutil.copy(train_model("unigram", "nmt_nfkc"), folder / "sentencepiece.bpe.model")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    write_json(folder / "config.json", {"model_type": "m2m_100", "eos_token_id": 2})


def from_transformers(folder: Path, name: str) -> None:
    import transformers

    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    own = dict(unigram_pieces())
    if name == "T5Tokenizer":
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *own.items()]
        made = transformers.T5Tokenizer(vocab=pieces, extra_ids=3)
    elif name == "MBartTokenizer":
        made = transformers.MBartTokenizer(vocab=[*special, *own.items()])
    else:
        letters = [t for t, _ in special] + sorted({c for piece in own for c in piece})
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n")]
        letters += [a + b for a, b in merges]
        made = transformers.NllbTokenizer(
            vocab={t: i for i, t in enumerate(letters)}, merges=merges
        )
    made.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": "m2m_100" if "Nllb" in name else "bart"})
