"""KL divergence between two small random models against NumPy in float64, and base files that are
damaged or belong to another model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.errors import GraphllmError, ModelFileError, RequestError
from graphllm.quality import base_file
from graphllm.quality.base_file import BaseFileWriter

CONTEXT, CHUNKS = 24, 14


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A model, the same with noise on its weights, and the base file of the first one."""
    folder = tmp_path_factory.mktemp("divergence")
    weights = tiny.llama_weights()
    noise = np.random.default_rng(1)
    other = {k: v + 0.02 * noise.standard_normal(v.shape, np.float32) for k, v in weights.items()}
    found = folder / "base.gguf", folder / "other.gguf", folder / "base.logprobs"
    tiny.write_llama(found[0], weights)
    tiny.write_llama(found[1], other)
    with load(found[0]) as llm:
        llm.perplexity(ids(), CONTEXT, save_base=found[2])
    return found


def load(path: Path, **options):
    return graphllm.load(path, device="cpu", threads=2, context=64, max_sequences=4, **options)


def ids() -> list[int]:
    rng = np.random.default_rng(7)
    return rng.integers(3, len(tiny.VOCAB["pieces"]), CONTEXT * CHUNKS).tolist()


def log_probabilities(llm) -> np.ndarray:
    """Of all tokens before each predicted one, float64 [chunks, n, vocab]."""
    found = []
    for at in range(0, CONTEXT * CHUNKS, CONTEXT):
        rows = llm.logits([1, *ids()[at + 1 : at + CONTEXT]])[CONTEXT // 2 : -1].astype(np.float64)
        found.append(rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)))
    return np.array(found)


