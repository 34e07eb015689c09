"""benchmarks/gpu.py without a GPU: its parts with whole models on a stand-in that completes work as
late as allowed, and a part that fails."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lazy_device
import numpy as np
import pytest

from graphllm.backends.probe_results import ProbeResults
from graphllm.checkpoints.model_shapes import SHAPES, ModelShape
from graphllm.profiler.bench import Test

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODEL = ("small", "f16")


class Event:
    """Records the time at which the stand-in's queue reaches it."""

    def record(self, device) -> None:
        self.device = device
        device.queue.append(self.reached)

    def reached(self) -> None:
        self.ms = time.perf_counter() * 1e3

    def synchronize(self) -> None:
        self.device.finish()


class Gpu(lazy_device.LazyDevice):
    def __init__(self) -> None:
        super().__init__()
        self.gpu = SimpleNamespace(stream=self, time_runs=lambda work, rounds: [1e-6] * rounds)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The script, with small models and a temporary folder for results."""
    monkeypatch.syspath_prepend(str(FOLDER))
    lazy_device.install(monkeypatch, "cuda", Gpu)
    cupy = ModuleType("cupy.cuda")
    cupy.Event, cupy.get_elapsed_time = Event, lambda a, b: b.ms - a.ms
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy)
    shape = ModelShape("llama", 2, 64, 4, 2, 96, 384, context=256)
    monkeypatch.setitem(SHAPES, "small", shape)
    import gpu
    import gpu_goals
    import gpu_models
    import gpu_shared

    monkeypatch.setattr(
        gpu_shared, "measure_ceilings", lambda: ProbeResults(memory={"read": {1: 1e12}})
    )
    monkeypatch.setattr(gpu_shared, "memory_in_use", lambda: 123_000_000)
    for module in (gpu_models, gpu_goals):
        monkeypatch.setattr(module, "DECODE", Test(0, 12, 40))
    monkeypatch.setattr(gpu_models, "PROMPT", Test(50, 0))
    for name, value in (("SEQUENCES", (2, 3)), ("DEPTH", 20), ("STEPS", 8)):
        monkeypatch.setattr(gpu_models, name, value)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    return gpu


def run(gpu, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    return gpu.main()


@pytest.mark.parametrize(
    "part, wanted",
    [
        ("models", [r"small +f16 +tg12 @ d40 +[\d.]+ +\d+ GB/s +[\d.]+%", r"pp50 .* TFLOP/s"]),
        ("goals", [r"small +f16 +tg12 @ d40 +[\d.]+ +0 +- ", r"llama.cpp was not measured: ."]),
        ("idle", [r"small +f16( +[\d.]+){2} +-?[\d.]+%( +[\d.]+){2} +\d+ GB/s"]),
        ("batch", [r"small +f16 +2( +[\d.]+){3} +\d+ GB/s +[\d.]+%", r"small +f16 +3 "]),
        ("profile", [r"linear f16 +\d+", r"all ops +[\d.]+", r"wall +[\d.]+ 100"]),
        ("load", [r"upload of weights: .* GB/s", r"in use: 0\.12 GB \(0\.12 before\)"]),
    ],
)
def test_parts_over_models(gpu, monkeypatch, capsys, part, wanted):
    assert run(gpu, monkeypatch, part, "--only", "small:f16") == 0
    shown = capsys.readouterr().out
    for pattern in wanted:
        assert re.search(pattern, shown), shown
    (kept,) = (gpu.ROOT / "benchmarks" / "results").iterdir()
    assert kept.read_text() == shown


def test_llama_cpp_reads_the_same_weights(gpu, monkeypatch):
    import gpu_goals

    class Peer:
        def __init__(self, path: Path, threads: int, context: int, **options: object) -> None:
            assert path.stat().st_size > 64 * 384 and context >= 52 and options["gpu_layers"] == -1

        def time_once(self, test: Test, tokens: list[int]) -> int:
            assert len(tokens) == test.context
            return test.tokens * 2_000_000

    monkeypatch.setattr(gpu_goals, "find_peer", lambda: (Peer, ""))
    (_, line) = gpu_goals.goals([MODEL])
    assert line.split()[-1] == "500.0"


def test_a_linear_of_few_tokens(gpu):
    import linear_cuda

    matrix = np.ones((64, 32), np.float16)
    assert linear_cuda.linear_time(matrix, 4, 256) == pytest.approx(1 / 8)


def test_mixtures_of_experts(gpu, monkeypatch):
    import experts_cuda as own

    for name, value in {"BYTES": 1, "ROUNDS": 2, "SHAPES": {"tiny": (8, 2, 96, 64)}}.items():
        monkeypatch.setattr(own, name, value)
    layers = own.Layers("q8_0", "tiny")
    one, many = layers.moe([1, 40])
    assert re.match(r"q8_0 +1 +2\.0 +[\d.]+ +\d+ GB/s +[\d.]+% +[\d.]+$", one)
    assert re.match(r"q8_0 +40 +[5-8]\.\d ", many)
    assert any(re.match(r"expert_linear q8_0 +3 ", line) for line in layers.steps())


def test_a_part_that_fails_loses_nothing(gpu, monkeypatch, capsys):
    def broken():
        """Fails halfway."""
        yield "a figure"
        raise ValueError("two\nlines")

    monkeypatch.setitem(gpu.PARTS, "host", broken)
    assert run(gpu, monkeypatch, "host", "models", "--only", "small:f16") == 1
    shown = capsys.readouterr().out
    assert "a figure\nerror: host: ValueError: two lines\n" in shown and "tg12" in shown


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "mistral:f16"], "no shape 'mistral'; known: "),
        (["--only", "small:q9"], "no format 'q9'; known: "),
        (["speed"], "no part 'speed'; known: models, "),
    ],
)
def test_bad_arguments_are_named(gpu, monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        run(gpu, monkeypatch, *words)
    assert message in capsys.readouterr().err
