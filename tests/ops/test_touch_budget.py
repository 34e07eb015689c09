"""What a new op, model, block format or backend touches. Runs the examples of CONTRIBUTING.md."""

from __future__ import annotations

import configparser
import importlib
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from doc_examples import DOCS, example
from op_runs import check_costs, check_sample_sizes, run_all

import graphllm
from graphllm import backends, ops
from graphllm.backends import reference
from graphllm.backends.cpu import formats as cpu_formats
from graphllm.checkpoints.quantize_on_load import QuantizedWeights
from graphllm.formats import A8_32, BLOCK_FORMATS, WEIGHT_FORMATS
from graphllm.formats.activations import dequantise_act, quantise_act
from graphllm.formats.quantization import Blocks, quantise
from graphllm.graph import op
from graphllm.graph.dtype import DTYPES, dtype
from graphllm.graph.tensor import Var, feed, scope, weight
from graphllm.profiler.record import Recorder
from graphllm.runtime.executor import Executor
from graphllm.weights import Arrays

IDS = [1, 5, 300, 17, 9, 9, 250]


@pytest.fixture
def registry(monkeypatch):
    """Remove ops declared in a test after it."""
    monkeypatch.setattr(op, "_REGISTRY", dict(ops.registry()))
    reference._kernel.cache_clear()
    yield
    reference._kernel.cache_clear()


def test_an_op_is_one_declaration(registry, tmp_path):
    (tmp_path / "softsign.py").write_text(example("Add an op"))
    runpy.run_path(str(tmp_path / "softsign.py"))
    # it builds, runs and is profiled
    data = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    with scope("mine"):
        y = ops.softsign(feed("x", (Var("T", 1, 8), 4), "f32"))
    executor, seen = Executor(backends=("reference",)), Recorder()
    plan = executor.compile({"y": y})
    np.testing.assert_array_equal(
        executor.run(plan, {"x": data}, profile=seen)["y"], data / (1 + np.abs(data))
    )
    (row,) = seen.rows
    assert (row.op, row.backend, row.scope) == ("softsign", "reference", "mine")
    assert (row.flops, row.bytes) == (3 * 12, 2 * 4 * 12)
    assert "softsign" in plan.explain()
    # it is in the generated tests and the table
    assert not run_all("softsign", ("reference",), graphllm.backends.Options())
    check_sample_sizes("softsign")
    check_costs("softsign")
    page = runpy.run_path(str(DOCS / "make_ops_table.py"))["page"]()
    assert "\n| `softsign` " in page and "\n- `softsign`: x / (1 + |x|). " in page
    # it falls back from a backend without a kernel, with the reason
    (choice,) = (s.choice for s in Executor().compile({"y": y}).steps)
    assert choice.backend.name == "reference" and "no kernel for softsign" in choice.why


def test_a_misuse_of_a_new_op_is_named(registry):
    exec(example("Add an op"), {})
    with pytest.raises(graphllm.GraphError, match=r"softsign\(i32\[3\]\): x is i32, not f32"):
        ops.softsign(feed("x", (3,), "i32"))


def _logits(path: Path, **options) -> np.ndarray:
    return graphllm.load(path, device="reference", context=32, **options).logits(IDS)


def test_a_model_is_one_file(tmp_path):
    """Parallel blocks equal sequential ones if attention or MLP returns zeros."""
    (tmp_path / "parallel.py").write_text(example("Add a model"))
    own = {"model_def": tmp_path / "parallel.py"}
    weights = tiny.llama_weights(bias=True)
    for silent in ("mlp.down_proj", "self_attn.o_proj"):
        both = {k: 0 * v if silent in k else v for k, v in weights.items()}
        for name in [n for n in both if "post_attention_layernorm" in n]:
            both[name] = both[name.replace("post_attention", "input")]
        one = {k: v for k, v in both.items() if "post_attention_layernorm" not in k}
        have = _logits(tiny.write_llama(tmp_path / "one.gguf", one, "parallel"), **own)
        want = _logits(tiny.write_llama(tmp_path / "two.gguf", both, "qwen2"))
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        with pytest.raises(graphllm.ModelFileError, match=r"unexpected tensor .*post_attention"):
            _logits(tiny.write_llama(tmp_path / "more.gguf", both, "parallel"), **own)


@pytest.fixture
def example_format(monkeypatch, tmp_path):
    """The block format of CONTRIBUTING.md, which is forgotten after the test."""
    tables: tuple[dict, ...] = (
        BLOCK_FORMATS, WEIGHT_FORMATS, DTYPES, cpu_formats.FORMATS, cpu_formats.BLOCK_FORMATS,
    )  # fmt: skip
    before = [dict(table) for table in tables]
    (tmp_path / "example_format.py").write_text(example("Add a block format"))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("example_format").E2_0
    del sys.modules["example_format"]
    for table, known in zip(tables, before):
        table.clear()
        table.update(known)


