"""Write gemma3_greedy.json: llama.cpp's greedy tokens on the demo model (extra "peers").

With quantised activations a tiny change of one activation changes the rounding of others, and the
logits move by some tenths. llama.cpp often disagrees with itself between prefill in one step, in
chunks or token by token, with flash attention on or off, and with a cache in f16 or f32. A prompt
is kept only if all of these variants agree on every token.

Run by hand when the candidates change: ``python tests/golden/make_greedy.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import llama_cpp
import numpy as np

from graphllm.checkpoints.demo import demo_path

CANDIDATES = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def quicksort(items):\n",
    "Water boils at a temperature of",
    "Die Hauptstadt von Deutschland ist",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics are:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients for a simple pancake recipe:",
    "In 1969, the first human",
    "A B C D E F G",
    "Monday, Tuesday, Wednesday,",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    "2, 4, 8, 16, 32,",
    "January\nFebruary\nMarch\n",
    "<html>\n<head>\n<title>",
    "import numpy as np\nimport matplotlib.pyplot as plt\n",
    "Row, row, row your boat,\nGently down the stream.\n",
    "To be, or not to be, that is the question:",
    "Q: What is 2 + 2?\nA: 4\nQ: What is 3 + 3?\nA: 6\nQ: What is 4 + 4?\nA:",
    "We hold these truths to be self-evident, that all men are",
    "Our Father, who art in heaven,",
    "apple: red\nbanana: yellow\ngrass: green\nsky:",
    "SELECT name, age FROM users WHERE",
    "one two three four five six seven",
    "10, 20, 30, 40, 50,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "In the beginning God created the heaven and the earth.",
    "int main(int argc, char **argv) {\n",
    "100 99 98 97 96",
    "ha ha ha ha ha ha",
    "Mercury, Venus, Earth, Mars,",
    "a1 b2 c3 d4 e5",
    "Spring, summer, autumn,",
    "hello hello hello hello",
    "3, 6, 9, 12, 15,",
    "\\begin{itemize}\n\\item One\n\\item Two\n\\item",
    "public static void main(String[] args) {\n",
    "Paris is the capital of France. Berlin is the capital of Germany. Madrid is the capital of",
    "x = 1\ny = 2\nz = 3\n",
    "5 4 3 2 1\n5 4 3 2 1\n5 4 3 2",
    "red, green, blue, red, green, blue, red,",
    "She sells seashells by the seashore. She sells seashells by",
    "Do, re, mi, fa, sol, la, ti, do, re, mi,",
    "0.1, 0.2, 0.3, 0.4,",
    "- [ ] task 1\n- [ ] task 2\n- [ ] task 3\n",
    "Knock, knock. Who's there?",
    "git add .\ngit commit -m",
]
PROMPTS, TOKENS = 10, 32


def greedy(llm: llama_cpp.Llama, ids: list[int], size: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens after ``ids`` (prefill chunks of ``size``) and the margin of each."""
    llm.reset()
    for at in range(0, len(ids), size):
        llm.eval(ids[at : at + size])
    tokens, margins = [], []
    for _ in range(TOKENS):
        logits = np.array(llm.scores[llm.n_tokens - 1], np.float32)
        first, second = np.argsort(-logits, kind="stable")[:2]
        tokens.append(int(first))
        margins.append(round(float(logits[first] - logits[second]), 4))
        llm.eval([int(first)])
    return tokens, margins


def main() -> None:
    ways = [
        llama_cpp.Llama(
            str(demo_path()),
            n_ctx=256,
            n_threads=1,
            logits_all=True,
            verbose=False,
            flash_attn=fa,
            type_k=kind,
            type_v=kind,
        )
        for fa in (False, True)
        for kind in (llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_F32)
    ]
    cases: list[dict] = []
    tried = 0
    for prompt in CANDIDATES:
        if len(cases) == PROMPTS:
            break
        tried += 1
        ids = ways[0].tokenize(prompt.encode(), add_bos=True, special=False)
        tokens, margins = greedy(ways[0], ids, len(ids))
        others = ((llm, size) for size in (1, 3, len(ids)) for llm in reversed(ways))
        if all(greedy(llm, ids, size)[0] == tokens for llm, size in others):
            cases.append({"prompt": prompt, "ids": ids, "tokens": tokens, "margins": margins})
        print(f"{len(cases)} of {tried}: {prompt!r}", flush=True)
    made = {"llama_cpp_python": llama_cpp.__version__, "tried": tried, "cases": cases}
    path = Path(__file__).with_name("gemma3_greedy.json")
    path.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