def test_statistics_equal_numpy(paths):
    """Each by its formula, from logits in float64."""
    first, second, base = paths
    with load(first) as llm:
        p = log_probabilities(llm)
    with load(second) as llm:
        q, found = log_probabilities(llm), llm.kl_divergence(base, ids())
    tokens = np.array(ids()).reshape(CHUNKS, CONTEXT)[:, CONTEXT // 2 + 1 :, None]
    own, other = (np.take_along_axis(each, tokens, -1)[..., 0] for each in (q, p))
    kld = (np.exp(p) * (p - q)).sum(axis=-1)
    n, same = kld.size, q.argmax(axis=-1) == p.argmax(axis=-1)
    differences = np.exp(own) - np.exp(other)
    ratios = other - own
    want = {
        "PPL(Q)": (math.exp(-own.mean()), math.exp(-own.mean()) * own.std() / math.sqrt(n - 1)),
        "PPL(base)": (math.exp(-other.mean()),),
        "correlation of ln PPL": (np.corrcoef(own.ravel(), other.ravel())[0, 1],),
        # The error of a mean of differences, which the variances and the covariance give, too.
        "ln(PPL(Q)/PPL(base))": (ratios.mean(), ratios.std() / math.sqrt(n - 1)),
        "PPL(Q)/PPL(base)": (math.exp(ratios.mean()),),
        "PPL(Q)-PPL(base)": (math.exp(-own.mean()) - math.exp(-other.mean()),),
    }
    check(found.perplexities(), want)
    want = {
        "mean": (kld.mean(), kld.std() / math.sqrt(n - 1)),
        "maximum": (kld.max(),), "median": (np.median(kld),), "minimum": (kld.min(),),
        "99%": (np.percentile(kld, 99),), "0.1%": (np.percentile(kld, 0.1),),
    }  # fmt: skip
    check(found.divergences(), want)
    share = same.mean()
    want = {
        "mean": (differences.mean(), differences.std() / math.sqrt(n - 1)),
        "RMS": (math.sqrt((differences**2).mean()),),
        "25%": (np.percentile(differences, 25),),
        "same top token": (share, math.sqrt(share * (1 - share) / (n - 1))),
    }
    check(found.probabilities(), want)
    assert 0.2 < share < 1 and kld.mean() > 0.001  # the models differ, but not in everything


def check(found, want: dict[str, tuple[float, ...]]) -> None:
    named = {each.name: each[1:] for each in found}
    assert len(named) == len(found)
    for name, values in want.items():
        for have, value in zip(named[name], values):
            assert have == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_a_model_does_not_diverge_from_itself(paths):
    first, _, base = paths
    with load(first) as llm:
        found = llm.kl_divergence(base)
    assert np.array_equal(found.logprobs, found.base_logprobs.astype(np.float32))
    assert np.abs(found.kld).max() < 1e-4 and found.same_top.all()
    assert "PPL(Q)" in found.table() and found.as_dict()["chunks"] == CHUNKS


def test_fewer_chunks_are_the_first_ones(paths):
    _, second, base = paths
    with load(second) as llm:
        some, every = llm.kl_divergence(base, chunks=3), llm.kl_divergence(base)
        assert np.array_equal(some.kld, every.kld[:3])


@pytest.mark.parametrize("vocab", [1, 7, 5000])
def test_encoding(vocab):
    """The most likely token is exact, and what follows is within the steps of the codes."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal(vocab) * 6
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    logprobs[1:2] = -np.inf
    row = np.zeros(1, base_file.row_dtype(vocab))[0]
    base_file.encode(logprobs, 0, row)
    found, top = base_file.decode(row), logprobs.max()
    below = np.minimum(top - logprobs, 16)
    np.testing.assert_allclose(top - found, below, atol=3e-4)
    assert found[logprobs.argmax()] == top and row["token"] == logprobs[0]
    near = below < 0.1
    np.testing.assert_allclose(found[near], logprobs[near], atol=5e-5)


def test_a_base_file_that_does_not_belong_to_the_model(paths, tmp_path):
    first, _, base = paths
    with load(first) as llm:
        other = ids()
        other[40] ^= 1
        with pytest.raises(RequestError, match=f"{base}: it was written for another text"):
            llm.kl_divergence(base, other)
    data = bytearray(base.read_bytes())
    data[base_file.HEADER.itemsize - 1] ^= 1
    changed = tmp_path / "changed"
    changed.write_bytes(data)
    with load(first) as llm, pytest.raises(RequestError, match="with another vocabulary"):
        llm.kl_divergence(changed)
    chunks = np.zeros((2, 8), np.int32)
    with BaseFileWriter(changed, chunks, 5, bytes(32)) as writer:
        for _ in range(2):
            writer.write(np.zeros(3, base_file.row_dtype(5)))
    with load(first) as llm, pytest.raises(RequestError, match="log-probabilities of 5 tokens"):
        llm.kl_divergence(changed)


def test_a_damaged_base_file_is_an_error(paths, tmp_path):
    """Shortened anywhere, lengthened, and with changed bytes: an error that names the file, or
    statistics of other values."""
    _, second, base = paths
    data, path = base.read_bytes(), tmp_path / "damaged"
    rng = np.random.default_rng(3)
    with load(second) as llm:
        for size in (0, 7, 8, 40, 55, 56, 57, 900, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises(ModelFileError, match=str(path)):
                llm.kl_divergence(path)
        path.write_bytes(data + b"\0")
        with pytest.raises(ModelFileError, match="its header asks for"):
            llm.kl_divergence(path)
        for _ in range(60):
            changed = bytearray(data)
            head = base_file.HEADER.itemsize + 4 * CONTEXT * CHUNKS + 20
            changed[rng.integers(head)] = rng.integers(256)
            path.write_bytes(changed)
            try:
                llm.kl_divergence(path, chunks=1)
            except GraphllmError as error:
                assert str(path) in str(error)


def test_a_file_that_cannot_be_written_leaves_nothing(paths, tmp_path):
    first, *_ = paths
    with load(first) as llm:
        for path, message in (
            (tmp_path / "missing" / "file", "No such file or directory"),
            (tmp_path, "is a directory"),
            ("/dev/null", "is no regular file"),
        ):
            with pytest.raises(RequestError, match=f"{path}: {message}"):
                llm.perplexity(ids(), CONTEXT, save_base=path)

        def stop(done: int, total: int, value: float) -> None:
            assert [each.suffix for each in tmp_path.iterdir()] == [".part"]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm.perplexity(ids(), CONTEXT, save_base=tmp_path / "base", progress=stop)
    assert not list(tmp_path.iterdir())
