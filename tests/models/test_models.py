"""Small random models in GGUF files: against transformers and llama.cpp, and strict loading."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from model_cases import IDS, KINDS, nmse

import graphllm
from graphllm.errors import ConfigError, GraphError, ModelFileError

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_logits.json"


@pytest.fixture(scope="module", params=KINDS, ids=[f"{a}-{'un' * (not t)}tied" for a, t in KINDS])
def small(request, tmp_path_factory):
    """Return path, architecture, weights and whether the head is tied."""
    arch, tied = request.param
    weights = tiny.llama_weights(tied=tied, bias=arch == "qwen2")
    path = tmp_path_factory.mktemp(arch) / "tiny.gguf"
    return tiny.write_llama(path, weights, arch), arch, weights, tied


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the file of a small llama."""
    path = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    return tiny.write_llama(path, tiny.llama_weights())


@pytest.mark.parity
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_logits_agree_with_transformers(small, device):
    import torch

    path, arch, weights, _ = small
    with torch.no_grad():
        want = tiny.hf_model(arch, weights)(torch.tensor([IDS])).logits[0].numpy()
    have = graphllm.load(path, device=device, kv_type="f32").logits(IDS)
    np.testing.assert_allclose(have, want, atol=2e-4)


def test_a_small_gemma3_on_the_cpu(tmp_path):
    """More tokens than the window. test_gemma3.py tests the real model."""
    path, ids = tiny.write_tiny(tmp_path / "tiny.gguf", "gemma3"), IDS * 5
    cpu, reference = (graphllm.load(path, device=d, kv_type="f32") for d in ("cpu", "reference"))
    assert [layer.window for layer in cpu.decoder.cfg.layers] == [16, 0, 16]
    np.testing.assert_allclose(cpu.logits(ids), reference.logits(ids), atol=2e-4)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_logits_agree_with_llama_cpp(small, device):
    path, arch, _, tied = small
    golden = json.loads(GOLDEN.read_text())
    assert golden["ids"] == IDS
    want = np.array(golden["logits"][f"{arch} {'tied' if tied else 'untied'}"], np.float32)
    have = graphllm.load(path, device=device).logits(IDS)[-len(want) :]
    assert nmse(have, want) <= 1e-4


def test_cpu_runs_all_of_a_model(small):
    model = graphllm.load(small[0], strict=True)
    assert list(model.placement()) == ["cpu"]
    done = model.generate("hello", max_tokens=5, temperature=0)
    assert 0 < len(done.ids) <= 5


def test_missing_unexpected_and_misshapen_tensors(tmp_path):
    weights = tiny.llama_weights()
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {k: v for k, v in weights.items() if k != name}
    with pytest.raises(ModelFileError, match=f"missing tensor '{name}'"):
        graphllm.load(tiny.write_llama(tmp_path / "missing.gguf", missing))
    misshapen = {**weights, name: weights[name][:-1]}
    message = rf"'{name}' is \(51, 60\), the model expects \(52, 60\)"
    with pytest.raises(ModelFileError, match=message):
        graphllm.load(tiny.write_llama(tmp_path / "shape.gguf", misshapen))
    extra = {**weights, "model.layers.7.input_layernorm.weight": weights["model.norm.weight"]}
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'model\.layers\.7\.input"):
        graphllm.load(tiny.write_llama(tmp_path / "extra.gguf", extra))


def test_an_unknown_key_is_an_error(tmp_path):
    path = tiny.write_llama(tmp_path / "key.gguf", tiny.llama_weights(), **{"new.thing": 2.0})
    with pytest.raises(ConfigError, match=r"does not know the key 'llama\.new\.thing'"):
        graphllm.load(path)


def test_unknown_architecture_lists_the_known(tmp_path):
    from gguf_files import write_tensors

    write_tensors(tmp_path / "test.gguf")
    with pytest.raises(
        ModelFileError, match=r"unknown architecture 'test'; .*known: .*gemma3.*, llama.*, qwen2"
    ):
        graphllm.load(tmp_path / "test.gguf")


OWN = '''
from graphllm import ops
from graphllm.models.llama import GGUF, Decoder, config

class Model(Decoder):
    """A llama with capped logits."""
    def head(self, x):
        return ops.softcap(super().head(x), cap=0.5)
'''


def test_user_model_file(tmp_path, llama):
    own = tmp_path / "capped.py"
    own.write_text(OWN)
    capped = graphllm.load(llama, model_def=own, device="reference").logits(IDS)
    plain = graphllm.load(llama, device="reference").logits(IDS)
    np.testing.assert_allclose(capped, 0.5 * np.tanh(plain / 0.5), rtol=1e-5)
    with pytest.raises(ModelFileError, match="not a Python file"):
        graphllm.load(llama, model_def=tmp_path / "none.py")


OWN_OP = """
from graphllm import ops
from graphllm.model.decoder import Decoder
from graphllm.models.llama import GGUF, config
from graphllm.ops import Cost, op, same


@op("halved_for_a_test", infer=lambda x: same(x), cost=lambda out, x, env: Cost(0, 0), tol={{}},
    samples=())
def halved(x):
    return x * {factor}


class Model(Decoder):
    def mlp(self, x):
        return ops.halved_for_a_test(super().mlp(x))
"""


def test_a_model_file_that_declares_an_op_can_be_reloaded(tmp_path, monkeypatch):
    """Even after an edit, as in a notebook. Another file cannot redeclare the op."""
    from graphllm.graph import op

    monkeypatch.setattr(op, "_REGISTRY", dict(op.registry()))
    path = tiny.write_tiny(tmp_path / "m.gguf", "llama")
    found = []
    for factor in (0.5, 0.5, 0.25):
        (tmp_path / "own.py").write_text(OWN_OP.format(factor=factor))
        llm = graphllm.load(path, model_def=tmp_path / "own.py", device="reference", context=32)
        found.append(llm.logits([3, 4, 5]))
    assert (found[0] == found[1]).all() and not np.allclose(found[1], found[2])
    (tmp_path / "other.py").write_text(OWN_OP.format(factor=1.0))
    with pytest.raises(GraphError, match=r"'halved_for_a_test' is already declared in .*own\.py"):
        graphllm.load(path, model_def=tmp_path / "other.py", device="reference", context=32)
