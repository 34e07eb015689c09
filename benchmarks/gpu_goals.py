"""Part of gpu.py that compares the speed of one sequence with goals, and with llama.cpp.

llama.cpp is measured if llama_cpp (llama-cpp-python) is installed and was built for GPUs:

    CMAKE_ARGS=-DGGML_CUDA=on pip install --no-binary llama-cpp-python llama-cpp-python

It reads the same weights from a temporary GGUF file, and does not sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gpu_shared as shared
from gpu_shared import Lines, Model

from graphllm import LLM
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.profiler import bench

DECODE, PROMPT = bench.Test(0, 128, 512), bench.Test(512, 0)
DEEP, LONG = bench.Test(0, 128, 4096), bench.Test(8192, 0)
GOALS: dict[Model, dict[bench.Test, int]] = {  # tok/s on an H200
    ("mistral-7b", "f16"): {DECODE: 285, DEEP: 268, PROMPT: 40_000, LONG: 32_000},
    ("mistral-7b", "q8_0"): {DECODE: 480, PROMPT: 34_000},
    ("mistral-7b", "q4_0"): {DECODE: 760, PROMPT: 34_000},
    ("mistral-7b", "q4_k_m"): {DECODE: 680, PROMPT: 34_000},
    ("gemma3-270m", "q4_k_m"): {DECODE: 3_500},
    ("llama-1b", "f16"): {DECODE: 1_350},
    ("qwen3-30b-a3b", "q4_k_m"): {DECODE: 700},
    ("gpt-oss-20b", "mxfp4"): {DECODE: 850},
}
ROUNDS = 5  # of each test, after one warm-up


def goals(only: list[Model]) -> Lines:
    """Median speed of one sequence in tok/s, the goal, prefill in FP8, and llama.cpp's."""
    peer_class, missing = find_peer()
    yield (
        f"{'shape':<14} {'format':<8} {'test':<14} {'tok/s':>9} {'goal':>8} {'of it':>7} "
        f"{'fp8':>9} {'llama.cpp':>9}"
    )
    for model in shared.select_models(only, tuple(GOALS)):
        wanted = GOALS.get(model, {DECODE: 0})
        llm = shared.load_random(model, context_of(wanted))
        rates, vocab = [rate(llm, test) for test in wanted], llm.decoder.cfg.vocab
        del llm
        prefills = [test for test in wanted if test.prompt]
        if prefills:
            llm = shared.load_random(model, context_of(wanted), prefill="fp8")
            fast = {test: rate(llm, test) for test in prefills}
            del llm
        peers = peer_rates(model, tuple(wanted), vocab, peer_class) if peer_class else []
        for i, (test, goal) in enumerate(wanted.items()):
            share = f"{rates[i] / goal:7.1%}" if goal else f"{'-':>7}"
            fp8 = f"{fast[test]:9.1f}" if test in prefills else f"{'-':>9}"
            peer = f"{peers[i]:9.1f}" if peers else f"{'-':>9}"
            name = f"{model[0]:<14} {model[1]:<8} {test.name:<14}"
            yield f"{name} {rates[i]:9.1f} {goal:8} {share} {fp8} {peer}"
    if missing:
        yield f"llama.cpp was not measured: {missing}"


def rate(llm: LLM, test: bench.Test) -> float:
    """Return the median tok/s of a test."""
    return median(bench.run(llm, test, ROUNDS, lambda done: None).rates)


def context_of(tests: Iterable[bench.Test]) -> int:
    return max(test.context for test in tests) + 64


def find_peer() -> tuple[Callable[..., Any] | None, str]:
    """Return the class that runs llama.cpp, or None and why it is not usable."""
    try:
        import llama_cpp
        from vs_llama_cpp import Peer
    except ImportError as error:
        return None, str(error)
    if not llama_cpp.llama_supports_gpu_offload():
        return None, "llama_cpp was built without a GPU backend"
    return Peer, ""


def peer_rates(
    model: Model, tests: Sequence[bench.Test], vocab: int, peer_class: Callable[..., Any]
) -> list[float]:
    """Return llama.cpp's median tok/s of each test, with all layers on the GPU."""
    from make_random_gguf import write  # needs the package gguf

    rates = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(RandomCheckpoint(*model), path)
        peer = peer_class(path, 1, context_of(tests), flash=True, gpu_layers=-1)
        for test in tests:
            tokens = bench.filler_tokens(test.context, vocab)
            took = [peer.time_once(test, tokens) for _ in range(ROUNDS + 1)][1:]
            rates.append(median(test.tokens * 1e9 / ns for ns in took))
    return rates