def test_a_block_format_is_a_declaration_and_a_snippet(example_format):
    """Embedding rows, linear of one token and of several, and quantisation on load."""
    form, rng = example_format, np.random.default_rng(0)
    rows, k, ids = 21, 320, np.array([20, 0, 7, 7], np.int32)
    floats = rng.standard_normal((rows, k)).astype(np.float32)
    x = rng.standard_normal((4, k)).astype(np.float32)
    loaded = QuantizedWeights(Arrays({"w": floats}), form.name)
    stored = Blocks(loaded.raw("w"), form, k)
    w = stored.dequantise()
    assert loaded.notes() == [f"matrices are converted on reference: no encoder for {form}"]
    assert (stored.raw == quantise(floats, form)).all()
    assert np.corrcoef(w.ravel(), floats.ravel())[0, 1] > 0.8
    tokens, leaf = Var("T", 1, 4), weight("w", (rows, k), form)
    exact = dequantise_act(quantise_act(x, A8_32), A8_32, k)
    inputs = feed("ids", (tokens,), "i32"), feed("x", (tokens, k), "f32")
    nodes = {"rows": ops.embedding(inputs[0], leaf), "y": ops.linear(inputs[1], leaf)}
    for backend, linear, values in (
        ("reference", "auto", x), ("cpu", "float", x), ("cpu", "integer", exact),
    ):  # fmt: skip
        executor = Executor(loaded, (backend,), backends.Options(linear))
        plan = executor.compile(nodes)
        executor.bind(plan)
        for count in (1, 4):
            feeds = {"ids": ids[:count], "x": x[:count]}
            found = executor.run(plan, feeds, {"T": count})
            assert (found["rows"] == w[ids[:count]]).all()
            np.testing.assert_allclose(found["y"], values[:count] @ w.T, rtol=1e-4, atol=1e-4)
    made = runpy.run_path(str(DOCS / "make_ops_table.py"))
    cells = {b: made["cell"](backends.find(b), ops.get("linear"), form) for b in ("cpu", "cuda")}
    assert cells == {"cpu": "int8", "cuda": "-"}


# Files that choose a format for a purpose of their own. A new format need not be named there.
CHOICES = {
    "graphllm/backends/cpu/kernels/kv_cache.py": "KV cache",
    "graphllm/backends/cpu/kernels/pool_elements.py": "KV cache",
    "graphllm/backends/cpu/runtime/probe_kernels.py": "a comment on the smallest integers",
    "graphllm/backends/cuda/kernels/attention_generic.cu": "KV cache",
    "graphllm/backends/cuda/kernels/attention_pool_floats.cuh": "KV cache",
    "graphllm/backends/cuda/kernels/attention_pools.cuh": "KV cache",
    "graphllm/backends/cuda/kernels/attention_split_kv.cu": "KV cache",
    "graphllm/backends/cuda/kernels/experts.py": "launch shapes tuned for some formats",
    "graphllm/backends/cuda/kernels/gemv_shapes.py": "launch shapes tuned for some formats",
    "graphllm/backends/cuda/kernels/kv_cache.cuh": "KV cache",
    "graphllm/backends/cuda/kernels/small_batch_blocks.py": "launch shapes tuned for some formats",
    "graphllm/checkpoints/hf_directory.py": "quant_method of Hugging Face",
    "graphllm/checkpoints/model_shapes.py": "mixes of formats",
    "graphllm/checkpoints/published/blocks.py": "formats of published integers",
    "graphllm/cli/attribute.py": "help text",
    "graphllm/cli/bench.py": "help text",
    "graphllm/cli/options.py": "help text",
    "graphllm/cli/plan.py": "help text",
    "graphllm/cli/profile.py": "help text",
    "graphllm/graph/dtype.py": "KV cache",
    "graphllm/loading/load.py": "docstring",
    "graphllm/loading/loaded_model.py": "docstring",
    "graphllm/ops/attention.py": "KV cache",
    "graphllm/ops/experts.py": "samples",
    "graphllm/ops/fused/experts.py": "samples",
    "graphllm/ops/fused/linear.py": "samples",
    "graphllm/ops/fused/linear_norm.py": "samples",
    "graphllm/ops/kv_cache.py": "KV cache",
    "graphllm/ops/linear.py": "samples",
    "graphllm/ops/quantise.py": "samples",
    "graphllm/profiler/bench.py": "docstring",
    "graphllm/cli/quantize.py": "help text",
    "graphllm/quantize/mixes.py": "mixes of formats",
    "graphllm/profiler/kernel_probes.py": "formats to probe",
    "graphllm/weights/mxfp4_tensors.py": "tensors of gpt-oss",
    "models/gpt_oss.py": "tensors of gpt-oss",
}


