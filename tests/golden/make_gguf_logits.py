"""Write gguf_logits.json: llama.cpp's logits of the small GGUF files of `gguf_models`.

Needs the extra "peers". Run by hand when the cases change: ``python
tests/golden/make_gguf_logits.py``. It stops at the first model on which llama.cpp and transformers
disagree.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
import gguf_models as models  # noqa: E402
import hf_models  # noqa: E402


def logits(path: Path) -> np.ndarray:
    """Return llama.cpp's logits of all tokens [T, vocab]."""
    llm = llama_cpp.Llama(
        str(path), n_ctx=models.CONTEXT, n_threads=1, logits_all=True, verbose=False,
        flash_attn=False, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    llm.eval(models.IDS)
    return np.array(llm.scores[: len(models.IDS)], np.float64)


def main() -> None:
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, i in models.CASES:
            model = models.model_of(kind, i)
            path = models.write(Path(folder) / f"{kind}-{i}.gguf", model, models.ARCHS[kind])
            found, want = logits(path), hf_models.logits_of(model, models.IDS)
            off = ((found - want) ** 2).sum() / (want**2).sum()
            print(f"{kind}-{i}: NMSE to transformers {off:.1e}")
            assert off <= 1e-4
            rows = found[list(models.ROWS)]
            kept[f"{kind}-{i}"] = [[float(f"{v:.5g}") for v in row] for row in rows]
    made = {"llama_cpp_python": llama_cpp.__version__, "logits": kept}
    (HERE / "gguf_logits.json").write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
