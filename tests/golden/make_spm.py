"""Write gemma3_spm.json and tiny_spm.json: edge-case texts with llama.cpp's token ids.

Needs the extras `demo` and `peers`. Run as `python tests/golden/make_spm.py` from the repository.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
from llama_cpp import Llama

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from gguf_files import write_spm  # noqa: E402

from graphllm.checkpoints.demo import demo_path  # noqa: E402

EDGE_TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", "\t\t\t", "\r\n", " \n ", "a", " a", "a ",
    "  a  b   c ",
    "Hello, world!", "The capital of France is", "don't", "I'll we've they're", "3.14159 1,000,000",
    "def f(x):\n    return x ** 2\n", "\tif (a<b) {\n\t\tb++;\n\t}", "<div class=\"x\">\n</div>",
    "<table><tr><td>1</td></tr></table>", "<h1>T</h1>", "</s>", "<bos>", "<eos>", "<unk>", "<pad>",
    "<bos>Hello<eos>", "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<unused7>",
    "<start_of_turn", "start_of_turn>", "<<bos>>", "<bos><bos> <bos>", "[multimodal]", "<0x41>",
    "<0x0A>", "▁", "▁▁", "a▁b", " ▁ ", "\x00", "a\x00b", "\x01\x02\x7f", "\u00a0\u3000\u2003x",
    "\u200b\u200d\ufeff", "e\u0301 é", "ﬁ ﷺ ﷽", "日本語テスト", "汉字学校", "한국어 문장",
    "Привет, мир",
    "مرحبا بالعالم", "नमस्ते दुनिया", "ไทย", "😀", "😀😀 🎉", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "𝕏𐍈𓀀",
    "\U000e0001\U0010ffff",
    "\n" * 31, "\n" * 32, "\n" * 70, " " * 31, " " * 33, " " * 70, "\t" * 40, "a" * 50,
    "=" * 80, "-" * 33, "ab" * 40, "\n \n  \n   \n", "x\n\n\n\ty  \n\t \tz",
    "....,,,,!!!!", "a\u0000\u0000\n",
    "https://example.org/a?b=c&d=%20e#f", "C:\\dir\\file.txt", "\\n\\t\\u0041", "¿Qué? ¡Sí!",
    "½ ² ™ €",
    "<s>x</s>", "<s>", "[INST] hi [/INST]", "hello hello", "tool tools<tool>tool", "  <tool>  x",
]  # fmt: skip
PARTS = [*"aeiou xyz.,<>\n\t▁", "  ", "\n\n", "the ", "ing", "日本", "한", "é", "😀", "\x00",
         "</", "<b", "42", "Zs", "ß", "->", "::", "ठ", "\u200d", "<bos>", "<tool>", "hello",
         " world"]  # fmt: skip

CORPUS = (
    "the quick brown fox jumps over the lazy dog and says hello world to the other dogs in town. "
    "numbers such as 1 22 333 and words like testing, training, tokenizer and tool are here too. "
    "日本語 also appears, with é and ü in naïve café text; she sells sea shells on the sea shore. "
)


def texts() -> list[str]:
    rng = random.Random(1)
    mixed = [
        "".join(rng.choices(PARTS, k=rng.randint(2, 24))) for _ in range(200 - len(EDGE_TEXTS))
    ]
    return EDGE_TEXTS + mixed


def cases(path: Path) -> list[dict[str, Any]]:
    """Return the ids of every text, and those with special tokens parsed if they differ."""
    llama = Llama(str(path), vocab_only=True, verbose=False)
    rows = []
    for text in texts():
        plain = llama.tokenize(text.encode(), add_bos=False, special=False)
        row: dict[str, Any] = {"text": text, "ids": plain}
        special = llama.tokenize(text.encode(), add_bos=True, special=True)
        if special[1:] != plain:
            row["special_ids"] = special  # with the begin token, if the model has it added
        rows.append(row)
    return rows


def tiny_vocabulary() -> dict[str, Any]:
    """Train a vocabulary of 400 pieces, with a user-defined and an unused one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split(". ") * 4),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        user_defined_symbols=["<tool>", "sea"],
        character_coverage=1.0,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = spm.get_piece_size()
    types = [1] * size
    for token in range(size):
        if spm.IsUnknown(token):
            types[token] = 2
        elif spm.IsControl(token):
            types[token] = 3
        elif spm.IsByte(token):
            types[token] = 6
        elif spm.IdToPiece(token) in ("<tool>", "sea"):
            types[token] = 4
    types[-1] = 5  # the last single character
    return {
        "pieces": [spm.IdToPiece(token) for token in range(size)],
        "scores": [spm.GetScore(token) for token in range(size)],
        "types": types,
    }


def write(name: str, content: dict[str, Any]) -> None:
    lines = [json.dumps(case, ensure_ascii=True) for case in content.pop("cases")]
    head = json.dumps(content, ensure_ascii=True)[1:-1]
    text = "{" + head + (", " if head else "") + '"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (HERE / name).write_text(text)


def main() -> None:
    write("gemma3_spm.json", {"cases": cases(demo_path())})
    vocabulary = tiny_vocabulary()
    with tempfile.TemporaryDirectory() as directory:
        path = write_spm(Path(directory) / "tiny.gguf", vocabulary)
        write("tiny_spm.json", vocabulary | {"cases": cases(path)})


if __name__ == "__main__":
    main()
