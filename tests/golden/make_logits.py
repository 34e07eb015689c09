"""Write tiny_logits.json: llama.cpp's logits of the tests' small random models (extra "peers").

Run by hand when `tiny_models` changes: ``python tests/golden/make_logits.py``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "models")]
import tiny_models as tiny  # noqa: E402
from model_cases import IDS, KINDS  # noqa: E402


def main() -> None:
    logits = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch, tied in KINDS:
            weights = tiny.llama_weights(tied=tied, bias=arch == "qwen2")
            path = tiny.write_llama(Path(folder) / "tiny.gguf", weights, arch)
            llm = llama_cpp.Llama(str(path), n_ctx=128, logits_all=True, verbose=False)
            llm.eval(IDS)
            rows = np.array(llm.scores[len(IDS) - 2 : len(IDS)], np.float64)
            kind = f"{arch} {'tied' if tied else 'untied'}"
            logits[kind] = [[float(f"{v:.6g}") for v in row] for row in rows]
    made = {"llama_cpp_python": llama_cpp.__version__, "ids": IDS, "logits": logits}
    (HERE / "tiny_logits.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
