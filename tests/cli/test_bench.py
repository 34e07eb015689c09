"""`graphllm bench`: lists, measured steps, output formats; random weights of known shapes."""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from pseudo_terminal import without_progress

import graphllm
from graphllm.checkpoints.model_shapes import SHAPES, TYPES, ModelShape
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.cli.bench import BenchGrid, as_csv, as_json, as_table, parse_numbers
from graphllm.errors import ModelFileError, RequestError
from graphllm.loading.load import build_decoder
from graphllm.model.decoder import Batch, Limits
from graphllm.profiler import bench
from graphllm.profiler.bench import Result, Test

COMMAND = [sys.executable, "-m", "graphllm"]
# Keys of llama-bench that the output has, too.
PEER_KEYS = {
    "cpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params",
    "n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "type_k", "type_v", "n_prompt", "n_gen",
    "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns",
    "samples_ts",
}  # fmt: skip
OWN_KEYS = {
    "version", "gb_s", "ceiling_gb_s", "share", "predicted_ts", "tok_s", "median_ns", "spread",
    "passes", "others", "busy",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    return str(tiny.write_llama(path, tiny.llama_weights()))


def call(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, "bench", *words], capture_output=True, text=True, timeout=120, check=False
    )


def errors_of(done: subprocess.CompletedProcess) -> str:
    """Return standard error without notes that depend on the load of the machine."""
    lines = without_progress(done.stderr).splitlines(keepends=True)
    return "".join(line for line in lines if "the machine was busy: " not in line)


# ------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    "text, values",
    [
        ("512", [512]),
        ("1,2, 4", [1, 2, 4]),
        ("1-4", [1, 2, 3, 4]),
        ("128-512+128", [128, 256, 384, 512]),
        ("10-31+10", [10, 20, 30]),
        ("1-64*4,0", [1, 4, 16, 64, 0]),
    ],
)
def test_lists(text, values):
    assert parse_numbers("-p", text) == values


@pytest.mark.parametrize("text", ["", "a", "-3", "1,", "4-1", "0-8*2", "1-8*1", "1-8+0", "1-9999"])
def test_invalid_lists_name_the_flag(text):
    with pytest.raises(RequestError, match="-p "):
        parse_numbers("-p", text)


def test_all_combinations():
    grid = BenchGrid(prompts="8,0", gens="4,2", depths="0,16", threads="1,2", kv_types="f16,f32")
    assert [t.name for t in grid.tests()] == [
        "pp8", "tg4", "tg2", "pp8 @ d16", "tg4 @ d16", "tg2 @ d16"
    ]  # fmt: skip
    assert grid.setups() == [("f16", 1), ("f16", 2), ("f32", 1), ("f32", 2)]
    assert BenchGrid().setups() == [(None, 0)]
    with pytest.raises(RequestError, match="nothing to measure"):
        BenchGrid(prompts="0", gens="0").tests()
    with pytest.raises(RequestError, match="-r 0"):
        BenchGrid(repeat=0).tests()


# ------------------------------------------------------------------------------------------ timing


