"""Sampled ids follow the exact distribution, and noise is independent of everything but its key."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from cuda_cases import need_gpu

from graphllm import ops
from graphllm.graph.tensor import Var, feed
from graphllm.ops.random_numbers import gumbel, uniform
from graphllm.ops.sampling_filters import FILTERS
from graphllm.runtime.executor import Executor

ROWS = 4000  # of one run
KINDS = {
    "temperature": "f32", "top_k": "i32", "top_p": "f32", "min_p": "f32", "seed": "i64",
    "count": "i32", "sample_index": "i32",
}  # fmt: skip
OFF = dict(zip(FILTERS, (0.0, 1.0, 1.0, 0.0, 0.0, 0.1), strict=True))
CASES = {
    "temperature": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k, top_p, min_p": {"top_k": 12, "top_p": 0.95, "min_p": 0.02, "temperature": 1.7},
    "typical_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.0, "temperature": 2.0},
    "XTC": {"xtc_probability": 0.4, "xtc_threshold": 0.08},
    "all": {
        "top_n_sigma": 2.5, "top_k": 15, "typical_p": 0.97, "top_p": 0.95, "min_p": 0.01,
        "xtc_probability": 0.5, "temperature": 1.3,
    },
}  # fmt: skip
LOGITS = {
    "random": 2 * np.random.default_rng(7).standard_normal(23).astype(np.float32),
    "equal": np.full(5, -3.5, np.float32),
    "ties": np.array([1, 2, 2, 0, 2, -np.inf, 1], np.float32),
    "one": np.array([-np.inf, -np.inf, -4, -np.inf], np.float32),
}


def exact(row: np.ndarray, case: dict) -> np.ndarray:
    """The probabilities of all ids, from the oracle of the filters."""
    table = {**OFF, **{k: v for k, v in case.items() if k in OFF}}
    p, chance = np.zeros(len(row)), table["xtc_probability"]
    for share, xtc in ((1 - chance, 0.0), (chance, 1.0)):
        settings = np.array([[*{**table, "xtc_probability": xtc}.values()]], np.float32)
        left = oracles.filter_logits(row[None], settings, [case.get("top_k", 0)], [0], [0], [0])[0]
        weight = np.exp((left - left.max()) / case.get("temperature", 1.0))
        p += share * weight / weight.sum()
    return p


def draws(row: np.ndarray, case: dict, count: int, order: tuple[str, ...]) -> np.ndarray:
    """Sample at ``count`` positions, with several seeds and sample indices."""
    n = Var("N", 1, ROWS)
    logits = feed("logits", (n, len(row)), "f32")
    leaves = {name: feed(name, (n,), kind) for name, kind in KINDS.items()}
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    table = None
    if {"typical_p", "top_n_sigma", "xtc_probability"} & case.keys():
        table = {**OFF, **{k: v for k, v in case.items() if k in OFF}}
        k = feed("filter_top_k", (n,), "i32")
        settings = feed("filters", (n, len(FILTERS)), "f32")
        key = (leaves["seed"], leaves["count"], leaves["sample_index"])
        logits = ops.filter_logits(logits, settings, k, *key)
        values |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plan = (executor := Executor(backends=order)).compile(
        {"y": ops.sample(logits, *leaves.values())}
    )
    found = []
    for at in range(0, count, ROWS):
        index = np.arange(at, at + ROWS)
        feeds = {"seed": index % 3 - 1, "count": index // 3, "sample_index": index % 2}
        feeds |= {name: np.full(ROWS, values[name]) for name in leaves.keys() - feeds.keys()}
        feeds = {name: x.astype(leaves[name].dtype.numpy) for name, x in feeds.items()}
        feeds["logits"] = np.tile(row, (ROWS, 1))
        if table is not None:
            feeds["filters"] = np.tile(np.array([*table.values()], np.float32), (ROWS, 1))
            feeds["filter_top_k"] = np.full(ROWS, case.get("top_k", 0), np.int32)
        found.append(executor.run(plan, feeds)["y"])
    return np.concatenate(found)


def deviation(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic as a normal deviate (Wilson and Hilferty 1931); 0 for one outcome."""
    assert counts[p == 0].sum() == 0
    expected = counts.sum() * p
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if (free := len(expected) - 1) == 0:
        return 0.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def check(kind: str, case: str, count: int, order: tuple[str, ...]) -> None:
    row = LOGITS[kind]
    ids = draws(row, CASES[case], count, order)
    assert deviation(np.bincount(ids, minlength=len(row)), exact(row, CASES[case])) < 3.7  # 1e-4


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [("reference",), ("cpu",)], ids="-".join)
def test_frequencies(order, case, kind):
    check(kind, case, ROWS, order)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order, count", [("reference", 20_000), ("cpu", 200_000)])
def test_frequencies_of_many_ids(order, count, case):
    check("random", case, count, (order,))  # the reference draws 8,000 a second


@pytest.mark.cuda
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("case", CASES)
def test_frequencies_on_cuda(case, kind):
    need_gpu()
    check(kind, case, 200_000, ("cuda",))


@pytest.mark.parametrize("order", [("reference",), ("cpu",)], ids="-".join)
def test_successive_positions_are_independent(order):
    """Pairs of ids at positions c and c + 1, and of samples 0 and 1, have the product's law."""
    row = LOGITS["random"][:4]
    p = exact(row, {})
    ids = draws(row, {}, 2 * ROWS, order)
    for step in (3, 1):  # the next position of a seed; another seed and sample of a position
        pairs = ids[:-step][:: 2 * step] * 4 + ids[step:][:: 2 * step]
        assert deviation(np.bincount(pairs, minlength=16), np.outer(p, p).ravel()) < 3.7


