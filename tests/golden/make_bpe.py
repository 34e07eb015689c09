"""Write bpe.json: small BPE vocabularies, and edge-case texts with llama.cpp's token ids.

Needs the extra `peers`. Run as `python tests/golden/make_bpe.py` from the repository.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import Llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from make_spm import EDGE_TEXTS  # noqa: E402
from vocabulary_files import write_vocabulary  # noqa: E402

from graphllm.tokenizer.pre_tokenizers import PRE_TOKENIZERS  # noqa: E402

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CORPUS = [
    "the quick brown fox jumps over the lazy dog and says hello world, isn't it? they'll we've",
    "numbers: 1 22 333 4444 1,000,000.00 3.14159 2024-05-06 0x7fff; (a+b)*c == d && !e || f^g ~h",
    "def main(args):\n    for i in range(10):\n\t\tprint(f'{i} of {len(args)}')\n\n    return\n",
    "日本語のテスト、漢字とかな。中文字符测试，标点符号！한국어 문장입니다. 你好 世界 naïve café",
    "مرحبا بالعالم العربية مَدْرَسَة ١٢٣ नमस्ते दुनिया हिन्दी १२३ Привет, мир! Ελληνικά ไทย ½ ² Ⅷ 𝟘𝟙",
    "😀 😃😄 👨‍👩‍👧 🇩🇪🇫🇷 ✓ → ≠ € £ $ `code` <b>x</b> “quoted” ‘single’ … — e\u0301 a\u0308 n\u0303",
    "\r\n\r\n  \t \n \n\n x\u00a0y\u3000z\u2003w\u0085v\u2028u   indent    more     spaces",
]
MORE = [
    "I'M YOU'LL We'Ve it'S 'd 'D 're'RE 'tis 's's x'sx 'ſ 'K", "''s 'ss 's\n'll\n", "1234567890",
    "1 12 123 1234 12345", "x1y22z333", "١٢٣٤ १२३४ 𝟘𝟙𝟚𝟛 ½¾ ²³ ⅧⅨ 一二三", "3.14e-10 1,234.5",
    "~~ ~ `x` ``` a~b ^^ || ++ $5 €5 <= >= == a=b ~!", "a_b __init__ _ -- --- / // \\ @x #y",
    "e\u0301e\u0308\u0301 \u0301x 1\u0301 .\u0301 \u0301\u0301", "مَدْرَسَةٌ وَ كِتَابٌ",
    "हिन्दी में पढ़ना", "ก็ไม่ได้", "\u00a0a\u00a0\u00a0b", "\u3000全角\u3000\u3000空白",
    "a\u2028b\u2029c\u0085d\u000bx\u000cy", "\u1680\u180e\u200b\u202f\u205f\ufeff",
    "\u001c\u001d\u001e\u001fx", "\r\r\n\n\r", " \r\n \r", "a \n", "a\n ", "  \n  x", "\n\n  x",
    "\t\n\tx", "   ", "x   ", "   x", "x  \t", "foo\n\nbar\n\n\nbaz", "a.\n\nb!\r\n/c/\n",
    "一丁㐀𠀀龥龦가힣퟿ꥠᄀ", "、。！？：；「」『』…", "ＡＢＣａｂｃ１２３！？",
    "ΩKÅΑΒΓ ﬁﬂ ǅ ʼn ꟊ", "ƻǀǁʔʰᴬªº", "\ua7cb\u1c89x 1\U00010d40 \U000105c0 a\U0001e5d0 .\U00011bc0",
    "\U0001d2c0 \U00031350a 1\u0cf3", "\u0378\ue000\U000f0000\U0010fffd", "\ufffd\ufffe\uffff",
    "\x00\x01\x7f\x80\x9f", "ÿĀāĠĊċ Ġa Ċ", "[PAD0] z [", "<|im_start|>user\nHi there<|im_end|>\n",
    "<|begin|>x<|begin|>", "<|fim_prefix|>a<|fim_suffix|>", "<unk>", "a<tool> b <tool><tool>c",
    "seashore sea seas", "a     b      c", "<|im_start", "<|end|>x <|im_end|>  y",
    "HELLO Hello hELLO helloWorld HTTPServer éÉéÉ aÉb", "x/y/\n/ ./\n\n", "don’t it’s",
]  # fmt: skip
PARTS = [
    *"abest ,.'\"-~`$1230\n\t\r /_", "  ", "   ", "\n\n", "'s", "'LL", "the", " world", "é",
    "e\u0301", "日", "本語", "。", "、", "한국", "ا", "مَ", "ह", "\u094d", "😀", "\u200d",
    "\u00a0", "\u3000", "\u0085", "½", "²", "٣", "𝟘", "Ⅷ", "\x00", "\x1c", "ſ", "Σ", "ª", "ʰ",
    "<|im_end|>", "<tool>", "sea", "€", "≠", "^", "K",
]  # fmt: skip

SPECIALS = {
    "<|begin|>": CONTROL, "<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": NORMAL,
    "<|fim_prefix|>": USER_DEFINED, "<unk>": UNKNOWN, "<tool>": USER_DEFINED, "sea": USER_DEFINED,
    "     ": USER_DEFINED, "[PAD0]": UNUSED, "<|end|>": CONTROL,
}  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(2)
    mixed = ["".join(rng.choices(PARTS, k=rng.randint(3, 20))) for _ in range(60)]
    return list(dict.fromkeys([*EDGE_TEXTS, *MORE, *mixed]))


def train(corpus: list[str], size: int, alphabet: list[str], split: Any) -> dict[str, Any]:
    """Train pieces and merges across word boundaries, so that a wrong split changes the ids."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, max_token_length=8
    )
    engine.train_from_iterator(corpus * 3, trainer)
    model = json.loads(engine.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    return {"pieces": sorted(model["vocab"], key=model["vocab"].get), "merges": merges}


def extend(vocabulary: dict[str, Any], left: str, right: str, count: int) -> None:
    """Add random merges of lowest priority: a character of ``left`` and one of ``right``."""
    rng = random.Random(3)
    for _ in range(count):
        pair = rng.choice(left), rng.choice(right)
        if "".join(pair) not in vocabulary["pieces"]:
            vocabulary["pieces"].append("".join(pair))
            vocabulary["merges"].append(" ".join(pair))


def byte_vocabulary() -> dict[str, Any]:
    """Return a byte-level vocabulary: bytes, trained and cross-word merges, special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = train(CORPUS, 700, alphabet, split)
    extend(vocabulary, "aestAE1290.,'-~ĠĊĉč", "".join(alphabet[94:]) + "a1.'~ĠĊ" * 8, 300)
    extend(vocabulary, "".join(alphabet[94:]) + "Ċ" * 20, "aesE12.,'~ĠĊč", 100)
    types = [NORMAL] * len(vocabulary["pieces"]) + list(SPECIALS.values())
    vocabulary["pieces"] += SPECIALS
    begin = vocabulary["pieces"].index("<|begin|>")
    return vocabulary | {"types": types, "bos_token_id": begin, "eos_token_id": begin + 1}


def raw_vocabulary() -> dict[str, Any]:
    """Return a vocabulary like Gemma 4's: U+2581 for spaces, runs of newlines, byte tokens."""
    corpus = [text.replace(" ", "▁") for text in CORPUS]
    vocabulary = train(corpus, 550, [], pre_tokenizers.Split(Regex(r"\n+"), "removed"))
    names = [f"<0x{value:02X}>" for value in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", "</s>", "<|tool_response>", "<tool>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, NORMAL, CONTROL, USER_DEFINED]
    lines = ["\n", "\n\n", "\n\n\n"]
    types += [BYTE] * len(names) + [NORMAL] * (len(lines) + len(vocabulary["pieces"]))
    vocabulary["pieces"] = [*special, *names, *lines, *vocabulary["pieces"]]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "add_bos_token": False}
    return vocabulary | {"types": types, "model": "gemma4"} | ids


