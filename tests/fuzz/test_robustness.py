"""Robustness against invalid input: files, directories, numbers. Each gives one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fuzz_gguf
import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm import formats
from graphllm.errors import ConfigError, GraphllmError, ModelFileError, RequestError

COMMAND = [sys.executable, "-m", "graphllm"]
FUZZ = Path(fuzz_gguf.__file__)
MUTATIONS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("robust") / "tiny.gguf"
    return str(tiny.write_llama(path, tiny.llama_weights()))


def python(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600,
        env={**os.environ, "GRAPHLLM_DEBUG": "", **env},
    )  # fmt: skip


def fails(done: subprocess.CompletedProcess, message: str) -> None:
    """Check for exit code 1 and one line that contains ``message``."""
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and "Error:" not in done.stderr and not done.stdout


# ---------------------------------------------------------------------------------- damaged files


def test_damaged_headers_give_an_error_or_run(tmp_path):
    """In a separate process with limited memory; each case has 5 seconds."""
    done = python(str(FUZZ), str(tmp_path), str(MUTATIONS), "1")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    outcomes = json.loads(done.stdout)["outcomes"]
    assert sum(outcomes.values()) == MUTATIONS
    assert min(outcomes[kind] for kind in ("ran", "ConfigError", "ModelFileError")) > MUTATIONS / 20


NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "kind", "value", "error", "message"),
    [
        ("block_count", "U32", 2**31 - 1, ModelFileError, "missing tensor '*.2147483646.*'"),
        ("block_count", "U64", 2**40, ConfigError, "block_count = 1099511627776 is not in 1.."),
        ("block_count", "U32", 1, ModelFileError, "unexpected tensor 'model.layers.1."),
        ("attention.head_count", "U32", 0, ConfigError, "head_count = 0 is not in 1.."),
        ("attention.head_count", "U32", 5, ModelFileError, "(24, 24), the model expects (20, 24)"),
        (
            "attention.head_count_kv",
            "U32",
            2,
            ConfigError,
            "3 attention heads are not a multiple of 2 KV heads",
        ),
        ("attention.layer_norm_rms_epsilon", "F32", NAN, ConfigError, "= nan is not in [0, 1)"),
        ("attention.layer_norm_rms_epsilon", "F32", -1.0, ConfigError, "= -1.0 is not in [0, 1)"),
        ("rope.dimension_count", "U32", 7, ConfigError, "rotates 7 of 8 columns"),
        ("rope.dimension_count", "U32", 10, ConfigError, "rotates 10 of 8 columns"),
        ("rope.freq_base", "F32", 0.0, ConfigError, "freq_base = 0.0 is not in"),
        ("rope.scaling.type", "TEXT", "linear", ConfigError, "rope.scaling factor = None is no"),
        ("rope.scaling.type", "TEXT", "spiral", ConfigError, "rope_type 'spiral' is not supported"),
        ("context_length", "U32", 0, ConfigError, "context_length = 0 is not in"),
        ("embedding_length", "TEXT", "24", ConfigError, "embedding_length = '24' is not int"),
    ],
)
def test_an_impossible_configuration(tmp_path, key, kind, value, error, message):
    file = fuzz_gguf.valid("llama").with_key(f"llama.{key}", getattr(fuzz_gguf, kind), value)
    path = tmp_path / "x.gguf"
    path.write_bytes(file.header() + file.data)
    with pytest.raises(GraphllmError) as caught:
        graphllm.load(path, device="reference", context=16)
    assert isinstance(caught.value, error) and message in str(caught.value)


def test_a_vocabulary_of_another_size(tmp_path):
    file = fuzz_gguf.valid("llama")
    pieces = fuzz_gguf.PIECES["pieces"][:-1]
    file = file.with_key("tokenizer.ggml.tokens", fuzz_gguf.ARRAY, (fuzz_gguf.TEXT, pieces))
    path = tmp_path / "x.gguf"
    path.write_bytes(file.header() + file.data)
    with pytest.raises(ModelFileError, match="has 400 rows for 399 tokens"):
        graphllm.load(path, device="reference")


def test_norms_and_biases_may_be_half_floats(tmp_path):
    """The CPU backend runs them without the reference."""
    halves = {
        name: value.astype(np.float16).astype(np.float32) if value.ndim == 1 else value
        for name, value in tiny.llama_weights(bias=True).items()
    }
    want = graphllm.load(tiny.write_llama(tmp_path / "a.gguf", halves, "qwen2")).logits([1, 5])
    stored = {n: v.astype(np.float16) if v.ndim == 1 else v for n, v in halves.items()}
    path = tiny.write_llama(tmp_path / "b.gguf", stored, "qwen2")
    np.testing.assert_array_equal(graphllm.load(path, strict=True).logits([1, 5]), want)


def test_an_integer_norm(tmp_path):
    weights = tiny.llama_weights()
    weights["model.norm.weight"] = np.ones(tiny.DIM, np.int32)
    path = tiny.write_llama(tmp_path / "x.gguf", weights)
    with pytest.raises(ModelFileError, match=r"'model\.norm\.weight' is i32\[60\], not an array"):
        graphllm.load(path)


@pytest.mark.parametrize(("number", "kind"), [(16, "iq2_xxs"), (34, "tq1_0"), (40, "nvfp4")])
def test_an_unsupported_format(tmp_path, number, kind):
    file = fuzz_gguf.valid("llama").copy()
    up = next(t for t in file.tensors if t.name == "blk.1.ffn_up.weight")
    up.kind, up.dims, up.offset = number, [256, 1], len(file.data)
    file.data += bytes(256)
    path = tmp_path / "x.gguf"
    path.write_bytes(file.header() + file.data)
    done = python("-m", "graphllm", "run", str(path), "-p", "hello")
    fails(done, f"x.gguf: tensor 'blk.1.ffn_up.weight': format {kind} is not supported, only f32,")
    assert all(name in done.stderr for name in formats.gguf_formats())
    others = {*formats.WEIGHT_FORMATS} - {"f32", "f16", "bf16", *formats.gguf_formats()}
    assert "w8a8" in others and not any(name in done.stderr for name in others)


# ------------------------------------------------------------------------------- files and folders


def test_files_that_are_not_models(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "mine.py").write_text("Model = 1")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (
        ("nothing.gguf", "nothing.gguf: no such file"),
        ("folder", "folder: is a directory without a config.json"),
        ("empty.gguf", "empty.gguf: cannot be opened: cannot mmap an empty file"),
        ("text.gguf", "text.gguf: header: not a GGUF file"),
        ("pipe.gguf", "pipe.gguf: not a regular file"),
        (
            "mine.py",
            "mine.py: is Python; pass a file that defines a model as model_def (--model-def)",
        ),
    ):
        path = str(tmp_path / name)
        fails(python("-m", "graphllm", "run", path, "-p", "x"), message)
        with pytest.raises(ModelFileError):
            graphllm.load(path)


def test_an_unreadable_file(tmp_path, model):
    path = tmp_path / "secret.gguf"
    path.write_bytes(Path(model).read_bytes())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ModelFileError, match="cannot be opened: Permission denied"):
        graphllm.load(path)


ONE_OP = """
    import resource
    import numpy as np
    from graphllm import ops
    from graphllm.runtime.executor import Executor
    from graphllm.graph.tensor import feed
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # like a full disk, at the first page
    ex = Executor(backends=["cpu"])
    plan = ex.compile({"y": ops.silu(feed("x", (4,), "f32"))})
    print(float(ex.run(plan, {"x": np.ones(4, np.float32)})["y"][0]))
    """


@pytest.mark.parametrize("cache", ["/proc/nonexistent", "FULL", "FILE"])
def test_an_unwritable_cache_prints_a_line(tmp_path, cache):
    (tmp_path / "file").touch()
    cache = {"FULL": str(tmp_path / "cache"), "FILE": str(tmp_path / "file")}.get(cache, cache)
    done = python("-c", textwrap.dedent(ONE_OP), GRAPHLLM_CACHE=cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.7310585975646973\n"
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("graphllm: cache not used: ")


@pytest.mark.realmodel
def test_an_unwritable_demo(tmp_path):
    (tmp_path / "file").touch()
    for cache in ("/proc/nonexistent", str(tmp_path / "file")):
        done = python("-m", "graphllm", "run", "demo", "-p", "x", GRAPHLLM_CACHE=cache)
        fails(done, "the demo model could not be written")


# ---------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-c", "-1"], "context = -1 must be at least 1"),
        (["-c", "2"], "the prompt has 3 tokens, the context holds 2"),
        (["-t", "-1"], "threads = -1 must be at least 0"),
        (["-n", "-1"], "max_tokens = -1 must be at least 0"),
        (["-s", str(2**63)], "must be in 0..2^63-1"),
        (["--min-tokens", str(2**31)], "must be in 0..2^31-1"),
        (["--temp", "nan"], "temperature = nan must be a finite number"),
        (["--stop-id", "400"], "token id 400 is not in 0..399"),
        (["--stop-id", "-1"], "must be token ids"),
    ],
)
def test_numbers_out_of_range(model, words, message):
    done = python("-m", "graphllm", "run", model, "-p", "hello", "--device", "reference", *words)
    fails(done, message)


def test_non_numbers_are_usage_errors(model):
    for words in (["-c", "many"], ["-t", "1.5"], ["--temp", ""], ["--no-such-option"]):
        done = python("-m", "graphllm", "run", model, "-p", "hello", *words)
        assert done.returncode == 2 and done.stderr.startswith("error: ")
        assert done.stderr.endswith(" (graphllm run --help)\n") and done.stderr.count("\n") == 1


def test_ids_out_of_range(model):
    llm = graphllm.load(model, device="reference", context=8)
    for ids in ([1, 400], [-1], [2**31], [2**70]):
        with pytest.raises(RequestError, match=r"token id -?\d+ is not in 0\.\.399"):
            llm.logits(ids)
    with pytest.raises(RequestError, match="9 tokens do not fit a context of 8"):
        llm.logits([1] * 9)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.logits([])
    assert llm.logits([1] * 8).shape == (8, 400)  # the errors left no trace


def test_a_context_too_large_for_memory(tmp_path):
    file = fuzz_gguf.valid("llama").with_key("llama.context_length", fuzz_gguf.U32, 2**31 - 1)
    path = tmp_path / "x.gguf"
    path.write_bytes(file.header() + file.data)
    code = f"""
        import resource, graphllm
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            graphllm.load({str(path)!r}, device="reference", context=2**28)
        except graphllm.RequestError as error:
            print(error)
        """
    done = python("-c", textwrap.dedent(code))
    assert "no memory for full." in done.stdout
    assert ": 8.59 GB are needed in host, " in done.stdout
    assert " GB are free; a smaller context needs less" in done.stdout