def test_noise_of_neighbours_is_not_correlated():
    """Of positions, samples, seeds and ids."""
    base = gumbel(uniform(5, 10, 0, 2**16))
    others = [uniform(5, 11, 0, 2**16), uniform(5, 10, 1, 2**16), uniform(6, 10, 0, 2**16)]
    for other in (*map(gumbel, others), np.roll(base, 1), np.roll(base, 4)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / 2**8
    assert abs(base.mean() - np.euler_gamma) < 4.5 * math.pi / math.sqrt(6) / 2**8


@pytest.mark.parametrize("case", [{}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.01}], ids=str)
def test_a_small_change_of_logits_changes_no_id(case):
    """Except at a near tie: 4,000 ids of 1,003, with an error as another backend's."""
    row = 3 * np.random.default_rng(1).standard_normal(1003).astype(np.float32)
    rng = np.random.default_rng(2)
    nearby = row + rng.uniform(-2e-6, 2e-6, 1003).astype(np.float32)
    before, after = (draws(x, case, ROWS, ("cpu",)) for x in (row, nearby))
    assert (before != after).sum() <= 1


def test_noise_does_not_depend_on_other_ids():
    """A row whose last ids are excluded gives the ids of the shorter row."""
    row = LOGITS["random"]
    longer = np.concatenate([row, np.full(70, -np.inf, np.float32)])
    assert (draws(row, {}, ROWS, ("cpu",)) == draws(longer, {}, ROWS, ("cpu",))).all()


# ---------------------------------------------------------------------------------------- filters


def kept(row: np.ndarray, case: dict) -> np.ndarray:
    """Whether the CPU keeps each id."""
    n = Var("N", 1, 1)
    table = {**OFF, **{k: v for k, v in case.items() if k in OFF}}
    feeds = {
        "logits": row[None], "filters": np.array([[*table.values()]], np.float32),
        "top_k": np.array([case.get("top_k", 0)], np.int32), "seed": np.zeros(1, np.int64),
        "count": np.zeros(1, np.int32), "sample_index": np.zeros(1, np.int32),
    }  # fmt: skip
    leaves = [feed(name, (n, *x.shape[1:]), str(x.dtype).replace("float", "f").replace("int", "i"))
              for name, x in feeds.items()]  # fmt: skip
    plan = (executor := Executor(backends=("cpu",))).compile({"y": ops.filter_logits(*leaves)})
    return executor.run(plan, feeds)["y"][0] > -np.inf


@pytest.mark.parametrize("name", [c for c in CASES if c not in ("temperature", "cold", "hot")])
def test_filters_do_not_depend_on_the_order_of_ids_or_a_shift(name):
    case = {**CASES[name], **({"xtc_probability": 1.0} if "xtc_probability" in CASES[name] else {})}
    rng = np.random.default_rng(3)
    exact_after_shift = np.round(rng.standard_normal(1100) * 2**13) / 2**12
    row = rng.permutation(np.unique(exact_after_shift)[-1001:]).astype(np.float32)
    row[500:502] = 8.0, 8.5  # above XTC's threshold
    order = rng.permutation(1001)
    have = kept(row, case)
    assert 0 < have.sum() < 1001
    assert (kept(row[order], case) == have[order]).all()
    assert (kept(row + 64, case) == have).all()


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(12))
def test_filters_and_penalties_as_transformers(seed):
    """Chains of processors at temperature 1, on random logits; XTC and top-n-sigma have none."""
    import torch
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(seed)
    width, eos = 997, 3
    logits = 3 * rng.standard_normal((1, width)).astype(np.float32)
    past = rng.integers(0, width, (1, 50)).astype(np.int32)
    k, typical, top_p, min_p = (
        [0, 50, 200][seed % 3], [1.0, 0.9, 0.5][seed // 3 % 3], [1.0, 0.9][seed % 2],
        [0.0, 0.02][seed // 2 % 2],
    )  # fmt: skip
    repeat = np.float32([1.0, 1.3, 0.7][seed % 3])
    bias = {7: 2.5, 11: -4.0, 13: -math.inf}
    chain = [
        hf.SequenceBiasLogitsProcessor({(i,): b for i, b in bias.items() if b > -math.inf}),
        hf.NoBadWordsLogitsProcessor([[13]]),
        hf.MinLengthLogitsProcessor(100, eos, device="cpu"),
        hf.RepetitionPenaltyLogitsProcessor(float(repeat)),
        *([hf.TopKLogitsWarper(k)] if k else []),
        *([hf.TypicalLogitsWarper(typical)] if typical < 1 else []),
        *([hf.TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([hf.MinPLogitsWarper(min_p)] if min_p else []),
    ]
    want = torch.from_numpy(logits.copy())
    for each in chain:
        want = each(torch.from_numpy(past.astype(np.int64)), want)
    one = [np.array([v], np.int32) for v in (0, 1)]
    lists = np.array([[*bias]], np.int32), np.array([[*bias.values()]], np.float32)
    none, stop = np.array([[-1]], np.int32), np.array([[eos]], np.int32)
    x = ops.get("bias_logits").reference(logits, *lists, none, stop, *one)
    x = ops.get("penalise").reference(
        x, past, np.array([50], np.int32), none, np.array([[repeat, 0, 0, 0, 1]], np.float32),
        np.array([[-1, 2, 0]], np.int32),
    )  # fmt: skip
    table = np.array([[0, typical, top_p, min_p, 0, 0.1]], np.float32)
    x = ops.get("filter_logits").reference(
        x, table, np.array([k], np.int32), np.zeros(1, np.int64), *one
    )
    np.testing.assert_allclose(x, want.numpy(), rtol=1e-6)
