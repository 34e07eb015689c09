"""Importance matrices of small random models, against sums over the inputs of transformers'
modules; their files, and the verb `quantize --calibrate`."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import gguf
import numpy as np
import pytest
import tiny_models

from graphllm.engine import trace
from graphllm.errors import NumericError, RequestError
from graphllm.quality.calibration import calibrate
from graphllm.quantize.imatrix import InputStatistics, read_imatrix

CONTEXT, CHUNKS = 24, 3
IDS = np.random.default_rng(4).integers(3, 120, CHUNKS * CONTEXT + 5)
OPTIONS = {"device": "cpu", "threads": 1, "kv_type": "f32"}


def expected(model, names) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums and counts by stored names, from hooks on linears and on modules of stacked experts."""
    import torch

    sums, counts = defaultdict(float), defaultdict(float)

    def add(name: str, rows: torch.Tensor, expert: int = 0, experts: int = 1) -> None:
        own = np.zeros((experts, rows.shape[-1])), np.zeros(experts)
        rows = rows.double().reshape(-1, rows.shape[-1])
        own[0][expert], own[1][expert] = (rows**2).sum(0).numpy(), len(rows)
        sums[name], counts[name] = sums[name] + own[0], counts[name] + own[1]

    def on_experts(module, args, path: str) -> None:
        x, ids = args[0].reshape(-1, args[0].shape[-1]), args[1]
        for expert in range(len(module.down_proj)):
            rows = x[torch.nonzero(ids == expert)[:, 0]]
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
            for part, value in (("gate", rows), ("up", rows), ("down", module.act_fn(gate) * up)):
                add(f"{path}.{part}_proj.weight", value, expert, len(module.down_proj))

    for path, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            if isinstance(module.down_proj, torch.nn.Parameter):
                module.register_forward_pre_hook(
                    lambda m, args, path=path: on_experts(m, args, path)
                )
        elif isinstance(module, torch.nn.Linear) and path != "lm_head":
            module.register_forward_pre_hook(
                lambda m, args, path=path: add(f"{path}.weight", args[0])
            )
    chunks = IDS[: CHUNKS * CONTEXT].reshape(CHUNKS, CONTEXT).copy()
    chunks[:, 0] = 1
    with torch.no_grad():
        for chunk in chunks:
            model(torch.tensor(chunk[None]))
    return {names.get_name(name, (".weight",)): (sums[name], counts[name]) for name in sums}


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_sums_are_those_of_transformers(kind, tmp_path, monkeypatch):
    gguf_models = pytest.importorskip("gguf_models")
    monkeypatch.setattr(trace, "MAX_STEP_BYTES", 1 << 16)  # several steps a chunk
    arch, model = gguf_models.ARCHS[kind], gguf_models.model_of(kind, 0)
    path = gguf_models.write(tmp_path / "a.gguf", model, arch)
    found = calibrate(path, IDS.tolist(), context=CONTEXT, options=OPTIONS)
    stored = {t.name: t.shape[::-1] for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}
    matrices = stored.keys() - {"token_embd.weight", "output.weight"}
    assert found.entries.keys() == matrices and (found.chunks, found.context) == (CHUNKS, CONTEXT)
    number = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch.name]
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    want = expected(model, names)
    absorbed = {name for name in want if "attn_kv_b" in name}  # which no product reads here
    assert len(want) > 20 and not want.keys() - absorbed - found.entries.keys()
    for name in want.keys() - absorbed:
        sums, counts = want[name]
        np.testing.assert_array_equal(found.entries[name].counts, counts, name)
        np.testing.assert_allclose(found.entries[name].sums, sums, 1e-3, 1e-3 * sums.max(), name)
    for name in matrices:  # those of latent attention have a matrix for each head
        assert found.entries[name].sums.size == np.prod([*stored[name][:-2], stored[name][-1]])