class StepLog:
    """Records the steps that `bench` runs on an engine."""

    def __init__(self, engine) -> None:
        self.engine, self.steps = engine, []
        self.run, self.decode_loop = engine.executor.run, engine.executor.decode_loop
        engine.executor.run, engine.executor.decode_loop = self._run, self._decode_loop

    def _run(self, plan, feeds=None, env=None, *rest):
        tokens = len(feeds["ids"]) if feeds and "ids" in feeds else 1
        self.steps.append((tokens, (env or {}).get("kv_sum")))
        return self.run(plan, feeds, env, *rest)

    def _decode_loop(self, *call, **more):
        steps = self.decode_loop(*call, **more)

        def recording_launch():
            self.steps.append((1, call[-1]()["kv_sum"]))
            launch()

        launch, steps.launch = steps.launch, recording_launch
        return steps


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_only_the_test_is_computed(model, device):
    """The cache is filled to the depth once; then each run computes only its own tokens."""
    llm = graphllm.load(model, device=device)
    log = StepLog(llm.engine)
    result = bench.run(llm, Test(8, 0, 16), 2, lambda done: None)
    assert len(result.samples_ns) == 2 and min(result.samples_ns) > 0
    each = (8, 16 * 8 + 8 * 9 // 2)
    assert log.steps == [(16, 16 * 17 // 2), each, each, each]
    log.steps.clear()
    reported = []
    bench.run(llm, Test(0, 3, 16), 1, reported.append)
    assert reported == [0, 1, 2]
    each = [(1, 16), (1, 17), (1, 18), (1, 19)]  # the last of the 16 samples the first token
    assert log.steps == each * 2
    log.steps.clear()
    bench.run(llm, Test(8, 0), 1, lambda done: None)
    assert log.steps == [(8, 36), (8, 36)]
    log.steps.clear()
    bench.run(llm, Test(12, 0), 1, lambda done: None)  # begins with the prompts of the test before
    assert log.steps == [(12, 78), (12, 78)]


def test_a_test_must_fit_the_context(model):
    llm = graphllm.load(model)
    with pytest.raises(RequestError, match=r"pp100 @ d100 needs a context of 200 tokens, not 128"):
        bench.run(llm, Test(100, 0, 100), 1, lambda done: None)


def test_bytes_of_a_step(model):
    llm = graphllm.load(model, kv_type="f32")
    plan = llm.engine.decode_plan()
    entry = 2 * tiny.LAYERS * tiny.KV * tiny.WIDTH * 4  # keys and values of one token
    assert bench.step_bytes(plan, 101) - bench.step_bytes(plan, 1) == 100 * entry
    weights = tiny.llama_weights()
    read = sum(w.nbytes for w in weights.values())
    read -= weights["model.embed_tokens.weight"].nbytes  # only one row is read
    assert read < bench.step_bytes(plan, 1) < 1.02 * read


def test_statistics():
    result = Result(Test(0, 10, 4), (1_000_000_000, 2_000_000_000), 3e9, "2024-01-01T00:00:00Z")
    found = result.as_dict()
    assert found["samples_ts"] == [10.0, 5.0] and found["avg_ts"] == 7.5
    assert found["stddev_ts"] == pytest.approx(statistics.stdev([10, 5]))
    assert (found["avg_ns"], found["gb_s"]) == (1_500_000_000, 20.0)
    assert (found["median_ns"], found["tok_s"]) == (1_500_000_000, 10 / 1.5)
    assert (found["n_prompt"], found["n_gen"], found["n_depth"]) == (0, 10, 4)
    assert replace(result, samples_ns=(5,)).as_dict()["stddev_ns"] == 0
    assert replace(result, nbytes=0.0).as_dict()["gb_s"] is None


# ------------------------------------------------------------------------------------------ output


@pytest.fixture(scope="module")
def rows(model):
    done = call(
        model, "-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "-t", "1", "--no-ceiling",
        "--kv-type", "f16,f32", "-o", "json",
    )  # fmt: skip
    assert (done.returncode, errors_of(done)) == (0, "")
    return json.loads(done.stdout)


def test_json_has_the_keys_of_llama_bench(rows):
    assert all(set(row) == PEER_KEYS | OWN_KEYS for row in rows)
    assert [(r["type_k"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [
        (kv, *test)
        for kv in ("f16", "f32")
        for test in ((8, 0, 0), (0, 4, 0), (8, 0, 16), (0, 4, 16))
    ]
    for row in rows:
        assert len(row["samples_ns"]) == 2 and row["n_threads"] == 1
        assert row["avg_ts"] == pytest.approx(statistics.mean(row["samples_ts"]))
        assert (row["gb_s"] is None) == bool(row["n_prompt"])
        assert row["model_type"] == "llama 0M F32" and row["backends"] == "cpu"
        assert row["share"] is row["ceiling_gb_s"] is None


def test_csv_and_json_of_rows(rows):
    assert json.loads("".join(as_json(rows))) == rows
    lines = list(csv.reader(as_csv(rows)))
    assert lines[0] == [key for key in rows[0] if not key.startswith("samples")]
    assert len(lines) == len(rows) + 1 and {len(line) for line in lines} == {len(lines[0])}
    assert lines[1][lines[0].index("n_prompt")] == "8"


def test_table_of_rows(rows):
    rate = {"tok_s": 123.456, "spread": 0.0123}
    full = [{**rows[1], **rate, "gb_s": 20.04, "share": 0.8349, "predicted_ts": 130.06}]
    plain, with_kv = list(as_table(full, False)), list(as_table(full, True))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]
    assert cells[0] == [
        "model", "size", "params", "backend", "threads", "test", "t/s", "predicted", "GB/s",
        "ceiling",
    ]  # fmt: skip
    assert cells[2][5] == "tg4" and cells[2][6:] == ["123.46 ± 1.2%", "130.1", "20.0", "83%"]
    assert len({len(line) for line in plain}) == 1
    assert with_kv[0].count("|") == plain[0].count("|") + 1 and "| f16 " in with_kv[2]
    assert list(as_table([], False)) == []


def test_command_line(model):
    done = call(model, "-p", "8", "-n", "0", "-r", "1", "--device", "reference")
    assert done.returncode == 0 and errors_of(done) == ""  # the reference backend has no ceiling
    assert done.stdout.count("\n") == 3 and "pp8" in done.stdout
    many = call(model, "-p", "0", "-n", "2", "-r", "1", "-t", "99", "--no-ceiling", "-o", "csv")
    assert many.returncode == 0
    assert errors_of(many).count("\n") == 1 and "threads = 99: using " in many.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give a MODEL, or --random SHAPE"),
        (("demo", "--random", "llama-7b"), "give a MODEL, or --random SHAPE"),
        (("--random", "llama"), "unknown shape 'llama'; known: llama-7b, "),
        (("--random", "llama-1b", "--type", "q9"), "unknown type 'q9'; known: q4_k_m, q4_0, "),
        (("demo", "-o", "xml"), "-o xml must be md, json or csv"),
        (("demo", "-p", "x"), "-p 'x' must be comma-separated integers"),
        (("no.gguf",), "no.gguf: no such file"),
    ],
)
def test_invalid_input_is_one_line(words, message):
    done = call(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------- random weights

SMALL = {
    "llama": ModelShape("llama", 8, 256, 4, 2, 512, 384, context=64),
    "qwen2": ModelShape("qwen2", 8, 256, 4, 2, 512, 384, tied=True, bias=True, context=64),
    "gemma3": ModelShape("gemma3", 8, 256, 4, 1, 512, 384, 128, tied=True, context=64, window=16),
    "mixtral": ModelShape(
        "llama", 8, 256, 4, 2, 512, 384, context=64, experts=8, experts_per_token=2
    ),
    "qwen3moe": ModelShape(
        "qwen3moe", 8, 256, 4, 2, 256, 384, 128, context=64, experts=5, experts_per_token=3
    ),
    "gpt-oss": ModelShape("gpt-oss", 8, 256, 4, 2, 256, 384, 64, bias=True, context=64, window=16,
                     experts=4, experts_per_token=1),
}  # fmt: skip
IDS = [1, 300, 7, 42, 0]
# Published number of parameters in billions.
PUBLISHED = {
    "llama-7b": 6.738, "llama-13b": 13.016, "llama-1b": 1.236, "llama-3b": 3.213, "llama-8b": 8.030,
    "tinyllama-1.1b": 1.100, "mistral-7b": 7.242, "qwen2-0.5b": 0.494, "qwen2-1.5b": 1.544,
    "qwen2-7b": 7.616, "gemma3-270m": 0.268, "gemma3-1b": 1.000, "gemma3-4b": 3.880,
    "mixtral-8x7b": 46.703, "qwen3-30b-a3b": 30.532, "gpt-oss-20b": 20.915,
}  # fmt: skip


def test_shapes_have_the_published_number_of_parameters():
    assert set(PUBLISHED) == set(SHAPES)
    for name, billions in PUBLISHED.items():
        found = bench.parameters(build_decoder(RandomCheckpoint(name, "q4_k_m")).weights) / 1e9
        assert found == pytest.approx(billions, abs=6e-4), name


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_builds(name):
    """The model family knows every key and every tensor."""
    decoder = build_decoder(RandomCheckpoint(name, "q4_k_m"))
    assert decoder.build(Batch(decoder.caches, Limits()))["logits"].shape[1] == SHAPES[name].vocab


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", SMALL)
def test_every_family_and_type_loads(family, kind):
    llm = graphllm.load(RandomCheckpoint(SMALL[family], kind), device="reference")
    logits = llm.logits(IDS)
    assert np.isfinite(logits).all() and 0.01 < logits.std() < 100


def test_q4_k_m_and_its_fallback_formats():
    tensors = RandomCheckpoint(SMALL["llama"], "q4_k_m").tensors
    names = {name: str(t.dtype) for name, t in tensors.items()}
    assert names["output.weight"] == names["token_embd.weight"] == "q6_k"
    assert names["blk.0.attn_v.weight"] == names["blk.7.ffn_down.weight"] == "q6_k"
    assert names["blk.1.attn_v.weight"] == names["blk.0.attn_q.weight"] == "q4_k"
    assert names["blk.0.attn_norm.weight"] == "f32"
    tensors = RandomCheckpoint(SMALL["mixtral"], "q4_k_m").tensors
    names = {name.removesuffix(".weight"): str(t.dtype) for name, t in tensors.items()}
    assert names["blk.0.ffn_down_exps"] == "q6_k" and names["blk.1.ffn_up_exps"] == "q4_k"
    assert names["blk.1.attn_k"] == "q8_0" and names["blk.1.attn_output"] == "q5_k"
    tensors = RandomCheckpoint(SMALL["gpt-oss"], "mxfp4").tensors
    names = {name.removesuffix(".weight"): str(t.dtype) for name, t in tensors.items()}
    assert names["blk.1.ffn_up_exps"] == "mxfp4" and names["blk.1.attn_q"] == "q8_0"
    assert names["blk.1.ffn_gate_inp"] == "f32"
    narrow = RandomCheckpoint("qwen2-0.5b", "q4_k_m").tensors  # 896 is not a multiple of 256
    assert str(narrow["blk.0.attn_q.weight"].dtype) == "q5_0"
    assert str(narrow["token_embd.weight"].dtype) == "q8_0"
    assert str(narrow["blk.3.ffn_down.weight"].dtype) == "q4_k"


def test_a_random_file_runs_without_a_tokenizer():
    file = RandomCheckpoint(SMALL["qwen2"], "q4_0")
    assert not file.raw("token_embd.weight").flags.writeable
    llm = graphllm.load(file)
    assert llm.device == "cpu"
    result = bench.run(llm, Test(0, 4), 1, lambda done: None)
    assert bench.describe(llm, 1)["model_type"] == "qwen2 5M Q4_0" and result.nbytes > 0
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.model"):
        llm.generate("hello")


def test_a_written_file_is_the_same_model(tmp_path):
    source = Path(__file__).parents[2] / "benchmarks" / "make_random_gguf.py"
    spec = importlib.util.spec_from_file_location("make_random_gguf", source)
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    for family, kind in (("gemma3", "q4_k_m"), ("llama", "f16"), ("qwen2", "q4_0")):
        path, file = tmp_path / "random.gguf", RandomCheckpoint(SMALL[family], kind)
        maker.write(file, path)
        stored, direct = graphllm.load(path, device="reference"), graphllm.load(file)
        types = [bench.model_type(each.file, each.decoder.weights) for each in (stored, direct)]
        assert types[0] == types[1]
        expected = stored.logits(IDS)
        error = np.square(direct.logits(IDS) - expected).mean() / np.square(expected).mean()
        assert error < 2e-3