def lacking(vocabulary: dict[str, Any], seed: int) -> dict[str, Any]:
    """Remove pieces that merges need; add duplicate and useless merges."""
    rng = random.Random(seed)
    kept = list(range(len(vocabulary["pieces"])))
    for token in rng.sample(kept[8:-12], 150):
        kept.remove(token)
    changed = vocabulary | {
        "pieces": [vocabulary["pieces"][token] for token in kept],
        "types": [vocabulary["types"][token] for token in kept],
    }
    for key in ("bos_token_id", "eos_token_id"):
        changed[key] = kept.index(vocabulary[key])
    merges = vocabulary["merges"]
    changed["merges"] = [*merges, *rng.sample(merges, 50), "alone", "a b c", " x"]
    return changed


def phi3_vocabulary() -> dict[str, Any]:
    """Return the vocabulary of tiny_spm.json with special tokens that strip spaces."""
    tiny = json.loads((HERE / "tiny_spm.json").read_text())
    special = ["<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]
    return {
        "pieces": tiny["pieces"] + special,
        "scores": tiny["scores"] + [0.0] * len(special),
        "types": tiny["types"] + [CONTROL] * len(special),
        "model": "llama",
    }


PHI3_TEXTS = [
    "<|user|>\nhello world<|end|>\n<|assistant|>\n", "<|user|>  \t\n x <|end|> \u00a0y",
    "<s>  a</s>  b", "<|endoftext|> \n<|end|>   ", "<tool>  hello  <tool> sea  shore", "<unk> a",
    "<|end|>\n\n<|end|>", " <|end|>",
]  # fmt: skip


def ask(path: Path, rows: list[str]) -> dict[str, Any]:
    """Return llama.cpp's ids and pieces of a vocabulary in compact form.

    `special` has the ids with special tokens parsed where they differ, including the begin token;
    `begin` has the ids of the empty text.
    """
    llama = Llama(str(path), vocab_only=True, verbose=False)
    plain = [llama.tokenize(text.encode(), add_bos=False, special=False) for text in rows]
    special = [llama.tokenize(text.encode(), add_bos=True, special=True) for text in rows]
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    begin = llama.tokenize(b"", add_bos=True)
    size = llama.n_vocab()
    pieces = b"".join(b"%d=%s\n" % (token, piece(vocab, token)) for token in range(size))
    return {
        "begin": begin,
        "bos_eos": [llama.token_bos(), llama.token_eos()],
        "eog": [token for token in range(size) if llama_cpp.llama_vocab_is_eog(vocab, token)],
        "pieces_sha256": hashlib.sha256(pieces).hexdigest(),
        "ids": [" ".join(map(str, ids)) for ids in plain],
        "special": {
            str(row): " ".join(map(str, ids))
            for row, (ids, without) in enumerate(zip(special, plain, strict=True))
            if ids != begin + without
        },
    }


def piece(vocab: Any, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(400)
    size = llama_cpp.llama_token_to_piece(vocab, token, buffer, 400, 0, True)
    return buffer.raw[:size]


def class_hashes() -> dict[str, str]:
    """Return a hash of the code points of each Unicode class in llama.cpp's tables."""
    library = Path(llama_cpp.__file__).parent / "lib" / "libllama.so"
    flags = ctypes.CDLL(str(library))._Z26unicode_cpt_flags_from_cptj  # of unicode.h
    flags.restype, flags.argtypes = ctypes.c_uint16, [ctypes.c_uint32]
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    values = list(map(flags, codes))
    bits = {"N": 2, "L": 4, "M": 16, "P": 32}
    chars = {n: "".join(chr(c) for c, v in zip(codes, values) if v & bits[n]) for n in bits}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in chars.items()}


def main() -> None:
    rows = texts()
    vocabularies = {"bytes": byte_vocabulary(), "raw": raw_vocabulary()}
    golden: dict[str, Any] = {"texts": rows, "vocabularies": vocabularies}
    golden |= {"classes": class_hashes(), "kinds": {}}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "v.gguf"
        for name, pre in PRE_TOKENIZERS.items():
            vocabulary = vocabularies["raw" if pre.raw else "bytes"]
            answer = ask(write_vocabulary(path, vocabulary, "llama", pre=name), rows)
            first = next(other for other in PRE_TOKENIZERS if PRE_TOKENIZERS[other] == pre)
            assert golden["kinds"].setdefault(first, answer) == answer, name
        for seed, (name, vocabulary) in enumerate(list(vocabularies.items())):
            vocabulary = golden["vocabularies"]["lacking " + name] = lacking(vocabulary, seed)
            write_vocabulary(path, vocabulary, "llama", pre="gpt-2")
            golden["kinds"]["lacking " + name] = ask(path, rows)
            if name == "bytes":
                write_vocabulary(path, vocabulary, "llama", pre="llama-bpe")
                golden["kinds"]["lacking llama-bpe"] = ask(path, rows)
        golden["phi3"] = phi3_vocabulary()
        write_vocabulary(path, golden["phi3"], "llama", "Phi-3 tiny")
        golden["phi3_kind"] = {"texts": PHI3_TEXTS} | ask(path, PHI3_TEXTS)
    write(golden)


def write(golden: dict[str, Any]) -> None:
    kinds = golden.pop("kinds")
    head = json.dumps(golden)[1:-1]
    lines = [f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in kinds.items()]
    (HERE / "bpe.json").write_text("{" + head + ',\n"kinds": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
