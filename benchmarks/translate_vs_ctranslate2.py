"""Compare beam search of T5-small's shape with CTranslate2, in pairs, in one process.

    pip install torch transformers ctranslate2
    python benchmarks/translate_vs_ctranslate2.py -t 2 -r 3

Weights are random and multiplied as int8 by both: q8_0 here, CTranslate2's own int8 there. Sources
have 1 to 60 tokens, all answers the same number of tokens. CTranslate2 sorts the sources by length;
the fastest of several batch sizes counts. See `paired_rounds` for pairs and ratios.

For AVX2 alone: NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= and CT2_FORCE_CPU_ISA=AVX2.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch
import transformers
from paired_rounds import measure, report, seconds_of

import graphllm
from graphllm.backends.cpu.runtime.isa import isa
from graphllm.profiler.roofline import cpu_name

EOS, FIRST = 1, 3  # the id after an answer; the first that is no control token
PEER_BATCHES = (8, 16, 32, 64)  # sources
Ids = list[list[int]]


def write_model(folder: Path) -> list[str]:
    """Write a directory of T5-small's shape with random weights; return the texts of its tokens."""
    torch.manual_seed(0)
    config = transformers.T5Config(  # the defaults have the shape of T5-small
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    control = ["<pad>", "</s>", "<unk>"]
    texts = [*control, *(f"\u2581{i}" for i in range(FIRST, config.vocab_size))]
    pieces = [(text, -float(i > 2)) for i, text in enumerate(texts)]
    transformers.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder)
    return texts


def peer(folder: Path, texts: list[str], sources: Ids, opts: argparse.Namespace) -> dict[int, Any]:
    """Functions that translate with CTranslate2, by batch size."""
    target = str(folder / "ctranslate2")
    ctranslate2.converters.TransformersConverter(str(folder)).convert(target, quantization="int8")
    translator = ctranslate2.Translator(
        target, device="cpu", inter_threads=1, intra_threads=opts.threads, compute_type="int8"
    )
    given = [[texts[i] for i in ids] for ids in sources]

    def translate(size: int) -> Any:
        return translator.translate_batch(
            given, beam_size=opts.beams, max_batch_size=size,
            min_decoding_length=opts.new, max_decoding_length=opts.new,
        )  # fmt: skip

    return {size: partial(translate, size) for size in PEER_BATCHES if size <= len(sources)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", "--sources", type=int, default=32)
    parser.add_argument("-b", "--beams", type=int, default=4)
    parser.add_argument("-g", "--new", type=int, default=32, help="Tokens of an answer.")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    opts = parser.parse_args()
    rng = np.random.default_rng(0)
    sources = [
        [*rng.integers(FIRST, 32000, n).tolist(), EOS] for n in rng.integers(1, 60, opts.sources)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_batch = peer(folder, write_model(folder), sources, opts)
        llm = graphllm.load(
            folder, type="q8_0", threads=opts.threads, device="cpu", context=256,
            max_sequences=opts.sources * opts.beams,
        )  # fmt: skip
    print(f"{cpu_name()}; {isa()}; {opts.threads} threads, {opts.beams} beams", flush=True)

    def own() -> Any:
        return llm.generate(sources, beams=opts.beams, max_tokens=opts.new, ignore_eos=True)

    seconds: dict[int, float] = {}
    for size, run in by_batch.items():
        seconds[size] = min(seconds_of(run) for _ in range(2))
    best = min(seconds, key=lambda size: seconds[size])
    work = opts.sources * opts.new
    tried = ", ".join(f"{size}: {work / s:.0f}" for size, s in seconds.items())
    print(f"CTranslate2 int8: batches of {best} (tokens/s by size: {tried})", flush=True)
    peers: dict[str, Callable[[], Any]] = {"CTranslate2 int8": by_batch[best]}
    for name, pairs in measure(own, peers, opts.rounds).items():
        report(name, pairs, work, "tokens/s")


if __name__ == "__main__":
    main()
