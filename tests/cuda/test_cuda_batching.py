"""Many sequences at once on a GPU: each request gets the ids that it gets alone.

Kernels for one token, a few and many add in different orders, so where logits within rounding would
give another id, that id is right, too; what follows it is not compared.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import windowed_model
from cuda_cases import need_gpu
from request_runs import answer, ids_of, logprobs_of, requests, run_at_random

from graphllm import ops
from graphllm.engine.sampling_feeds import sampling_feeds, sampling_row
from graphllm.engine.sequence import ActiveSequence

pytestmark = pytest.mark.cuda
ROUNDING, DRAWS = 1e-3, 400  # of logits; tried roundings
REQUESTS, SEED = 120, 20


@pytest.fixture(autouse=True)
def _gpu():
    need_gpu()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("batching"))


class Row:
    """A request after its first ids, as the feeds of sampling need it."""

    def __init__(self, limits, prompt, settings, ids) -> None:
        self.settings = sampling_row(limits, settings, ())
        self.sequence = ActiveSequence([*prompt, *ids], len(prompt))
        self.count = len(ids)


def possible(engine, prompt, settings, ids) -> set[int]:
    """Return the ids that the reference samples after ``ids``, from logits within rounding."""
    row = Row(engine.limits, prompt, settings, ids)
    tokens = row.sequence.tokens
    logits = windowed_model.logits(engine, tokens)[-1]
    feeds = sampling_feeds(engine.limits, [row], row.settings, history=True)
    feeds = {name: np.repeat(x, DRAWS, 0) for name, x in feeds.items()}
    noise = np.random.default_rng(0).uniform(-ROUNDING, ROUNDING, (DRAWS, len(logits)))
    noise[0] = 0
    x = ops.get("penalise").reference(
        (logits + noise).astype(np.float32), feeds["history"],
        np.full(DRAWS, len(tokens), np.int32), feeds["breakers"], feeds["penalty_factors"],
        feeds["penalty_windows"],
    )  # fmt: skip
    for process in settings.processors:
        x = np.stack([process(tokens, each) for each in x])
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "count", "sample_index")
    return set(ops.get("sample").reference(x, *(feeds[name] for name in names)).tolist())


@pytest.mark.parametrize(
    "limits",
    [
        {"sequences": 6, "kv_blocks": 22},  # some are preempted
        {"sequences": 40, "tokens": 64},
    ],
    ids=["few", "many"],
)
def test_random_requests_get_what_they_get_alone(path, limits):
    rng = random.Random(SEED)
    asked = requests(rng, REQUESTS, processors=True)
    single = windowed_model.make_engine(path, backends=("cuda",))
    want = [answer(single, *each) for each in asked]
    engine = windowed_model.make_engine(path, backends=("cuda",), **limits)
    have = run_at_random(engine, asked, rng)
    assert [len(ids) for ids in have] == [len(ids) for ids in want]
    wrong, ties = [], 0
    for (prompt, settings), x, y in zip(asked, have, want):
        a, b = ids_of(x), ids_of(y)
        at = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        if settings.logprobs is not None:
            near = [logprobs_of([each[:at]]) for each in (x, y)]
            np.testing.assert_allclose(*near, atol=4 * ROUNDING)
        if at is None:
            continue
        ties += 1
        if not {a[at], b[at]} <= possible(single, prompt, settings, b[:at]):
            wrong.append(f"token {at} of {settings}: {a[at]}, alone {b[at]}")
    assert not wrong
    assert ties <= REQUESTS // 20
    assert engine.scheduler.preempted > 0 or not engine.limits.kv_blocks
    assert engine.manager.hits > 0 and set(engine.manager.held.values()) == {0}
