"""A small decoder with a windowed and a full layer, its prompt, and an engine for it."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny

from graphllm.backends import Options
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.engine.engine import Engine
from graphllm.engine.request import Sampling
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Limits
from graphllm.runtime.executor import Executor

WINDOWED = """
from dataclasses import replace
from graphllm.model.decoder import Decoder as Model
from graphllm.model.config_keys import base_config

def config(keys):
    plain = base_config(keys)
    layers = tuple(replace(layer, window=20 * (i % 2)) for i, layer in enumerate(plain.layers))
    return replace(plain, layers=layers)
"""


WINDOW, CONTEXT = 20, 120
IDS = [int(i) for i in np.random.default_rng(5).integers(3, 90, CONTEXT)]
GREEDY = Sampling(max_tokens=200, temperature=0.0, seed=0)


def windowed(folder):
    """Write a llama with a head size of 32 and a window of 20 in the second of three layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "WIDTH", 32)
        patch.setattr(tiny, "DIM", 32 * tiny.HEADS)
        written = tiny.write_llama(folder / "tiny.gguf", tiny.llama_weights())
    (folder / "windowed.py").write_text(WINDOWED)
    return written


def make_engine(path, threads=0, backends=("cpu", "reference"), **limits) -> Engine:
    """Steps of 16 tokens and blocks of 8: a window of 20 keeps 6 of the context's 15 blocks."""
    file = GgufCheckpoint(path)
    decoder = build_decoder(file, path.parent / "windowed.py")
    executor = Executor(decoder.weights, backends, Options(threads=threads), strict=True)
    wanted = {"tokens": 16, "context": CONTEXT, "block": 8, "kv_dtype": "f32", **limits}
    engine = Engine(decoder, executor, Limits(**wanted))
    engine.tokenizer = file.tokenizer()  # for `request_runs.submit`
    return engine


def caches(path):
    """Return the model's KV cache groups."""
    return build_decoder(GgufCheckpoint(path), path.parent / "windowed.py").caches


def logits(engine, ids=IDS, size=16):
    """Return float32 [T, vocab], computed in chunks of ``size``."""
    with engine.evaluation(ids) as sequence:
        parts = [sequence.step_logits(ids[i : i + size]) for i in range(0, len(ids), size)]
    return np.concatenate(parts)


def generate_ids(engine, ids, count):
    found = engine.generate(ids, GREEDY, ())
    return [next(found) for _ in range(count)]
