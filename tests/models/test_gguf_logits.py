"""GGUF files of every architecture: the logits of the original safetensors and of llama.cpp.

`golden/make_gguf_logits.py` recorded llama.cpp's logits of the same files.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import gguf_models
import hf_models
import numpy as np
import pytest

import graphllm
from graphllm.profiler.bench import parameters

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_logits.json").read_text())
SETTINGS = {"device": "reference", "kv_type": "f32", "context": gguf_models.CONTEXT}


@pytest.fixture(scope="module", params=gguf_models.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def made(request, tmp_path_factory):
    """Return the name of the case, its directory, its GGUF file and transformers' model."""
    kind, i = request.param
    folder, model = tmp_path_factory.mktemp(kind), gguf_models.model_of(kind, i)
    model.save_pretrained(folder)
    path = gguf_models.write(folder / "model.gguf", model, gguf_models.ARCHS[kind])
    return f"{kind}-{i}", folder, path, model


@pytest.mark.parity
def test_parameters_are_counted_as_llama_cpp_does(made):
    """All elements of the file are counted, constants included."""
    path = made[2]
    stored = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(path).tensors)
    assert parameters(graphllm.load(path, **SETTINGS).decoder.weights) == stored


@pytest.mark.parity
def test_logits_are_those_of_the_directory_and_of_llama_cpp(made):
    name, folder, path, model = made
    found = graphllm.load(path, **SETTINGS).logits(gguf_models.IDS)
    directory = graphllm.load(folder, **SETTINGS).logits(gguf_models.IDS)
    assert hf_models.distance(found, directory) <= 1e-5
    assert hf_models.distance(found, hf_models.logits_of(model, gguf_models.IDS)) <= 1e-4
    golden = np.array(GOLDEN["logits"][name])
    rows = found[list(gguf_models.ROWS)]
    assert np.square(rows - golden).sum() / np.square(golden).sum() <= 1e-4