def test_files_and_experts_without_rows(tmp_path):
    rng = np.random.default_rng(0)
    x, ids = rng.standard_normal((6, 2, 5)).astype(np.float32), rng.integers(0, 2, (6, 2))
    found = InputStatistics.empty((3, 5))
    found.add(x, ids)
    found.add(x[:0], ids[:0])
    want = np.array([(x[ids == e] ** 2).sum(0) / max(1, (ids == e).sum()) for e in range(3)])
    want[2] = 1  # no row
    np.testing.assert_allclose(found.mean(), want, rtol=1e-6)
    parts = dict(found.split(["a", "b", "c"]))
    np.testing.assert_allclose([parts[n].mean()[0] for n in "abc"], want, rtol=1e-6)
    assert not list(found.split(["a", "b"]))
    both = InputStatistics.empty((2, 5))  # all rows have both matrices
    both.add(x, None)
    np.testing.assert_allclose(both.mean(), (x**2).mean(0), rtol=1e-6)


def test_the_verb(tmp_path):
    path, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    tiny_models.write_tiny(path, "llama", context=1024)
    text.write_text("What is the use of a book without pictures or conversations? " * 60)
    out, imatrix = tmp_path / "q.gguf", tmp_path / "imatrix.gguf"

    def call(*words: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "graphllm", "quantize", path, out, *words]
        return subprocess.run([*map(str, command)], capture_output=True, timeout=120, text=True)

    given = "--type", "q8_0", "--calibrate", text, "--chunks", "1", "-t", "1", "--device", "cpu"
    done = call(*given, "--write-imatrix", imatrix)
    assert done.returncode == 0, done.stderr
    fields = gguf.GGUFReader(imatrix).fields
    assert {key: fields[key].contents() for key in fields if key[0] in "gi"} == {
        "general.type": "imatrix", "imatrix.datasets": [str(text)], "imatrix.chunk_count": 1,
        "imatrix.chunk_size": 512, "general.alignment": 32,
    }  # fmt: skip
    read = read_imatrix(imatrix)
    ids = tiny_ids(path, text.read_text())
    found = calibrate(path, ids, chunks=1, options={"device": "cpu", "threads": 1}).weights()
    assert len(read) == 7 * tiny_models.LAYERS and read.keys() == found.keys()
    assert all(np.allclose(read[name], found[name], rtol=1e-6) for name in read)
    for words, message in (
        (given, f"{out}: exists already"),
        ((*given, "--imatrix", imatrix, "--force"), "--imatrix FILE or --calibrate FILE, not both"),
        (("--chunks", "2", "--force"), "--chunks needs --calibrate FILE"),
        (("--write-imatrix", "a", "--force"), "--write-imatrix needs --calibrate FILE"),
        (("--device", "cpu", "--force"), "--device needs --calibrate FILE"),
        ((*given, "--write-imatrix", out), f"--write-imatrix {out}: is the model to write"),
        ((*given[:2], "--calibrate", "no.txt", "--force"), "no.txt: No such file"),
    ):
        done = call(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ") and message in done.stderr


def tiny_ids(path, text: str) -> list[int]:
    """Token ids of a text, with the BOS token."""
    import graphllm
    from graphllm.quality.perplexity import encode_text

    with graphllm.load(path, device="cpu", threads=1) as llm:
        return encode_text(llm, text)


def test_bad_input(tmp_path):
    path = tiny_models.write_tiny(tmp_path / "tiny.gguf", "llama")
    with pytest.raises(RequestError, match="the text has 30 tokens; chunks of 20 need at least 40"):
        calibrate(path, IDS[:30].tolist(), context=20, options=OPTIONS)
    with pytest.raises(RequestError, match="chunks = 0 must be at least 1"):
        calibrate(path, IDS.tolist(), chunks=0, options=OPTIONS)
    weights = tiny_models.llama_weights()
    weights["model.layers.1.mlp.up_proj.weight"][:] = 3e38
    tiny_models.write_llama(path, weights)
    with pytest.raises(NumericError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: its input"):
        calibrate(path, IDS.tolist(), context=20, options=OPTIONS)