def test_a_block_format_is_named_in_at_most_four_files():
    """Outside tests, documentation and golden data, and but for `CHOICES`."""
    root, chosen = DOCS.parent, set()
    paths = [p for folder in ("graphllm", "models") for p in (root / folder).rglob("*.*")]
    texts = {
        str(path.relative_to(root)): path.read_text("utf-8")
        for path in paths
        if path.suffix in (".py", ".cu", ".cuh")
    }
    for name in BLOCK_FORMATS:
        spellings = rf"(?<![a-z0-9_])({name}|{name.replace('_', '')})(?![a-z0-9])"
        named = {p for p, text in texts.items() if re.search(spellings, text, re.IGNORECASE)}
        chosen |= named & CHOICES.keys()
        assert 3 <= len(named - CHOICES.keys()) <= 4, (name, sorted(named - CHOICES.keys()))
    assert chosen == CHOICES.keys()  # none is out of date


def install(folder: Path, name: str, source: str, entry: str) -> None:
    """Install a package with one entry point as pip does: the package and its dist-info."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[graphllm.backends]\n{entry}\n")


def python(folder: Path, *words: str) -> str:
    """Run Python with ``folder`` on its path, and return its standard output."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path}, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_backend_is_one_directory(tmp_path):
    config = configparser.ConfigParser()
    config.read_string(example("Add a backend", "ini"))
    entry = config["options.entry_points"]["graphllm.backends"].strip()
    install(tmp_path, "abacus", example("Add a backend"), entry)
    path = tiny.write_llama(tmp_path / "tiny.gguf", tiny.llama_weights())
    code = f"""
        import numpy as np, graphllm
        from graphllm import backends
        from graphllm.backends.order import ORDER
        assert backends.names() == ["abacus", *ORDER], backends.names()
        llm = graphllm.load({str(path)!r}, device="abacus", kv_type="f32")
        assert llm.placement()["abacus"] == {{"silu": {tiny.LAYERS}}}, llm.placement()
        assert any("abacus has no kernel for linear" in line for line in llm.misses())
        want = graphllm.load({str(path)!r}, device="reference").logits({IDS})
        np.testing.assert_allclose(llm.logits({IDS}), want, rtol=1e-5, atol=1e-5)
        rows = llm.profile("hello", decode=2)["decode"].rows
        assert all(r.ns > 0 for r in rows if r.backend == "abacus")
        print(sum(r.backend == "abacus" for r in rows))
        """
    assert int(python(tmp_path, "-c", textwrap.dedent(code))) == tiny.LAYERS
    doctor = python(tmp_path, "-m", "graphllm", "doctor").splitlines()
    assert doctor[1] == "abacus     usable: NumPy, one op"


def test_a_broken_backend_is_skipped(tmp_path):
    install(tmp_path, "broken", "import no_such_module", "broken = broken:BACKEND")
    doctor = python(tmp_path, "-m", "graphllm", "doctor")
    assert "broken     not usable: ModuleNotFoundError: No module named 'no_such_module'" in doctor
    code = "import graphllm; print(graphllm.Executor().skipped)"
    assert "no_such_module" in python(tmp_path, "-c", code)


def test_the_table_of_ops_is_current():
    made = runpy.run_path(str(DOCS / "make_ops_table.py"))["page"]()
    assert (DOCS / "ops.md").read_text("utf-8") == made, "run python docs/make_ops_table.py"


def test_the_table_asks_what_a_backend_does_with_each_format(monkeypatch):
    """Removing a kernel changes only the cells of its op and formats."""
    made = runpy.run_path(str(DOCS / "make_ops_table.py"))
    cpu, form = backends.find("cpu"), dtype("q4_0")
    cells = {n: made["cell"](cpu, ops.get(n), form) for n in ("embedding", "linear", "linears")}
    assert cells == {"embedding": "yes", "linear": "int8", "linears": "int8"}
    assert made["cell"](cpu, ops.get("linear"), dtype("f16")) == "f32"
    assert made["cell"](backends.find("cuda"), ops.get("linear"), form) == "int8 / f16"
    assert made["cell"](backends.find("reference"), ops.get("linears"), form) == "parts"
    floating = [k for k in cpu.kernels["linear"] if k.name == "linear_float"]
    monkeypatch.setitem(cpu.kernels, "linear", floating)
    assert made["cell"](cpu, ops.get("linear"), form) == "f32"
    monkeypatch.setitem(cpu.kernels, "linear", [])
    monkeypatch.setitem(cpu.kernels, "embedding", [])
    assert made["cell"](cpu, ops.get("linear"), form) == "-"
    assert made["cell"](cpu, ops.get("embedding"), form) == "-"
