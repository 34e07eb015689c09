"""Mixes of formats for a size: the search against all combinations, files of a small random model,
and bad input."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import tiny_models

import graphllm
from graphllm.cli.number_lists import parse_size
from graphllm.errors import RequestError
from graphllm.graph.dtype import DTYPES
from graphllm.quality.calibration import calibrate
from graphllm.quality.mix_search import Choice, _best, _convex, check_target, search_mix
from graphllm.quantize import quantize

CONTEXT = 40
IDS = np.random.default_rng(2).integers(3, 120, 4 * CONTEXT).tolist()
OPTIONS = {"device": "cpu", "threads": 1}


def total(choices) -> tuple[int, float]:
    return sum(c.nbytes for c in choices), sum(c.kld for c in choices)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_against_all_combinations(seed):
    """The divergence exceeds the least one by less than the largest single step."""
    rng, any_type = np.random.default_rng(seed), DTYPES["f16"]
    choices = {}
    for name in "abcde":
        sizes = np.sort(rng.integers(10, 300, 4)) * (20 if name == "a" else 1)
        klds = rng.random(4) * (20 if name == "a" else 1)
        choices[name] = [Choice(any_type, int(n), float(k)) for n, k in zip(sizes, klds)]
    combinations = [total(each) for each in itertools.product(*choices.values())]
    steps = [
        small.kld - large.kld
        for name, every in choices.items() if name != "a"
        for small, large in itertools.pairwise(_convex(every))
    ]  # fmt: skip
    for budget in np.linspace(min(combinations)[0], max(combinations)[0] + 5, 9).astype(int):
        nbytes, kld = total(_best(choices, int(budget)).values())
        least = min(kld for nbytes, kld in combinations if nbytes <= budget)
        assert nbytes <= budget and least <= kld + 1e-12 <= least + max(steps, default=0) + 1e-9
    assert not _best(choices, min(combinations)[0] - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A random Llama in float32, whose rows are whole blocks of all formats."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"DIM": 256, "HEADS": 4, "KV": 2, "WIDTH": 64, "HIDDEN": 512, "LAYERS": 2}
        for name, value in sizes.items():
            patch.setattr(tiny_models, name, value)
        return tiny_models.write_tiny(tmp_path_factory.mktemp("mix") / "f32.gguf", "llama")


def test_a_mix_is_better_than_a_type_of_its_size(path, tmp_path):
    importance = calibrate(path, IDS, context=CONTEXT, options=OPTIONS)
    quantize(path, tmp_path / "q4_k_s.gguf", "q4_k_s", imatrix=importance)
    size, found = (tmp_path / "q4_k_s.gguf").stat().st_size, {}
    for name, target in (("same", size), ("more", size * 5 // 4)):
        mix = found[name] = search_mix(path, IDS, importance, target, OPTIONS)
        quantize(path, tmp_path / f"{name}.gguf", mix.kind, formats=mix.formats, imatrix=importance)
        written = (tmp_path / f"{name}.gguf").stat().st_size
        assert 0.9 * target < written == mix.file_bytes <= target
    options = {**OPTIONS, "context": CONTEXT, "linear": "float"}
    with graphllm.load(path, **options) as llm:
        llm.perplexity(IDS, context=CONTEXT, save_base=tmp_path / "base")
    klds = {}
    for name in ("q4_k_s", "same", "more"):
        with graphllm.load(tmp_path / f"{name}.gguf", **options) as llm:
            klds[name] = llm.kl_divergence(tmp_path / "base").mean_kld
    assert klds["more"] < klds["same"] < 0.9 * klds["q4_k_s"]
    for name, mix in found.items():
        assert 0.5 < klds[name] / mix.expected_kld < 2 and 0.5 < (mix.additivity or 0) < 2
        assert mix.table().count("output.weight") == 3 and len(mix.formats) == 16


def test_the_verbs(path, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out.gguf"
    text.write_text("What is the use of a book without pictures or conversations? " * 12)

    def call(verb: str, *words: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "graphllm", verb, path, *words]
        return subprocess.run([*map(str, command)], capture_output=True, timeout=120, text=True)

    words = "-f", text, "-c", "32", "--device", "cpu", "-t", "1", "--tensors", "*.1.mlp.*"
    done = call("attribute", *words, "--type", "q8_0", "--target-size", "5.6MB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n\nmix: " in done.stdout and " f32: token_embd.weight, " in done.stdout
    for verb, options, message in (
        ("attribute", (*words, "--type", "q8_0", "--target-size", "9"), "'9' must be a size in B"),
        ("attribute", (*words, "--against", path, "--target-size", "1KB"), "MB is too small"),
        ("quantize", (out, "--target-size", "1MB"), "--target-size needs --calibrate FILE"),
        ("quantize", (out, "--target-size", "1MB", "--type", "q8_0"), "--target-size, not both"),
        ("quantize", (out, "--target-size", "1KB", "--calibrate", text), "MB is too small: the"),
    ):
        done = call(verb, *options)
        assert (done.returncode, done.stdout) == (1, "") and not out.exists()
        assert done.stderr.startswith("error: ") and message in done.stderr


def test_sizes(path):
    sizes = {"1.1GB": 1_100_000_000, "900 MB": 900_000_000, "2KiB": 2048, "7b": 7, "1GiB": 1 << 30}
    assert {text: parse_size("--x", text) for text in sizes} == sizes
    for text in ("", "1", "GB", "-1GB", "1e3MB", "1TB", "0MB", "9" * 30 + "GB", "1,5GB"):
        with pytest.raises(RequestError, match="--x"):
            parse_size("--x", text)
    check_target(path, 10**9)
    with pytest.raises(RequestError, match=r"a size of 0.1 MB is too small: the smallest formats"):
        check_target(path, 100_000)
